"""What the HTTP side needs of the cluster; `Frontend` is it, and so is a single engine in tests."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from baton.errors import BatonError
from baton.operating import Status
from baton.request import Request
from baton.token_event import TokenEvent
from baton.worker import Worker


class Sink(Protocol):
    """Where one request's tokens go: on the loop's thread, each once, in order."""

    def tokens(self, events: Sequence[TokenEvent]) -> None:
        """With a finish reason on the last event, the end."""

    def failed(self, error: BatonError) -> None:
        """The end, without an answer."""


class Service(Protocol):
    def open(self, request: Request, sink: Sink, *, beside: str = "") -> None:
        """Begin a request of one choice. Raises Overloaded, and keeps nothing of it, when there are too many.

        `beside`: the decode worker that has the prompt already.
        """

    def cancel(self, request_id: str) -> None:
        """Its sink hears nothing more. What is unknown, or has ended, is no error."""

    def decode_worker(self, request_id: str) -> str:
        """The worker that the request runs on now; "" for none."""

    @property
    def is_ready(self) -> bool:
        """Whether a request that came now could be sent somewhere."""

    @property
    def why_not_ready(self) -> str:
        """What is missing, for operators and clients to read; "" when it is ready."""

    @property
    def workers(self) -> Sequence[Worker]: ...

    @property
    def prefill_seen_s(self) -> float | None:
        """When both were last seen: a prompt whose pages a prefill worker transferred, and an answer to this
        gateway of a decode worker that such a prompt was sent to. By the service's clock; None: never.
        """

    @property
    def status(self) -> Status | None:
        """What the router last told of its workers."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Replays, drops and the like, by name."""
