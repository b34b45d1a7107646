"""A short wait that gathers new sequences into one batch, as Triton Inference Server's dynamic batcher.

A new sequence waits until as many as a preferred batch size have gathered, then the largest such size is let
through, or until one has waited `max_delay_s`, or less if its standing says so, then all are. Decodes never
wait for it, and neither does a sequence that ran before. With a delay of 0 nothing is held.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from itertools import islice
from typing import NamedTuple

from baton.engine.sequence import Sequence


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
        own_ms = sequence.standing.max_queue_delay_ms
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
