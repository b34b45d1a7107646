"""Which pages are expected at whom, and until when."""

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Final, NamedTuple

from baton.router.index_holder import Holder
from baton.router.index_table import Keys

MAX_EXPECTATIONS: Final = 2**16


class Expectation(NamedTuple):
    until_s: float
    number: int  # no two have the same
    holder: Holder
    keys: Keys


class Expectations:
    """The first to end comes first, in whatever order they were made."""

    def __init__(self) -> None:
        self._heap: list[Expectation] = []
        self._num_made = 0

    def number(self) -> int:
        """Of the next one; it fits a generation's bits."""
        self._num_made = (self._num_made + 1) % 2**32
        return self._num_made

    def add(self, expectation: Expectation) -> None:
        heappush(self._heap, expectation)

    def over(self, now_s: float) -> Iterator[Expectation]:
        """Take out those whose time is over, and the first to end where there are too many."""
        while self._heap and (self._heap[0].until_s <= now_s or len(self._heap) > MAX_EXPECTATIONS):
            yield heappop(self._heap)
