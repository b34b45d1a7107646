"""Long work of a router, done in slices, so that messages are handled in between."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

PIECES_PER_EXTRA_SLICE: Final = 8
CallSoon: TypeAlias = Callable[[Callable[[], None]], object]


class SlicedWork:
    """Does work in turns of the host's event loop.

    Work is an iterator; each step is a slice. A turn of the loop does one slice, and one more for every
    PIECES_PER_EXTRA_SLICE waiting pieces of work, round robin.
    """

    def __init__(self, call_soon: CallSoon | None = None) -> None:
        """call_soon: has the host make a call in its next turn. None: all work is done when it is added."""
        self._call_soon = call_soon
        self._work: deque[Iterator[None]] = deque()
        self._is_scheduled = False  # the host makes the call

    @property
    def is_deferred(self) -> bool:
        """True when added work is finished in later turns."""
        return self._call_soon is not None

    @property
    def num_waiting(self) -> int:
        """The number of pieces of work that later turns finish."""
        return len(self._work)

    def add(self, work: Iterator[None]) -> None:
        """Do the first slice now, and the others in later turns."""
        if self._call_soon is None:
            for _ in work:
                pass
        elif _advance(work):
            self._work.append(work)
            self._schedule()

    def _run_slices(self) -> None:
        self._is_scheduled = False
        try:
            for _ in range(1 + len(self._work) // PIECES_PER_EXTRA_SLICE):
                work = self._work.popleft()
                if _advance(work):
                    self._work.append(work)
        finally:  # work that failed is dropped, and holds up no other
            self._schedule()

    def _schedule(self) -> None:
        if self._work and not self._is_scheduled and self._call_soon is not None:
            self._is_scheduled = True
            self._call_soon(self._run_slices)


def _advance(work: Iterator[None]) -> bool:
    """Do one slice. Returns False when no work is left."""
    for _ in work:
        return True
    return False
