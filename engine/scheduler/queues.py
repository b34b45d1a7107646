"""Where every live sequence is: waiting (new, preempted or swapped out), prefilling or decoding."""

from bisect import bisect_left, insort

from baton.engine.scheduler.accounts import Accounts
from baton.engine.scheduler.sequence import Sequence, SequenceKey, SequenceRank, SequenceStatus


def rank_of(sequence: Sequence) -> SequenceRank:
    return sequence.rank


class SequenceQueues:
    """A sequence is in `by_key` and in exactly one of the three others.

    `decoding` holds what is behind by exactly one token and has all its KV but that token's: the case
    that a step treats in bulk. Any other running sequence is in `prefilling`.
    """

    def __init__(self) -> None:
        self.accounts = Accounts()  # of the sequences in by_key
        self.clear()

    def clear(self) -> None:
        self.accounts.clear()
        self.by_key: dict[SequenceKey, Sequence] = {}
        self.waiting: list[Sequence] = []  # by rank
        self.prefilling: dict[SequenceKey, Sequence] = {}
        self.decoding: dict[SequenceKey, Sequence] = {}
        self.num_last_admitted = 0  # by one plan: the rows of a request-level batch
        self.owed: SequenceKey | None = None  # waits for pages that others gave for it

    @property
    def first_owed(self) -> Sequence | None:
        """It is not to wait for anything but its pages."""
        sequence = None if self.owed is None else self.by_key.get(self.owed)
        return None if sequence is None or sequence.status is SequenceStatus.RUNNING else sequence

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def running(self) -> list[Sequence]:
        return [*self.decoding.values(), *self.prefilling.values()]

    def wait(self, sequence: Sequence) -> None:
        """Take in a new sequence."""
        self.by_key[sequence.key] = sequence
        sequence.account = self.accounts.open(sequence.account_name, sequence.scheduling_key)
        insort(self.waiting, sequence, key=rank_of)

    def run(self, sequence: Sequence) -> None:
        """Move a waiting sequence among the running."""
        self._leave(sequence)
        sequence.status = SequenceStatus.RUNNING
        self._place(sequence)

    def stop(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Move a running sequence back among the waiting."""
        self._leave(sequence)
        sequence.status = status
        insort(self.waiting, sequence, key=rank_of)

    def remove(self, sequence: Sequence) -> None:
        self._leave(sequence)
        del self.by_key[sequence.key]
        self.accounts.close(sequence)

    def promote(self) -> None:
        """Move prefills that have caught up to the decodes."""
        for sequence in [s for s in self.prefilling.values() if s.num_uncomputed_tokens == 1]:
            del self.prefilling[sequence.key]
            self._place(sequence)

    def _place(self, sequence: Sequence) -> None:
        caught_up = sequence.num_uncomputed_tokens == 1
        (self.decoding if caught_up else self.prefilling)[sequence.key] = sequence

    def _leave(self, sequence: Sequence) -> None:
        if sequence.status is not SequenceStatus.RUNNING:
            del self.waiting[bisect_left(self.waiting, sequence.rank, key=rank_of)]
        elif self.decoding.pop(sequence.key, None) is None:
            del self.prefilling[sequence.key]
