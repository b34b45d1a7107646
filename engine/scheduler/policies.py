"""Batching policies give out a step's tokens: continuous batching, and two others for comparison."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Ordered
from heapq import heapify, heappop, heappush, merge
from itertools import islice
from typing import Final, TypeAlias

from baton.engine.scheduler.sequence import Sequence, SequenceQueues, SequenceRank, rank_of
from baton.engine.scheduler.step_planner import CHUNK_DIVISOR, StepPlanner


class QueueWindow:
    """A short wait that gathers new sequences into one batch, as Triton Inference Server's dynamic batcher.

    When as many new sequences wait as a preferred batch size, the window releases the largest such size. When
    one has waited `max_delay_s`, or its own shorter `max_queue_delay_s`, the window releases all. Decodes and
    sequences that ran before never wait for the window. With a delay of 0 the window holds none.
    """

    def __init__(self, max_delay_s: float, preferred_sizes: tuple[int, ...]) -> None:
        self._max_delay_s = max_delay_s
        self._preferred_sizes = tuple(sorted(preferred_sizes))

    def release(
        self, waiting: Ordered[Sequence], num_seats: int, now_s: float
    ) -> tuple[Iterator[Sequence], float | None]:
        """The waiting sequences that may be admitted now, best rank first, and the seconds until the window
        opens without a new sequence; None: it holds none.

        Without preferred sizes, the preferred size is `num_seats`.
        """
        if self._max_delay_s <= 0:
            return iter(waiting), None
        sizes = self._preferred_sizes or (max(1, num_seats),)
        # The largest size is released at once, so sequences beyond it need not be counted.
        held = list(islice((s for s in waiting if self._holds(s)), sizes[-1]))
        if not held:
            return iter(waiting), None
        wait_s = min(s.enqueued_s + self._delay_s(s) for s in held) - now_s
        if wait_s <= 0:
            return iter(waiting), None
        num_released = max((size for size in sizes if size <= len(held)), default=0)
        return self._first(waiting, num_released), None if num_released == len(held) else wait_s

    def _first(self, waiting: Iterable[Sequence], num_released: int) -> Iterator[Sequence]:
        """The first `num_released` sequences that the window holds, and all that it does not hold."""
        for sequence in waiting:
            if self._holds(sequence):
                if not num_released:
                    continue
                num_released -= 1
            yield sequence

    def _holds(self, sequence: Sequence) -> bool:
        return self._max_delay_s > 0 and not sequence.num_preemptions and not sequence.num_computed_tokens

    def _delay_s(self, sequence: Sequence) -> float:
        own_s = sequence.max_queue_delay_s
        return self._max_delay_s if own_s is None else min(self._max_delay_s, own_s)


# Batching by request instead of by step, for comparison only. Both policies start a batch only when every
# sequence of the previous batch has finished, so the slowest sequence blocks all seats. Each sequence
# reserves the pages of its longest possible answer, so none is preempted.


def plan_static(planner: StepPlanner, window: QueueWindow, now_s: float) -> float | None:
    """Run the waiting sequences as one dense tensor; the window is not used.

    Prompts are padded to the longest, and a row that has finished is computed as padding until the last row
    has finished. `num_padded_tokens` counts that work.
    """
    queues = planner.queues
    members = _admit_batch(planner, queues.waiting) if not queues.num_running else []
    num_rows = len(members) or queues.num_last_admitted
    width = planner.budget // max(1, num_rows)
    scheduled = [
        planner.schedule_prefill(sequence, max(1, width)) for sequence in members or planner.prefills()
    ]
    if any(scheduled):
        planner.num_padded_tokens = num_rows * max(scheduled) - sum(scheduled)
    elif queues.decoding:  # also when a quota leaves prompts no page until one of these has ended
        planner.num_padded_tokens = num_rows - planner.schedule_decodes()
    return None


def plan_dynamic(planner: StepPlanner, window: QueueWindow, now_s: float) -> float | None:
    """Gather a batch in the queue window and run it ragged.

    The policy pads no row and finished rows cost no time, but no sequence joins a running batch.
    """
    queues = planner.queues
    if queues.num_running:
        planner.schedule_decodes()
        members, wait_s = planner.prefills(), None
    else:
        released, wait_s = window.release(queues.waiting, planner.seats, now_s)
        members = _admit_batch(planner, released)
    for sequence in members:
        planner.schedule_prefill(sequence, planner.budget)
    return wait_s


def _admit_batch(planner: StepPlanner, waiting: Iterable[Sequence]) -> list[Sequence]:
    """Admit, by rank, as many as have a seat and pages for their longest answers."""
    members = []
    for sequence in islice((each for each in waiting if not each.is_held), planner.seats):
        if not planner.make_room_in_quota(sequence, sequence.max_num_tokens):
            continue
        if not planner.admit(sequence, sequence.max_num_tokens):
            break
        members.append(sequence)
    return members


LOOKAHEAD: Final = 64  # later sequences among which shorter ones are looked for


def plan_continuous(planner: StepPlanner, window: QueueWindow, now_s: float) -> float | None:
    """Plan every step anew: decodes first, then chunks of prefills.

    The tokens left after the decodes are shared among prefills, running and waiting, by rank:

    1. In rank order, each prefill that can be finished in this step gets all that it needs.
    2. The first prefill that cannot be finished is the head. The head is sure of half of the rest in every
       step, so later sequences never starve it: it takes at most twice the steps that it would take alone.
    3. The other half goes to shorter prefills of the same scheduling key and priority, shortest first, so a
       long prompt costs short ones at most half of each step. The head gets the tokens that they leave, so
       its chunks stay large.

    A waiting sequence that finds no pages ends admission for the step: no later sequence overtakes it for
    memory. A sequence that finds no room in the quota of its key delays only sequences of that key.

    With several scheduling keys the order is that of `in_turn`; ranks order each key's own sequences. The
    cost cap of the planner bounds the work of keys beyond their shares.
    """
    queues, num_tokens = planner.queues, planner.budget
    if planner.pressure_mode.makes_room:
        planner.relieve_pressure()
    if planner.schedule_decodes() and planner.pressure_mode.small_chunks:
        planner.budget = min(planner.budget, max(1, num_tokens // CHUNK_DIVISOR))
    if not (queues.prefilling or queues.waiting) or not planner.budget:
        return None
    released, wait_s = window.release(queues.waiting, planner.seats, now_s)
    newcomers = _eligible(planner, released)
    ordered: Iterator[Sequence] = merge(planner.prefills(), newcomers, key=rank_of)
    if queues.shares.are_several:
        ordered = in_turn(_lanes(ordered), planner.num_scheduled)
    for sequence in ordered:
        if not planner.budget:
            break
        if not _runs(planner, sequence):
            continue
        if planner.remaining(sequence) > planner.budget:
            _split(planner, sequence, ordered)
            break
        planner.schedule_prefill(sequence, planner.budget)
    return wait_s


def _split(planner: StepPlanner, head: Sequence, later: Iterator[Sequence]) -> None:
    """Share the rest of the budget between the head and shorter prefills after it."""
    share = planner.budget // 2
    planner.schedule_prefill(head, planner.budget - share)
    shorter = [
        sequence
        for sequence in islice(later, LOOKAHEAD)
        if _is_peer(sequence, head) and planner.remaining(sequence) < planner.remaining(head)
    ]
    for sequence in sorted(shorter, key=planner.remaining):
        if not share or not planner.budget:  # a capped token takes more than one token of the budget
            break
        if _runs(planner, sequence):
            share -= planner.schedule_prefill(sequence, share)
    planner.schedule_prefill(head, planner.budget)


def _runs(planner: StepPlanner, sequence: Sequence) -> bool:
    """Return True when the sequence runs in this step; a waiting sequence is admitted if it fits."""
    if sequence.is_running:
        return not planner.is_preempted(sequence)
    if planner.pressure_mode.makes_room and not planner.leaves_low_water(sequence):
        return False
    if not planner.make_room_in_quota(sequence):
        return False
    is_admitted = planner.admit(sequence)  # also without a free seat: the first that finds none is the last
    return is_admitted or (planner.queues.shares.are_several and planner.preempt_for(sequence))


def _eligible(planner: StepPlanner, released: Iterable[Sequence]) -> Iterator[Sequence]:
    """The released sequences that may start, until one has found no seat."""
    for sequence in released:
        if not planner.may_admit(sequence):
            return
        if not sequence.is_held and not _waits_for_first_choice(sequence, planner.queues):
            yield sequence


def _is_peer(sequence: Sequence, other: Sequence) -> bool:
    """True when the two have the same scheduling key, class and priority."""
    return sequence.share is other.share and sequence.rank[:2] == other.rank[:2]


def _waits_for_first_choice(sequence: Sequence, queues: SequenceQueues) -> bool:
    """True when a later choice should wait: the first one computes the prompt pages that both will share."""
    if not sequence.choice or not sequence.page_keys:
        return False
    first = queues.by_key.get((sequence.request_id, 0))
    return first is not None and not first.num_generated_tokens


# The order among several scheduling keys.

# (class, recent work, rank, sequence, rest of the lane); ranks differ, so later fields are never compared
_Next: TypeAlias = tuple[int, float, SequenceRank, Sequence, Iterator[Sequence]]


def in_turn(lanes: Iterable[Iterator[Sequence]], cost: Callable[[Sequence], int]) -> Iterator[Sequence]:
    """Merge one lane of sequences for each scheduling key.

    The next sequence is of the best class at the head of any lane and, in that class, of the key with the
    least recent work, counting the tokens that earlier sequences got here. cost: tokens that the last
    sequence got; called when the caller asks for the next one.
    """
    heap = [entry for lane in lanes if (entry := _next(lane, None)) is not None]
    heapify(heap)
    while heap:
        _, work, _, sequence, lane = heappop(heap)
        yield sequence
        entry = _next(lane, work + cost(sequence) / sequence.share.weight)
        if entry is not None:
            heappush(heap, entry)


def _next(lane: Iterator[Sequence], work: float | None) -> _Next | None:
    sequence = next(lane, None)
    if sequence is None:
        return None
    work = sequence.share.work if work is None else work
    return sequence.scheduling_class, work, sequence.rank, sequence, lane


def _lanes(by_rank: Iterable[Sequence]) -> list[Iterator[Sequence]]:
    lanes: defaultdict[str, list[Sequence]] = defaultdict(list)
    for sequence in by_rank:
        lanes[sequence.scheduling_key].append(sequence)
    return [iter(lane) for lane in lanes.values()]


# Schedules a step; returns the seconds until the queue window opens if a sequence waits for it.
BatchPolicy: TypeAlias = Callable[[StepPlanner, QueueWindow, float], float | None]
# setting `policy` -> the policy
POLICIES: Final[Mapping[str, BatchPolicy]] = {
    "continuous": plan_continuous,
    "dynamic": plan_dynamic,
    "static": plan_static,
}
