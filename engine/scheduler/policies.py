"""Who says what a step computes."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Ordered
from heapq import heapify, heappop, heappush, merge
from itertools import chain, islice
from typing import NamedTuple, Protocol, TypeAlias

from baton.config.engine import SchedulerConfig
from baton.engine.scheduler.queues import SequenceQueues, rank_of
from baton.engine.scheduler.sequence import Sequence, SequenceRank, SequenceStatus
from baton.engine.scheduler.step_planner import CHUNK_SHARE, StepPlanner

# A short wait that gathers new sequences into one batch, as Triton Inference Server's dynamic batcher.
#
# A new sequence waits until as many as a preferred batch size have gathered, then the largest such size is
# let through, or until one has waited `max_delay_s`, or less if its standing says so, then all are. Decodes
# never wait for it, and neither does a sequence that ran before. With a delay of 0 nothing is held.


class Opening(NamedTuple):
    num_released: int  # how many new sequences may be admitted now, best rank first
    wait_s: float | None  # until the window opens by itself; None: nothing is held


class QueueWindow:
    def __init__(self, max_delay_s: float, preferred_sizes: tuple[int, ...]) -> None:
        self._max_delay_s = max_delay_s
        self._preferred_sizes = tuple(sorted(preferred_sizes))

    def holds(self, sequence: Sequence) -> bool:
        """Whether the window is for this sequence at all."""
        return self._max_delay_s > 0 and not sequence.num_preemptions and not sequence.num_computed_tokens

    def _delay_s(self, sequence: Sequence) -> float:
        own_ms = sequence.scheduling_key.max_queue_delay_ms
        return self._max_delay_s if own_ms is None else min(self._max_delay_s, own_ms / 1e3)

    def look(self, waiting: Ordered[Sequence], num_seats: int, now_s: float) -> Opening:
        """Without preferred sizes the preferred size is every seat there is."""
        if self._max_delay_s <= 0:
            return Opening(0, None)
        sizes = self._preferred_sizes or (max(1, num_seats),)
        # More than the largest size need not be counted: the best of them go through at once.
        held = list(islice((s for s in waiting if self.holds(s)), sizes[-1]))
        if not held:
            return Opening(0, None)
        wait_s = min(s.enqueued_s + self._delay_s(s) for s in held) - now_s
        if wait_s <= 0:
            return Opening(len(waiting), None)
        num_released = max((size for size in sizes if size <= len(held)), default=0)
        return Opening(num_released, None if num_released == len(held) else wait_s)

    def released(self, waiting: Ordered[Sequence], opening: Opening) -> Iterator[Sequence]:
        """Those of the waiting sequences that may be admitted now, best rank first."""
        num_released = opening.num_released
        for sequence in waiting:
            if self.holds(sequence):
                if not num_released:
                    continue
                num_released -= 1
            yield sequence


# Batching by request instead of by step, kept for comparison only.
#
# Both take a batch when the one before has ended completely: the slowest member holds every seat. Pages
# for the longest possible answer are set aside at once, so members are not preempted.
#
# - static: takes what waits and runs it as one dense tensor. Prompts are padded to the longest, and a row
# that has finished is computed on as padding until the last one has. `num_padded_tokens` is the price.
# - dynamic: gathers a batch in the queue window (delay, preferred sizes) and runs it ragged: nothing is
# padded and finished rows cost nothing, but nobody joins.


class StaticPolicy:
    def fill(self, planner: StepPlanner, now_s: float) -> float | None:
        queues = planner.queues
        members = admit_batch(planner, queues.waiting) if not queues.num_running else []
        num_rows = len(members) or queues.num_last_admitted
        prefilling = members or planner.prefills()
        if prefilling:
            width = max(1, planner.budget // num_rows)
            granted = [planner.grant(sequence, width) for sequence in prefilling]
            planner.num_padded_tokens = num_rows * max(granted) - sum(granted)
        elif queues.decoding:
            num_decodes = planner.schedule_decodes()
            planner.num_padded_tokens = num_rows - num_decodes
        return None


class DynamicPolicy:
    def __init__(self, window: QueueWindow) -> None:
        self._window = window

    def fill(self, planner: StepPlanner, now_s: float) -> float | None:
        """Schedule the step; return the seconds until the queue window opens if something waits for it."""
        queues = planner.queues
        if queues.num_running:
            planner.schedule_decodes()
            members, wait_s = planner.prefills(), None
        else:
            opening = self._window.look(queues.waiting, planner.seats, now_s)
            wait_s = opening.wait_s
            members = admit_batch(planner, self._window.released(queues.waiting, opening))
        for sequence in members:
            planner.grant(sequence, planner.budget)
        return wait_s


def admit_batch(planner: StepPlanner, waiting: Iterable[Sequence]) -> list[Sequence]:
    """Admit by rank as many as have a seat and pages to their very end."""
    members = []
    for sequence in islice(waiting, planner.seats):
        if not planner.quotas.allow(sequence, sequence.max_num_tokens):
            continue
        if not planner.admit(sequence, sequence.max_num_tokens):
            break
        members.append(sequence)
    return members


# Whose turn it is among several accounts.

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


# Continuous batching: every step is planned anew, decodes first, then chunks of prefills.
#
# How the tokens left after the decodes are shared among prefills (running and waiting, by rank):
#
# 1. In rank order, each that can be finished in this step gets all it needs.
# 2. The first that cannot is the head. It is sure of half of what is left, every step, so nothing that
# arrives later can starve it: at most twice the steps it would take alone.
# 3. The other half goes to shorter prefills of the same account and priority, shortest first, so a long
#    prompt costs short ones no more than half the step either. What they leave goes back to the head, whose
#    chunks therefore stay large.
#
# A waiting sequence that finds no pages ends admission for the step: nothing overtakes it for memory. One
# that finds no room in the quota of its account holds up only what is on that account.
#
# With several accounts the order is that of turns.py instead of the ranks alone; a rank orders its account.
# One beyond its share computes no step that would keep others waiting for long
# (engine/scheduler/step_planner.py).

LOOKAHEAD = 64  # waiting sequences among which a short one is looked for


class ContinuousPolicy:
    def __init__(self, window: QueueWindow) -> None:
        self._window = window

    def fill(self, planner: StepPlanner, now_s: float) -> float | None:
        """Schedule the step; return the seconds until the queue window opens if something waits for it."""
        queues, num_tokens = planner.queues, planner.budget
        if planner.pressure_mode.makes_room:
            planner.easing.make_room()
        if planner.schedule_decodes() and planner.pressure_mode.small_chunks:
            planner.budget = min(planner.budget, max(1, num_tokens // CHUNK_SHARE))
        if not (queues.prefilling or queues.waiting) or not planner.budget:
            return None
        opening = self._window.look(queues.waiting, planner.seats, now_s)
        seating = Seating(planner)
        newcomers = self._eligible(seating, opening)
        if queues.accounts.are_several:
            by_turn = self._by_turn(planner, newcomers)
        else:
            by_turn = merge(planner.prefills(), newcomers, key=rank_of)
        self._share_budget(seating, by_turn)
        return opening.wait_s

    def _eligible(self, seating: "Seating", opening: Opening) -> Iterator[Sequence]:
        queues = seating.planner.queues
        for sequence in self._window.released(queues.waiting, opening):
            if not seating.is_open:
                return
            if not waits_for_leader(sequence, queues):
                yield sequence

    def _by_turn(self, planner: StepPlanner, newcomers: Iterator[Sequence]) -> Iterator[Sequence]:
        owed = planner.queues.first_owed
        others = (each for each in merge(planner.prefills(), newcomers, key=rank_of) if each is not owed)
        return chain([] if owed is None else [owed], in_turn(_lanes(others), planner.granted))

    def _share_budget(self, seating: "Seating", by_rank: Iterator[Sequence]) -> None:
        planner = seating.planner
        for sequence in by_rank:
            if not planner.budget:
                return
            if not seating.has(sequence):
                continue
            if planner.remaining(sequence) > planner.budget:
                self._split(seating, sequence, by_rank)
                return
            planner.grant(sequence, planner.budget)

    def _split(self, seating: "Seating", head: Sequence, later: Iterator[Sequence]) -> None:
        planner = seating.planner
        share = planner.budget // 2
        planner.grant(head, planner.budget - share)
        shorter = [
            sequence
            for sequence in islice(later, LOOKAHEAD)
            if is_peer(sequence, head) and planner.remaining(sequence) < planner.remaining(head)
        ]
        for sequence in sorted(shorter, key=planner.remaining):
            if not share:
                break
            if seating.has(sequence):
                share -= planner.grant(sequence, share)
        planner.grant(head, planner.budget)


class Seating:
    """Admits the waiting sequences that a plan comes to, until one does not fit."""

    def __init__(self, planner: StepPlanner) -> None:
        self.planner = planner
        self.is_open = planner.seats > 0

    def has(self, sequence: Sequence) -> bool:
        """Whether the sequence runs in this step, admitting it if it waits."""
        if sequence.status is SequenceStatus.RUNNING:
            return not self.planner.is_preempted(sequence)
        if self.planner.pressure_mode.makes_room and not self.planner.easing.allows(sequence):
            return False
        accounts = self.planner.queues.accounts
        if accounts.have_quotas and not self.planner.quotas.allow(sequence):
            return False
        was_open = self.is_open
        self.is_open = was_open and self.planner.admit(sequence)
        if was_open and not self.is_open and accounts.are_several:
            self.planner.preempt_for(sequence)
        return self.is_open


def is_peer(sequence: Sequence, other: Sequence) -> bool:
    """Whether neither goes strictly before the other: another account has its turn."""
    return sequence.account is other.account and sequence.rank[:2] == other.rank[:2]


def _lanes(by_rank: Iterator[Sequence]) -> list[Iterator[Sequence]]:
    """Those of each account."""
    lanes: defaultdict[str, list[Sequence]] = defaultdict(list)
    for sequence in by_rank:
        lanes[sequence.account.name].append(sequence)
    return [iter(lane) for lane in lanes.values()]


def waits_for_leader(sequence: Sequence, queues: SequenceQueues) -> bool:
    """A later choice waits while the first one computes the prompt whose full pages both will use."""
    if not sequence.choice or not sequence.page_keys:
        return False
    leader = queues.by_key.get((sequence.request_id, 0))
    return leader is not None and not leader.num_generated_tokens


class BatchPolicy(Protocol):
    def fill(self, planner: StepPlanner, now_s: float) -> float | None:
        """Schedule the step; return the seconds until the queue window opens if something waits for it."""


def policy_of(config: SchedulerConfig) -> BatchPolicy:
    window = QueueWindow(config.max_queue_delay_ms / 1e3, config.preferred_batch_sizes)
    if config.policy == "static":
        return StaticPolicy()
    if config.policy == "dynamic":
        return DynamicPolicy(window)
    return ContinuousPolicy(window)
