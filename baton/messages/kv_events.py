"""What a worker tells its routers of the pages that others can find at it.

1. Nothing before a router has asked for it (PagesWanted): then all that is known, afresh.
2. Changes follow, as they come and at most every NEWS_S, numbered through the worker's whole life.
3. When one asks again, or for the first time, each of those that have asked is told all again: what is told
   is the same for all of them.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from baton.clock import Clock
from baton.messages.control import KvEventBatch
from baton.messages.workers import Tier
from baton.rpc.peers import Peer, PeerRegistry

NEWS_S: Final = 0.05
PAGES_PER_MESSAGE: Final = 8192  # a fifth of what fits a frame


class Changes(Protocol):
    """Of an engine: see engine/cache/page_events.py. (key, page, generation) each."""

    @property
    def is_afresh(self) -> bool: ...
    @property
    def device(self) -> Sequence[tuple[bytes, int, int]]: ...
    @property
    def host(self) -> Sequence[tuple[bytes, int, int]]: ...


class Knowing(Protocol):
    def take_page_changes(self, *, is_afresh: bool = False) -> Changes: ...


class KvEventPublisher:
    def __init__(self, peer_registry: PeerRegistry, clock: Clock) -> None:
        self._peer_registry = peer_registry
        self._clock = clock
        self._asked: list[Peer] = []  # routers; some may be gone
        self._is_asked_anew = False
        self._next_s = clock.now_s()
        self._next_number = 0

    def want(self, router: Peer) -> None:
        """It is told all in the next `tell`."""
        self._asked = [*self.readers, router] if router not in self._asked else self.readers
        self._is_asked_anew, self._next_s = True, self._clock.now_s()

    @property
    def readers(self) -> list[Peer]:
        """The routers that are there and have asked: no other has a use for it."""
        return [router for router in self._asked if self._peer_registry.is_router(router)]

    @property
    def is_wanted(self) -> bool:
        return bool(self.readers)

    def tell(self, engine: Knowing) -> None:
        """To be called after each step; says nothing where there is nothing to say, or just was."""
        now_s = self._clock.now_s()
        if now_s < self._next_s or not self.is_wanted:
            return
        changes = engine.take_page_changes(is_afresh=self._is_asked_anew)
        self._is_asked_anew = False
        is_afresh = changes.is_afresh
        if is_afresh or changes.device:
            self._send(Tier.DEVICE, changes.device, is_afresh=is_afresh)
        if changes.host:
            self._send(Tier.HOST, changes.host, is_afresh=False)
        if is_afresh or changes.device or changes.host:
            self._next_s = now_s + NEWS_S

    def _send(self, tier: Tier, changes: Sequence[tuple[bytes, int, int]], *, is_afresh: bool) -> None:
        for first in range(0, max(1, len(changes)), PAGES_PER_MESSAGE):
            told = changes[first : first + PAGES_PER_MESSAGE]
            events = KvEventBatch(
                first=self._next_number,
                keys=b"".join([key for key, _, _ in told]),
                pages=tuple([page for _, page, _ in told]),
                generations=tuple([generation for _, _, generation in told]),
                tier=tier,
                is_afresh=is_afresh and not first,
            )
            for router in self.readers:
                router.send(events)
            self._next_number += len(told)
