"""Chooses which sequences give their pages when pages are short.

- `HeldPages` counts the pages of each scheduling key, against its share and its quota.
- `PreemptionCandidates` lists the sequences that may give pages, the first to give them first.
- `most_tokens` bounds the length of a sequence.

`StepPlanner` preempts; this module changes no sequence. With one scheduling key and no quota, sequences are
ordered by rank alone.
"""

from collections import Counter
from collections.abc import Container, Iterable
from typing import TypeAlias

from baton.engine.cache.page_pool import PagePool
from baton.engine.scheduler.sequence import (
    Sequence,
    SequenceKey,
    SequenceQueues,
    SequenceRank,
    rank_of,
)
from baton.errors import InvalidRequest
from baton.fair_queue import Share

# (class, pages in excess of the share, recent work, rank), or the rank alone.
PreemptionOrder: TypeAlias = tuple[int, float, float, SequenceRank] | SequenceRank


class HeldPages:
    """The pages that each scheduling key holds once the plan is applied, its share of them, and its quota.

    The share of a key is that of its weight among the keys with live sequences.
    """

    def __init__(self, queues: SequenceQueues, pool: PagePool) -> None:
        self.are_several = queues.shares.are_several
        self._queues = queues
        self._pool = pool
        self._change: Counter[str] = Counter()  # scheduling key -> pages that the plan adds or takes
        self._claimed: set[tuple[str, int]] = set()  # (key, page) that the key uses because of the plan
        self._released: Counter[tuple[str, int]] = Counter()  # (key, page) -> users that the plan preempts

    def preemption_order(self, sequence: Sequence) -> PreemptionOrder:
        """The sequence with the greatest value gives its pages first.

        Lower classes come before higher ones. In a class, the key that is most over its share of the pages
        comes first, then the key with the most recent work; of one key, the worst rank. A key within its
        share therefore never gives pages to a key that is over its own.
        """
        if not self.are_several:
            return sequence.rank
        share = sequence.share
        return sequence.scheduling_class, self.excess(share), share.work, sequence.rank

    def num_pages(self, share: Share) -> int:
        """Pages that the key holds, or expects."""
        return self._pool.accounts.held(share.key) + self._change[share.key]

    def fair_pages(self, share: Share) -> float:
        """Pages that are the key's share of the pool."""
        return self._pool.num_pages * share.weight / self._queues.shares.total_weight

    def excess(self, share: Share, num_lost: int = 0) -> float:
        """Pages, divided by the weight, that the key holds beyond its share after losing `num_lost`; 0 if
        none.
        """
        return max(0.0, self.num_pages(share) - num_lost - self.fair_pages(share)) / share.weight

    def room(self, share: Share) -> float:
        """Pages that the key's quota leaves; negative when the key holds more, inf without a quota.

        Pages that the key uses outside the scheduler (incoming transfers, kept pages) count as well.
        """
        return share.quota - self.num_pages(share)

    def limit(self, share: Share, num_pages: int) -> int:
        """The part of `num_pages` that the key's quota leaves."""
        return int(max(0, min(num_pages, self.room(share))))

    def allow_page_each(self, sequences: Iterable[Sequence]) -> bool:
        """Return True when the quotas allow each sequence one page more."""
        needs = Counter(sequence.share for sequence in sequences)
        return all(num_pages <= self.room(share) for share, num_pages in needs.items())

    def add(self, share: Share, num_pages: int) -> None:
        """Count so many more fresh pages for the key; fewer if negative."""
        self._change[share.key] += num_pages

    def num_new(self, share: Share, pages: Iterable[int]) -> int:
        """The number of these pages that the key does not use yet."""
        return sum(1 for page in pages if not self._uses(share, page))

    def claim(self, share: Share, pages: Iterable[int]) -> None:
        """Let one of the key's sequences share known pages."""
        for page in pages:
            self._change[share.key] += not self._uses(share, page)
            self._claimed.add((share.key, page))

    def release(self, sequence: Sequence) -> None:
        """Take all pages of the sequence's table."""
        share = sequence.share
        for page in sequence.page_table:
            used = self._uses(share, page)
            self._released[share.key, page] += 1
            self._change[share.key] -= used and not self._uses(share, page)

    def _uses(self, share: Share, page: int) -> bool:
        key = share.key, page
        if key in self._claimed:
            return True
        return self._pool.accounts.num_users(self._pool.owners(page), share.key) > self._released[key]


class PreemptionCandidates:
    """Lists the sequences that may give pages, the first to give them first. Preempts none.

    Two kinds of sequences hold pages: running ones, and waiting ones that brought pages with them. A waiting
    sequence may never run before a running one has ended, so it also gives pages to sequences that come after
    it.
    """

    def __init__(
        self,
        queues: SequenceQueues,
        pool: PagePool,
        held: HeldPages,
        admitted: Container[SequenceKey],
        preempted: Container[SequenceKey],
    ) -> None:
        """admitted, preempted: by the plan so far; neither gives anything more."""
        self._queues = queues
        self._pool = pool
        self._held = held
        self._admitted = admitted
        self._preempted = preempted

    def of_running(self, sequence: Sequence, *, may_wait: bool) -> list[Sequence]:
        """Candidates for a running sequence.

        may_wait: other sequences advance in this step, so waiting sequences of other keys keep their pages
        from a sequence that comes after them.
        """
        order = self._held.preemption_order
        own, spares = order(sequence), may_wait and self._held.are_several
        others = sorted(self._holders(), key=order, reverse=True)
        return [other for other in others if order(other) > own or not (spares or other.is_running)]

    def of_waiting(self, sequence: Sequence, num_lacking: int) -> list[Sequence]:
        """Candidates for a sequence that does not fit although none runs; empty if all together are too few.

        If the list is empty, external holders have the missing pages and will release them.
        """
        others = [other for other in self._waiting_with_pages() if other is not sequence]
        return self._enough(sorted(others, key=self._held.preemption_order, reverse=True), num_lacking)

    def of_newcomer(
        self, sequence: Sequence, num_pages: int, num_lacking: int, headroom_pages: int
    ) -> list[Sequence]:
        """Candidates for a sequence that does not fit beside the running ones; empty if together too few.

        These are sequences of lower classes and, if the newcomer's key stays within its share with
        `num_pages` more, sequences of keys over their shares. headroom_pages: kept free for each running
        sequence.
        """
        held, share = self._held, sequence.share
        is_within_share = held.num_pages(share) + num_pages <= held.fair_pages(share)
        num_lost = Counter[str]()
        candidates = []
        for other in sorted(self._holders(), key=held.preemption_order, reverse=True):
            is_over = is_within_share and held.excess(other.share, num_lost[other.share.key]) > 0
            same_class = other.scheduling_class == sequence.scheduling_class
            if other.scheduling_class > sequence.scheduling_class or (same_class and is_over):
                candidates.append(other)
                num_lost[other.share.key] += len(other.page_table)
        return self._enough(candidates, num_lacking, headroom_pages)

    def of_lowest_class(self, num_lacking: int) -> list[Sequence]:
        """Running sequences of the lowest class, the longest first; all if too few."""
        running = self._running()
        classes = {sequence.scheduling_class for sequence in running}
        if len(classes) < 2:
            return []
        lowest = [sequence for sequence in running if sequence.scheduling_class == max(classes)]
        lowest.sort(key=lambda sequence: len(sequence.page_table), reverse=True)
        return self._enough(lowest, num_lacking) or lowest

    def of_key(self, share: Share) -> list[Sequence]:
        """All holders of pages of one scheduling key, the worst rank first."""
        return sorted((s for s in self._holders() if s.share is share), key=rank_of, reverse=True)

    def of_same_key(self, sequence: Sequence) -> list[Sequence]:
        """Candidates for a sequence of a scheduling key that has reached its quota."""
        others = [other for other in self.of_key(sequence.share) if other is not sequence]
        return [other for other in others if other.rank > sequence.rank or not other.is_running]

    def _enough(
        self, candidates: list[Sequence], num_lacking: int, headroom_pages: int = 0
    ) -> list[Sequence]:
        """The first candidates that together free `num_lacking` pages, counting their headroom; else none."""
        num_owners = Counter[int]()
        for index, candidate in enumerate(candidates):
            num_owners.update(candidate.page_table)
            num_lacking -= sum(
                self._pool.is_freed_by(page, num_owners[page]) for page in candidate.page_table
            )
            num_lacking -= headroom_pages * candidate.is_running
            if num_lacking <= 0:
                return candidates[: index + 1]
        return []

    def _holders(self) -> list[Sequence]:
        return self._running() + self._waiting_with_pages()

    def _running(self) -> list[Sequence]:
        """A sequence in flight keeps its pages until its token is there."""
        in_flight = self._queues.in_flight
        return [
            each
            for each in self._queues.running()
            if each.key not in self._preempted and each.key not in in_flight
        ]

    def _waiting_with_pages(self) -> list[Sequence]:
        return [
            s
            for s in self._queues.waiting
            if s.page_table and s.key not in self._admitted and s.key not in self._preempted
        ]


def most_tokens(sequence: Sequence, pool: PagePool) -> int:
    """The length that the sequence can reach in this pool. InvalidRequest if it could not run alone."""
    if not sequence.num_prompt_tokens:
        raise InvalidRequest(f"request {sequence.request_id}: the prompt is empty")
    quota = sequence.max_kv_pages
    most = min(sequence.max_num_tokens, int(min(quota, pool.num_pages)) * pool.page_size)
    if sequence.num_tokens < most:
        return most
    begun = sequence.num_generated_tokens
    holder = "the model and its KV pages hold"
    if quota < pool.num_pages:
        holder = f"the quota max_kv_pages of {quota} pages, and the model, hold"
    raise InvalidRequest(
        f"request {sequence.request_id}: a prompt of {sequence.num_prompt_tokens} tokens"
        f"{f' and {begun} of the answer' if begun else ''}; {holder} {most}, one of them for the answer"
    )
