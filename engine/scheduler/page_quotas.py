"""Page quotas: a scheduling key at its quota takes pages from its own sequences, or waits.

A sequence that finds no room in its quota delays only sequences of the same key. Pages that the key uses
outside the scheduler (incoming transfers, kept pages) count as well, and are released without the planner.
"""

from collections import Counter
from collections.abc import Callable, Collection
from math import inf

from baton.engine.scheduler.preemption import HeldPages, PreemptionCandidates
from baton.engine.scheduler.sequence import Sequence
from baton.fair_queue import Share


class PageQuotas:
    """Keeps one plan within the quotas."""

    def __init__(
        self, held: HeldPages, candidates: PreemptionCandidates, preempt: Callable[[Sequence], None]
    ) -> None:
        """preempt: called with the sequences whose pages a quota needs."""
        self._held = held
        self._candidates = candidates
        self._preempt = preempt
        self._full: set[str] = set()  # keys without room for their next sequence

    def enforce(self, share: Share) -> None:
        """Preempt sequences of a key until it holds no more than its quota; pulled pages can exceed it."""
        if self._held.room(share) < 0:
            self._take(self._candidates.of_key(share), share, 0)

    def is_full(self, share: Share) -> bool:
        """Whether an earlier sequence of the key has found no room."""
        return share.key in self._full

    def has_limit(self, share: Share) -> bool:
        """Whether the key has a quota."""
        return self._held.have_quotas and self._held.room(share) < inf

    def admit(self, sequence: Sequence, num_pages: int, num_reserved: int | None) -> bool:
        """Return True when a waiting sequence may have `num_pages` pages; else its key is full.

        num_reserved: pages for the running sequences of the key, which preempt none for a newcomer; None when
        the key has none that run. It may preempt its own waiting sequences then.
        """
        share = sequence.share
        if num_pages + (num_reserved or 0) <= self._held.room(share):
            return True
        self._full.add(share.key)
        if num_reserved is None:
            self._take(self._candidates.of_same_key(sequence), share, num_pages)
        return False

    def make_room(self, sequence: Sequence, num_pages: int) -> bool:
        """Return whether a running sequence may have so many pages; preempt others of its key if needed."""
        share = sequence.share
        if self._held.have_quotas and num_pages > self._held.room(share):
            self._take(self._candidates.of_same_key(sequence), share, num_pages)
        return not self._held.have_quotas or num_pages <= self._held.room(share)

    def allow_page_each(self, sequences: Collection[Sequence]) -> bool:
        """Whether each sequence may have a page without preemption."""
        if not self._held.have_quotas:
            return True
        needs = Counter(sequence.share for sequence in sequences)
        return all(num_pages <= self._held.room(share) for share, num_pages in needs.items())

    def limit(self, share: Share, num_pages: int) -> int:
        """The part of `num_pages` that the key may have."""
        if not self._held.have_quotas:
            return num_pages
        return int(max(0, min(num_pages, self._held.room(share))))

    def _take(self, candidates: Collection[Sequence], share: Share, num_pages: int) -> None:
        """Preempt candidates until the key has room for `num_pages` pages."""
        for candidate in candidates:
            if num_pages <= self._held.room(share):
                return
            self._preempt(candidate)
