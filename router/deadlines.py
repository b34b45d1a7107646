"""When waiting is in vain, of each request that waits and has such a time."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Final

from baton.router.books import Key
from baton.router.tenant_queues import TenantQueues

MIN_KEPT: Final = 1024  # of whatever waits or did


class Deadlines:
    def __init__(self, queues: TenantQueues) -> None:
        self._queues = queues
        self._times: list[tuple[float, Key]] = []  # a heap; those that wait no more are void

    def add(self, at_s: float, key: Key) -> None:
        heappush(self._times, (at_s, key))
        if len(self._times) > 2 * len(self._queues) + MIN_KEPT:  # most are void
            self._times = [entry for entry in self._times if entry[1] in self._queues]
            heapify(self._times)

    def passed(self, now_s: float) -> Iterator[Key]:
        """Each that waits and whose time has passed, once."""
        while self._times and self._times[0][0] <= now_s:
            _, key = heappop(self._times)
            if key in self._queues:
                yield key
