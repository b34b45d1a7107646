"""What a hand-off asks of the ledger of pages: the engine's PagePool has it all, and documents it."""

from collections.abc import Hashable, Sequence
from typing import Protocol, TypeAlias

Owner: TypeAlias = Hashable


class PageLedger(Protocol):
    """One thread uses it, the one that also runs the hand-offs."""

    @property
    def num_pages(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    @property
    def launched(self) -> int:
        """The mark of all that the replica's steps have been told to write so far."""

    def generation(self, page: int) -> int: ...

    def free_after(self, pages: Sequence[int]) -> int:
        """The mark after which no step writes these pages, which no sequence uses now."""

    def is_known(self, page: int) -> bool:
        """Whether the page's contents are settled, and found by others: they may be sent to who asks."""

    def owners(self, page: int) -> frozenset[Owner]: ...

    def reserve(self, num_pages: int, owner: Owner, deadline_s: float) -> list[int]: ...

    def lease(self, pages: Sequence[int], owner: Owner, deadline_s: float) -> None: ...

    def extend(self, owner: Owner, deadline_s: float) -> None: ...

    def share(self, pages: Sequence[int], owner: Owner) -> None: ...

    def quarantine(self, pages: Sequence[int], owner: Owner) -> None: ...

    def adopt(self, pages: Sequence[int], lease_owner: Owner, owner: Owner) -> None: ...

    def release(self, pages: Sequence[int], owner: Owner) -> None: ...


def holds_lease(ledger: PageLedger, pages: Sequence[int], owner: Owner) -> bool:
    """Whether time has not ended the lease: that ends it for all its pages at once, so one page tells."""
    return not pages or owner in ledger.owners(pages[0])


def release_lease(ledger: PageLedger, pages: Sequence[int], owner: Owner) -> None:
    """End the owner's lease on all its pages, if time has not done so before."""
    if holds_lease(ledger, pages, owner):
        ledger.release(pages, owner)
