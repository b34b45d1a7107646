"""Whose turn it is among several accounts."""

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from baton.engine.sequence import Sequence, SequenceRank

# (class, work, rank, the sequence, what follows it on its account); ranks differ, so no more is compared
_Next: TypeAlias = tuple[int, float, SequenceRank, Sequence, Iterator[Sequence]]


def in_turn(lanes: Iterable[Iterator[Sequence]], cost: Callable[[Sequence], int]) -> Iterator[Sequence]:
    """The sequences of all accounts, one lane each, in the order of its own ranks.

    The next one is of the best class that any lane begins with, and in it of the account that has had least
    work for its weight, counting what it has got by then here. cost: tokens that the sequence given last has
    got; asked when the caller comes for another.
    """
    heap = [entry for lane in lanes if (entry := _next(lane, None)) is not None]
    heapify(heap)
    while heap:
        _, work, _, sequence, lane = heappop(heap)
        yield sequence
        entry = _next(lane, work + cost(sequence) / sequence.account.weight)
        if entry is not None:
            heappush(heap, entry)


def _next(lane: Iterator[Sequence], work: float | None) -> _Next | None:
    sequence = next(lane, None)
    if sequence is None:
        return None
    work = sequence.account.work if work is None else work
    return sequence.rank[0], work, sequence.rank, sequence, lane
