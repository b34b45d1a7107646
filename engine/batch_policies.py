"""Batching by request instead of by step, kept for comparison only.

Both take a batch when the one before has ended completely: the slowest member holds every seat. Pages
for the longest possible answer are set aside at once, so members are not preempted.

- static: takes what waits and runs it as one dense tensor. Prompts are padded to the longest, and a row
  that has finished is computed on as padding until the last one has. `num_padded_tokens` is the price.
- dynamic: gathers a batch in the queue window (delay, preferred sizes) and runs it ragged: nothing is
  padded and finished rows cost nothing, but nobody joins.
"""

from collections.abc import Iterable
from itertools import islice

from baton.engine.plan_draft import PlanDraft
from baton.engine.queue_window import QueueWindow
from baton.engine.sequence import Sequence


class StaticPolicy:
    def fill(self, draft: PlanDraft, now_s: float) -> float | None:
        queues = draft.queues
        members = admit_batch(draft, queues.waiting) if not queues.num_running else []
        num_rows = len(members) or queues.num_last_admitted
        prefilling = members or draft.prefills()
        if prefilling:
            width = max(1, draft.budget // num_rows)
            granted = [draft.grant(sequence, width) for sequence in prefilling]
            draft.num_padded_tokens = num_rows * max(granted) - sum(granted)
        elif queues.decoding:
            num_decodes = draft.schedule_decodes()
            draft.num_padded_tokens = num_rows - num_decodes
        return None


class DynamicPolicy:
    def __init__(self, window: QueueWindow) -> None:
        self._window = window

    def fill(self, draft: PlanDraft, now_s: float) -> float | None:
        """Schedule the step; return the seconds until the queue window opens if something waits for it."""
        queues = draft.queues
        if queues.num_running:
            draft.schedule_decodes()
            members, wait_s = draft.prefills(), None
        else:
            opening = self._window.look(queues.waiting, draft.seats, now_s)
            wait_s = opening.wait_s
            members = admit_batch(draft, self._window.released(queues.waiting, opening))
        for sequence in members:
            draft.grant(sequence, draft.budget)
        return wait_s


def admit_batch(draft: PlanDraft, waiting: Iterable[Sequence]) -> list[Sequence]:
    """Admit by rank as many as have a seat and pages to their very end."""
    members = []
    for sequence in islice(waiting, draft.seats):
        if not draft.quotas.allow(sequence, sequence.max_num_tokens):
            continue
        if not draft.admit(sequence, sequence.max_num_tokens):
            break
        members.append(sequence)
    return members
