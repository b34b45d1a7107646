"""The state of every live sequence: waiting (new, preempted or swapped out), prefilling or decoding."""

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from math import inf

from baton.engine.scheduler.sequence import Sequence, SequenceKey, SequenceRank, SequenceStatus
from baton.fair_queue import DecayedShares


def rank_of(sequence: Sequence) -> SequenceRank:
    """The sort key of sequences that have one scheduling key."""
    return sequence.rank


class SequenceQueues:
    """A sequence is in `by_key` and in exactly one of `waiting`, `prefilling` and `decoding`.

    `decoding` holds the sequences that lack the KV of exactly one token: a step treats them in bulk. Any
    other running sequence is in `prefilling`.
    """

    def __init__(self) -> None:
        self.shares = DecayedShares()  # of the scheduling keys of the sequences in by_key
        self.clear()

    def clear(self) -> None:
        """Forget all sequences."""
        self.shares.clear()
        # scheduling key -> page quota (inf: none) -> number of sequences that came with this quota
        self._quotas: defaultdict[str, Counter[float]] = defaultdict(Counter)
        self.have_quotas = False
        self.by_key: dict[SequenceKey, Sequence] = {}
        self.waiting: list[Sequence] = []  # by rank
        self.prefilling: dict[SequenceKey, Sequence] = {}
        self.decoding: dict[SequenceKey, Sequence] = {}
        self.num_last_admitted = 0  # by the last plan that admitted any: the rows of a request-level batch
        self.preempted_for: SequenceKey | None = None  # waits for pages that others were preempted for

    @property
    def next_in(self) -> Sequence | None:
        """The waiting sequence that others were preempted for: it comes before all others."""
        sequence = None if self.preempted_for is None else self.by_key.get(self.preempted_for)
        return None if sequence is None or sequence.is_running else sequence

    @property
    def num_running(self) -> int:
        """Prefilling and decoding sequences."""
        return len(self.prefilling) + len(self.decoding)

    def running(self) -> list[Sequence]:
        """Decoding sequences, then prefilling ones."""
        return [*self.decoding.values(), *self.prefilling.values()]

    def max_pages(self, scheduling_key: str) -> float:
        """The page quota of a scheduling key, the largest of its live sequences' quotas; inf without one."""
        return max(self._quotas.get(scheduling_key, ()), default=inf)

    def wait(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        self.by_key[sequence.key] = sequence
        sequence.share = self.shares.join(sequence.scheduling_key, sequence.weight)
        self._quotas[sequence.scheduling_key][_quota(sequence)] += 1
        self.have_quotas = self.have_quotas or sequence.max_kv_pages is not None
        insort(self.waiting, sequence, key=rank_of)

    def run(self, sequence: Sequence) -> None:
        """Move a waiting sequence to the running ones."""
        self._leave(sequence)
        sequence.status = SequenceStatus.RUNNING
        self._place(sequence)

    def stop(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Move a running sequence back to the waiting ones."""
        self._leave(sequence)
        sequence.status = status
        insort(self.waiting, sequence, key=rank_of)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended."""
        self._leave(sequence)
        del self.by_key[sequence.key]
        self.shares.leave(sequence.share)
        quotas, quota = self._quotas[sequence.scheduling_key], _quota(sequence)
        quotas[quota] -= 1
        if not quotas[quota]:
            del quotas[quota]
        if not quotas:
            del self._quotas[sequence.scheduling_key]
        self.have_quotas = self.have_quotas and any(max(each) < inf for each in self._quotas.values())

    def promote(self) -> None:
        """Move prefills that have caught up to the decodes."""
        for sequence in [s for s in self.prefilling.values() if s.num_uncomputed_tokens == 1]:
            del self.prefilling[sequence.key]
            self._place(sequence)

    def _place(self, sequence: Sequence) -> None:
        caught_up = sequence.num_uncomputed_tokens == 1
        (self.decoding if caught_up else self.prefilling)[sequence.key] = sequence

    def _leave(self, sequence: Sequence) -> None:
        if not sequence.is_running:
            del self.waiting[bisect_left(self.waiting, sequence.rank, key=rank_of)]
        elif self.decoding.pop(sequence.key, None) is None:
            del self.prefilling[sequence.key]


def _quota(sequence: Sequence) -> float:
    return inf if sequence.max_kv_pages is None else sequence.max_kv_pages
