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

    def generation(self, page: int) -> int: ...

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


def release_held(ledger: PageLedger, pages: Sequence[int], owner: Owner) -> None:
    """Release those of the pages that the owner still has: time may have taken a lease back before."""
    held = [page for page in pages if owner in ledger.owners(page)]
    if held:
        ledger.release(held, owner)


def holds_all(ledger: PageLedger, pages: Sequence[int], owner: Owner) -> bool:
    return all(owner in ledger.owners(page) for page in pages)
