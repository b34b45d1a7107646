"""A process of the simulation: it hears one thing after another, may be stopped for a while, and may die.

1. What comes to it from outside waits in its inbox. A turn makes all those calls, in order, then whatever its
   program does between them: a worker's loop steps its engine.
2. A turn may `spend` time, as a step of the model does. What it sends leaves when that time is over, and the
   next turn begins no sooner.
3. `later` is for its own timers and its I/O threads, which go on while a turn lasts.
4. `pause` is SIGSTOP: no turn and no timer until `resume`, which finds everything that came meanwhile.
5. `die` ends it as SIGKILL does: nothing that had not left yet is ever sent.
"""

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Final, TypeAlias

from baton.clock import Clock

# Virtual time: what happens when, in one thread and always in the same order.

Call: TypeAlias = Callable[[], None]


class Events:
    """Calls by their time, and at one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_made = 0
        self._calls: list[tuple[float, int, Call]] = []
        self._serials = count()

    def at(self, time_s: float, call: Call) -> None:
        """A time that has passed means now."""
        heapq.heappush(self._calls, (max(time_s, self.now_s), next(self._serials), call))

    def after(self, delay_s: float, call: Call) -> None:
        self.at(self.now_s + delay_s, call)

    def run_until(self, time_s: float) -> None:
        """Make every call that is due by then; it is then afterwards."""
        calls = self._calls
        while calls and calls[0][0] <= time_s:
            self.now_s, _, call = heapq.heappop(calls)
            self.num_made += 1
            call()
        self.now_s = time_s


class ProcessClock:
    """What one process takes for the time: clocks of different processes begin anywhere."""

    def __init__(self, events: Events, offset_s: float) -> None:
        self._events = events
        self._offset_s = offset_s

    def now_s(self) -> float:
        return self._events.now_s + self._offset_s


class Calendar:
    """The date that all hosts take for the present one; it may jump, which no process's clock does."""

    def __init__(self, events: Events, date_s: float) -> None:
        self._events = events
        self._date_s = date_s

    def now_s(self) -> float:
        return self._date_s + self._events.now_s

    def jump(self, seconds: float) -> None:
        self._date_s += seconds


MAX_INBOX: Final = 20_000  # far more than an honest cluster's peers leave unread


class Crash(Exception):
    """A process ends itself: an error that is no request's own. `culprit`: the request all the same."""

    def __init__(self, culprit: str) -> None:
        super().__init__(culprit)
        self.culprit = culprit


class SimProcess:
    def __init__(self, name: str, events: Events, clock_offset_s: float = 0.0) -> None:
        self.name = name
        self.clock: Clock = ProcessClock(events, clock_offset_s)
        self.is_dead = False
        self.is_paused = False
        self.killed_by = ""  # a request's id
        self.turn: Call = self.hear  # what a turn does
        self.on_death: list[Call] = []
        self._events = events
        self._inbox: deque[Call] = deque()
        self._held: list[Call] = []  # timers that came due while it was paused
        self._unsent: list[Call] = []  # by the turn that lasts
        self._busy_until_s = 0.0
        self._is_awaited = False  # a turn has been asked for

    @property
    def num_unheard(self) -> int:
        return len(self._inbox)

    def post(self, call: Call) -> None:
        """Something has come for it."""
        if self.is_dead:
            return
        self._inbox.append(call)
        assert len(self._inbox) < MAX_INBOX, f"{self.name} is buried in what others send"
        self.wake()

    def wake(self) -> None:
        """Have a turn as soon as it can."""
        if not self._is_awaited and not self.is_dead and not self.is_paused:
            self._is_awaited = True
            self._events.at(self._busy_until_s, self._take_turn)

    def hear(self) -> None:
        """Make the calls that were in the inbox when this began."""
        for _ in range(len(self._inbox)):
            if self._inbox:  # it has not died of the last one
                self._inbox.popleft()()

    def spend(self, seconds: float) -> None:
        """This turn lasts so much longer."""
        self._busy_until_s = max(self._busy_until_s, self._events.now_s) + seconds

    def send(self, call: Call) -> None:
        """Make this call, which puts something on a wire, when the turn is over."""
        if self._busy_until_s <= self._events.now_s:
            call()
            return
        if not self._unsent:
            self.later(self._busy_until_s - self._events.now_s, self._flush)
        self._unsent.append(call)

    def later(self, delay_s: float, call: Call) -> None:
        self._events.after(delay_s, lambda: self._due(call))

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        held, self._held = self._held, []
        for call in held:
            self._due(call)
        self._is_awaited = False
        self.wake()

    def die(self) -> None:
        if self.is_dead:
            return
        self.is_dead = True
        self._inbox.clear()
        self._held.clear()
        self._unsent.clear()
        on_death, self.on_death = self.on_death, []
        for call in on_death:
            call()

    def _take_turn(self) -> None:
        if self.is_dead or self.is_paused:
            return
        self._is_awaited = False
        self._flush()
        try:
            self.turn()
        except Crash as crash:
            self.killed_by = crash.culprit
            self.die()

    def _due(self, call: Call) -> None:
        if self.is_paused:
            self._held.append(call)
        elif not self.is_dead:
            call()

    def _flush(self) -> None:
        if self._events.now_s < self._busy_until_s:
            return  # another turn has begun since, and has sent what was due
        unsent, self._unsent = self._unsent, []
        for call in unsent:
            call()
