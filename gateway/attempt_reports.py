"""What routers have yet to be told of attempts: that they have started, and that they have ended."""

from typing import NamedTuple

from baton.colleagues import Colleagues
from baton.control import Ended, Started
from baton.gateway.stream_log import Key, Stream
from baton.wire_types import MAX_EVENTS


class _Untold(NamedTuple):
    """To a router."""

    started: list[Key]
    ended: list[tuple[Key, int]]  # with the tokens that each has answered


class AttemptReports:
    """Kept until `flush`, so that what a step has made leaves in one message."""

    def __init__(self, colleagues: Colleagues) -> None:
        self._colleagues = colleagues
        self._untold: dict[str, _Untold] = {}  # by router

    def started(self, stream: Stream) -> None:
        self._of(stream).started.append(stream.key)

    def ended(self, stream: Stream) -> None:
        self._of(stream).ended.append((stream.key, stream.num_answered))

    def flush(self) -> None:
        """Tell each router what became of the attempts that it was asked for; the others, if it is gone."""
        if not self._untold:
            return
        untold, self._untold = self._untold, {}
        for router_id, (started, ended) in untold.items():
            router = self._colleagues.peer(router_id)
            for told in [router] if router is not None else self._colleagues.routers:
                for first in range(0, len(started), MAX_EVENTS):
                    told.send(Started(attempts=tuple(started[first : first + MAX_EVENTS])))
                for first in range(0, len(ended), MAX_EVENTS):
                    part = ended[first : first + MAX_EVENTS]
                    num_tokens = tuple(num_answered for _, num_answered in part)
                    told.send(Ended(attempts=tuple(key for key, _ in part), num_tokens=num_tokens))

    def _of(self, stream: Stream) -> _Untold:
        return self._untold.setdefault(stream.router, _Untold([], []))
