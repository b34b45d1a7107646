"""Whose long text is worked on next: tenants take turns for the threads, by characters.

1. `take`: a place at once, if one is free; else it waits, behind its tenant's own. Too many wait, or too many
   of its tenant's: it is sent away.
2. Whoever leaves gives its place to the tenant that has had least of those that wait (fair_share.py).
3. Who is cancelled meanwhile takes nothing: a place that it was just given goes on to the next.
"""

import asyncio
from collections import deque
from typing import Final

from baton.errors import Overloaded
from baton.router.fair_share import FairShare
from baton.tenancy import has_place

MAX_WAITING: Final = 256
RETRY_AFTER_S: Final = 1.0


class _Waiting:
    __slots__ = ("num_chars", "turn")

    def __init__(self, num_chars: int) -> None:
        self.num_chars = num_chars
        self.turn = asyncio.get_running_loop().create_future()


class TextTurns:
    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._num_free = num_places
        self._num_waiting = 0
        self._share = FairShare()
        self._lanes: dict[str, deque[_Waiting]] = {}  # by tenant, none empty

    @property
    def num_taken(self) -> int:
        """Places that are taken, and those who wait for one."""
        return self._num_places - self._num_free + self._num_waiting

    async def take(self, tenant: str, num_chars: int) -> None:
        """Wait for a place; `leave` is due then. Raises Overloaded."""
        if self._num_free:
            self._num_free -= 1
            return
        lane = self._lanes.get(tenant, deque[_Waiting]())
        if not has_place(tenant, 1, len(lane), MAX_WAITING - self._num_waiting):
            message = f"{self._num_waiting} texts wait for their turn, {len(lane)} of them the tenant's"
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S)
        waiting = _Waiting(num_chars)
        lane.append(waiting)
        self._lanes[tenant] = lane
        self._num_waiting += 1
        self._share.join(tenant, 1.0)
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if not waiting.turn.cancelled():
                self.leave()
            elif waiting in self._lanes.get(tenant, ()):
                self._remove(tenant, waiting)
            raise

    def leave(self) -> None:
        self._share.age()  # who was away may have what its share of the last few turns was
        while (tenant := self._share.first()) is not None:
            waiting = self._lanes[tenant][0]
            is_there = not waiting.turn.cancelled()  # else it has gone, and its task has not run since
            if is_there:
                self._share.serve(tenant, waiting.num_chars)
                waiting.turn.set_result(None)
            self._remove(tenant, waiting)
            if is_there:
                return
        self._num_free += 1

    def _remove(self, tenant: str, waiting: _Waiting) -> None:
        lane = self._lanes[tenant]
        lane.remove(waiting)
        self._num_waiting -= 1
        if not lane:
            del self._lanes[tenant]
            self._share.leave(tenant)
