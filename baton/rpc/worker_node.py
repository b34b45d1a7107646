"""The base of both worker roles: membership, drain, overload level, and reports to routers."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection
from typing import Final, Protocol

from baton.errors import InvalidRequest
from baton.messages.codec import AnyMessage
from baton.messages.control import KvEventsWanted, Members, Pressure
from baton.messages.operations import Drain
from baton.messages.status import OverloadLevel
from baton.messages.workers import Load, Worker
from baton.request import Request
from baton.rpc.peers import Peer, PeerRegistry
from baton.rpc.reports import WorkerReports

MAX_ENDED: Final = 4096  # requests that are remembered


class EndedAttempts:
    """Attempts that are over. A router that stood still may send the order for one of them late.

    The end of an attempt is also the end of all earlier attempts at its request.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[str, int] = OrderedDict()  # request id -> attempt, oldest end first

    def add(self, request_id: str, attempt: int) -> None:
        self._last[request_id] = max(attempt, self._last.pop(request_id, 0))
        if len(self._last) > MAX_ENDED:
            self._last.popitem(last=False)

    def __contains__(self, key: tuple[str, int]) -> bool:
        """key: request id and attempt."""
        return key[1] <= self._last.get(key[0], -1)


def check_one_choice(request: Request) -> None:
    """Raise InvalidRequest for a request of several choices: each choice is an attempt of its own."""
    if request.sampling.n != 1:
        raise InvalidRequest(f"an attempt has one choice, got n {request.sampling.n}")


class PageLinks(Protocol):
    """Links to other workers that carry KV pages."""

    def keep_up(self, workers: Collection[Worker]) -> None:
        """Dial each of these workers that has no link yet."""


class WorkerNode(ABC):
    """A Node. All calls come from one thread."""

    def __init__(self, peer_registry: PeerRegistry, links: PageLinks, reports: WorkerReports) -> None:
        self.hello = peer_registry.hello
        self.is_draining = False
        self._peer_registry = peer_registry
        self._page_links = links
        self._worker_reports = reports
        self._levels: dict[str, OverloadLevel] = {}  # router's id -> its overload level

    @property
    @abstractmethod
    def attempts(self) -> tuple[tuple[str, int], ...]:
        """The attempts that the worker works on: (request_id, attempt) each."""

    @abstractmethod
    def load(self) -> Load:
        """Return the worker's load for its heartbeat."""

    def drain(self) -> None:
        """Take no new attempts, finish the running ones."""
        self.is_draining = True
        self._worker_reports.heartbeat(self, at_once=True)

    def joined(self, peer: Peer) -> None:
        """See Node."""
        self._peer_registry.joined(peer)
        self._peer_registry.report(self._reachable())

    def left(self, peer: Peer) -> None:
        """See Node."""
        if self._peer_registry.left(peer):
            if self._levels.pop(peer.hello.id, None) is not None:
                self._pressed(self.level)
            self._lost(peer)
            self._lost_workers(self._peer_registry.recount())
            self._peer_registry.report(self._reachable())

    def tick(self) -> None:
        """See Node."""
        self._peer_registry.tick()
        self._keep_up()

    def received(self, peer: Peer, message: AnyMessage) -> None:
        """See Node. Handles the messages that both roles share; the others go to `_heard`."""
        match message:
            case Members() if self._peer_registry.is_router(peer):
                self._lost_workers(self._peer_registry.changed(peer, message))
                self._peer_registry.keep_up()
                self._keep_up()
            case Drain() if self._peer_registry.is_router(peer):
                self.drain()
            case Pressure() if self._peer_registry.is_router(peer):
                self._levels[peer.hello.id] = message.level
                self._pressed(self.level)
            case KvEventsWanted() if self._peer_registry.is_router(peer):
                self._worker_reports.want(peer)
            case _:
                self._heard(peer, message)

    def _keep_up(self) -> None:
        self._page_links.keep_up(self._peer_registry.with_pages())
        self._peer_registry.report(self._reachable())
        self._worker_reports.heartbeat(self)

    @property
    def level(self) -> OverloadLevel:
        """The highest overload level of any router."""
        return max(self._levels.values(), default=OverloadLevel.CALM)

    def _pressed(self, level: OverloadLevel) -> None:  # noqa: B027  (a role may have nothing to do)
        """Apply the cluster's overload level."""

    @abstractmethod
    def _reachable(self) -> list[str]:
        """Return the ids of the workers that this worker could work with now."""

    @abstractmethod
    def _lost(self, peer: Peer) -> None:
        """End the work for a process without a connection."""

    @abstractmethod
    def _lost_workers(self, ids: list[str]) -> None:
        """End the work with these workers, which no router lists any more; `ids` may be empty."""

    @abstractmethod
    def _heard(self, peer: Peer, message: AnyMessage) -> None:
        """Handle a message for this role alone; raise ProtocolError for any other message."""
