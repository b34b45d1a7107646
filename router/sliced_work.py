"""Long work of a router, done a slice at a time, so that other messages never wait for the whole of it."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

PAGES_PER_SLICE: Final = 512  # computing or expecting their keys takes less than half a millisecond
BACKLOG: Final = 8  # pieces of work
CallSoon: TypeAlias = Callable[[Callable[[], None]], object]


class SlicedWork:
    """Does work in turns of the host's event loop.

    Work is an iterator, and each of its steps is a slice. A turn does one slice, and one more for every
    BACKLOG pieces of work that wait; the pieces of work take turns.
    """

    def __init__(self, call_soon: CallSoon | None = None, *, num_pages: int = PAGES_PER_SLICE) -> None:
        """call_soon: has the host make a call in its next turn. None: all work is done when it is added.

        num_pages: of a slice.
        """
        self.num_pages = num_pages
        self._call_soon = call_soon
        self._work: deque[Iterator[None]] = deque()
        self._has_turn = False  # the next turn is ordered

    @property
    def is_deferred(self) -> bool:
        """Work that is added may be done later."""
        return self._call_soon is not None

    def add(self, work: Iterator[None]) -> None:
        """Do the first slice now, and the others in later turns."""
        if self._call_soon is None:
            for _ in work:
                pass
        elif _advance(work):
            self._work.append(work)
            self._order_turn()

    def _turn(self) -> None:
        self._has_turn = False
        try:
            for _ in range(1 + len(self._work) // BACKLOG):
                work = self._work.popleft()
                if _advance(work):
                    self._work.append(work)
        finally:  # work that failed is dropped, and holds up no other
            self._order_turn()

    def _order_turn(self) -> None:
        if self._work and not self._has_turn and self._call_soon is not None:
            self._has_turn = True
            self._call_soon(self._turn)


def _advance(work: Iterator[None]) -> bool:
    """Do one slice. Returns False when no work is left."""
    for _ in work:
        return True
    return False
