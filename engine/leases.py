"""Holds on pages that end by themselves: owner -> deadline and pages."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

Owner: TypeAlias = Hashable


@dataclass(slots=True)
class Lease:
    deadline_s: float
    pages: set[int] = field(default_factory=set)


class LeaseTable:
    """One lease an owner, indexed both ways; knows nothing of what a page is."""

    def __init__(self) -> None:
        self._leases: dict[Owner, Lease] = {}
        self.by_page: dict[int, set[Owner]] = {}  # page -> lease owners, never an empty set; read only

    def owners(self, page: int) -> frozenset[Owner]:
        return frozenset(self.by_page.get(page, ()))

    def deadline_s(self, page: int) -> float | None:
        """When time alone has freed the page: the latest deadline on it, None without a lease."""
        owners = self.by_page.get(page)
        return max(self._leases[owner].deadline_s for owner in owners) if owners else None

    def holds(self, owner: Owner, page: int) -> bool:
        lease = self._leases.get(owner)
        return lease is not None and page in lease.pages

    def grant(self, pages: Iterable[int], owner: Owner, deadline_s: float) -> None:
        """Add pages to the owner's lease, whose one deadline becomes `deadline_s`."""
        lease = self._leases.setdefault(owner, Lease(deadline_s))
        lease.deadline_s = deadline_s
        for page in pages:
            lease.pages.add(page)
            self.by_page.setdefault(page, set()).add(owner)

    def extend(self, owner: Owner, deadline_s: float) -> None:
        """Raises KeyError when the lease has ended: the caller no longer owns its pages."""
        lease = self._leases[owner]
        lease.deadline_s = max(lease.deadline_s, deadline_s)

    def drop(self, page: int, owner: Owner) -> None:
        lease = self._leases[owner]
        lease.pages.remove(page)
        if not lease.pages:
            del self._leases[owner]
        owners = self.by_page[page]
        owners.remove(owner)
        if not owners:
            del self.by_page[page]

    def expired(self, now_s: float) -> list[tuple[Owner, list[int]]]:
        return [
            (owner, sorted(lease.pages)) for owner, lease in self._leases.items() if lease.deadline_s <= now_s
        ]
