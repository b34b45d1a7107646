"""Continuous batching: every step is planned anew, decodes first, then chunks of prefills.

How the tokens left after the decodes are shared among prefills (running and waiting, by rank):

1. In rank order, each that can be finished in this step gets all it needs.
2. The first that cannot is the head. It is sure of half of what is left, every step, so nothing that
   arrives later can starve it: at most twice the steps it would take alone.
3. The other half goes to shorter prefills of the same account and priority, shortest first, so a long prompt
   costs short ones no more than half the step either. What they leave goes back to the head, whose
   chunks therefore stay large.

A waiting sequence that finds no pages ends admission for the step: nothing overtakes it for memory. One that
finds no room in the quota of its account holds up only what is on that account.

With several accounts the order is that of turns.py instead of the ranks alone; a rank orders its account.
One beyond its share computes no step that would keep others waiting for long (ease.py).
"""

from collections import defaultdict
from collections.abc import Iterator
from heapq import merge
from itertools import chain, islice

from baton.engine.plan_draft import PlanDraft
from baton.engine.queue_window import Opening, QueueWindow
from baton.engine.relief import CHUNK_SHARE
from baton.engine.sequence import Sequence, SequenceStatus
from baton.engine.sequence_queues import SequenceQueues, rank_of
from baton.engine.turns import in_turn

LOOKAHEAD = 64  # waiting sequences among which a short one is looked for


class ContinuousPolicy:
    def __init__(self, window: QueueWindow) -> None:
        self._window = window

    def fill(self, draft: PlanDraft, now_s: float) -> float | None:
        """Schedule the step; return the seconds until the queue window opens if something waits for it."""
        queues, num_tokens = draft.queues, draft.budget
        if draft.relief.makes_room:
            draft.easing.make_room()
        if draft.schedule_decodes() and draft.relief.small_chunks:
            draft.budget = min(draft.budget, max(1, num_tokens // CHUNK_SHARE))
        if not (queues.prefilling or queues.waiting) or not draft.budget:
            return None
        opening = self._window.look(queues.waiting, draft.seats, now_s)
        seating = Seating(draft)
        newcomers = self._eligible(seating, opening)
        if queues.accounts.are_several:
            by_turn = self._by_turn(draft, newcomers)
        else:
            by_turn = merge(draft.prefills(), newcomers, key=rank_of)
        self._share_budget(seating, by_turn)
        return opening.wait_s

    def _eligible(self, seating: "Seating", opening: Opening) -> Iterator[Sequence]:
        queues = seating.draft.queues
        for sequence in self._window.released(queues.waiting, opening):
            if not seating.is_open:
                return
            if not waits_for_leader(sequence, queues):
                yield sequence

    def _by_turn(self, draft: PlanDraft, newcomers: Iterator[Sequence]) -> Iterator[Sequence]:
        owed = draft.queues.first_owed
        others = (each for each in merge(draft.prefills(), newcomers, key=rank_of) if each is not owed)
        return chain([] if owed is None else [owed], in_turn(_lanes(others), draft.granted))

    def _share_budget(self, seating: "Seating", by_rank: Iterator[Sequence]) -> None:
        draft = seating.draft
        for sequence in by_rank:
            if not draft.budget:
                return
            if not seating.has(sequence):
                continue
            if draft.remaining(sequence) > draft.budget:
                self._split(seating, sequence, by_rank)
                return
            draft.grant(sequence, draft.budget)

    def _split(self, seating: "Seating", head: Sequence, later: Iterator[Sequence]) -> None:
        draft = seating.draft
        share = draft.budget // 2
        draft.grant(head, draft.budget - share)
        shorter = [
            sequence
            for sequence in islice(later, LOOKAHEAD)
            if is_peer(sequence, head) and draft.remaining(sequence) < draft.remaining(head)
        ]
        for sequence in sorted(shorter, key=draft.remaining):
            if not share:
                break
            if seating.has(sequence):
                share -= draft.grant(sequence, share)
        draft.grant(head, draft.budget)


class Seating:
    """Admits the waiting sequences that a plan comes to, until one does not fit."""

    def __init__(self, draft: PlanDraft) -> None:
        self.draft = draft
        self.is_open = draft.seats > 0

    def has(self, sequence: Sequence) -> bool:
        """Whether the sequence runs in this step, admitting it if it waits."""
        if sequence.status is SequenceStatus.RUNNING:
            return not self.draft.is_preempted(sequence)
        if self.draft.relief.makes_room and not self.draft.easing.allows(sequence):
            return False
        accounts = self.draft.queues.accounts
        if accounts.have_quotas and not self.draft.quotas.allow(sequence):
            return False
        was_open = self.is_open
        self.is_open = was_open and self.draft.admit(sequence)
        if was_open and not self.is_open and accounts.are_several:
            self.draft.make_way(sequence)
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
