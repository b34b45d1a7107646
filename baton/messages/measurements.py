"""What a worker's own work has taken, told to the routers that predict what other work will take.

Told at most once a TELL_S, and only to a router that has asked for this worker's pages: no other can use
it. What nobody takes is kept up to a limit, the newest of it. Of steps a sample is told: one each STEP_S.
"""

from collections import deque
from typing import Final, Protocol

from baton.clock import Clock
from baton.messages.control import Measured
from baton.messages.kv_events import KvEventPublisher
from baton.messages.workers import PrefillTimes, StepTimes

TELL_S: Final = 1.0
STEP_S: Final = 1 / 32
MAX_KEPT: Final = 1024  # as in a message


class Stepping(Protocol):
    """Of an engine: see engine/replica.py."""

    @property
    def num_sequences(self) -> int: ...
    @property
    def num_new_tokens(self) -> int: ...
    @property
    def num_context_tokens(self) -> int: ...
    @property
    def step_s(self) -> float: ...


class Stepper(Protocol):
    def last_step(self) -> Stepping | None: ...


class Measurements:
    def __init__(self, publisher: KvEventPublisher, clock: Clock) -> None:
        self._publisher = publisher
        self._clock = clock
        self._prefills: deque[PrefillTimes] = deque(maxlen=MAX_KEPT)
        self._steps: deque[StepTimes] = deque(maxlen=MAX_KEPT)
        self._next_tell_s = self._next_step_s = clock.now_s()

    def prefilled(self, times: PrefillTimes) -> None:
        self._prefills.append(times)

    def stepped(self, engine: Stepper) -> None:
        """To be called after each step: some of them are noted."""
        now_s = self._clock.now_s()
        if now_s < self._next_step_s or not self._publisher.is_wanted:
            return
        step = engine.last_step()
        if step is not None:
            self._next_step_s = now_s + STEP_S
            figures = step.num_sequences, step.num_new_tokens, step.num_context_tokens
            self._steps.append(StepTimes(*figures, step.step_s))

    def tell(self) -> None:
        now_s, routers = self._clock.now_s(), self._publisher.readers
        if not routers or now_s < self._next_tell_s or not (self._prefills or self._steps):
            return
        self._next_tell_s = now_s + TELL_S
        measured = Measured(prefills=tuple(self._prefills), steps=tuple(self._steps))
        for router in routers:
            router.send(measured)
        self._prefills.clear()
        self._steps.clear()
