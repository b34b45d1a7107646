"""Source pages that pushes read now: their second owner, which lets go when the last push has ended."""

from collections import Counter
from collections.abc import Sequence

from baton.kvtransfer.ledger import Owner, PageLedger


class PageReaders:
    def __init__(self, ledger: PageLedger, owner: Owner) -> None:
        self._ledger = ledger
        self._owner = owner
        self._num_pushes: Counter[int] = Counter()  # page -> pushes that read it, never 0

    def enter(self, pages: Sequence[int]) -> None:
        """A push begins; somebody else still holds the pages."""
        self._ledger.share([page for page in pages if page not in self._num_pushes], self._owner)
        self._num_pushes.update(pages)

    def leave(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._num_pushes[page] -= 1
            if not self._num_pushes[page]:
                del self._num_pushes[page]
                self._ledger.release([page], self._owner)

    def leave_all(self) -> None:
        self._ledger.release(sorted(self._num_pushes), self._owner)
        self._num_pushes.clear()
