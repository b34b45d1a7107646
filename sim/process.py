"""Virtual time and simulated processes.

`Events` makes calls by their time, in one thread and always in the same order. A `SimProcess` runs one node:

1. Calls from outside wait in the process's inbox. A turn makes all of them, in order, then runs the process's
   program: a worker's loop steps its engine.
2. A turn may `spend` time, as a step of the model does. Messages sent during the turn leave when that time is
   over, and the next turn begins no sooner.
3. `later` is for the process's timers and I/O threads, which go on while a turn lasts.
4. `pause` is SIGSTOP: no turn and no timer until `resume`, which finds everything that came meanwhile.
5. `die` is SIGKILL: messages that have not left are never sent.
"""

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Final, TypeAlias

from baton.clock import Clock

Call: TypeAlias = Callable[[], None]
MAX_INBOX: Final = 20_000  # far more than honest peers leave unread


class Events:
    """Calls ordered by time; calls of one time are made in the order of scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Call]] = []
        self._serials = count()

    def at(self, time_s: float, call: Call) -> None:
        """Schedule a call. A time in the past means now."""
        heapq.heappush(self._calls, (max(time_s, self.now_s), next(self._serials), call))

    def after(self, delay_s: float, call: Call) -> None:
        """Schedule a call `delay_s` seconds from now."""
        self.at(self.now_s + delay_s, call)

    def run_until(self, time_s: float) -> None:
        """Make every call that is due by then, and set the time."""
        calls = self._calls
        while calls and calls[0][0] <= time_s:
            self.now_s, _, call = heapq.heappop(calls)
            call()
        self.now_s = time_s


class OffsetClock:
    """A clock that runs with the events from an offset: a process's own clock, or the calendar of all
    hosts."""

    def __init__(self, events: Events, offset_s: float) -> None:
        self._events = events
        self._offset_s = offset_s

    def now_s(self) -> float:
        return self._events.now_s + self._offset_s

    def jump(self, seconds: float) -> None:
        """Set the clock forward, or back. Only calendars jump; the clocks of processes never do."""
        self._offset_s += seconds


class Crash(Exception):
    """The process ends itself because of the request `culprit`."""

    def __init__(self, culprit: str) -> None:
        super().__init__(culprit)
        self.culprit = culprit


class SimProcess:
    """One process: its clock, its inbox, and its life."""

    def __init__(self, name: str, events: Events, clock_offset_s: float = 0.0) -> None:
        self.name = name
        self.clock: Clock = OffsetClock(events, clock_offset_s)
        self.is_dead = False
        self.is_paused = False
        self.killed_by = ""  # a request's id
        self.turn: Call = self.hear  # the program of one turn
        self.on_death: list[Call] = []
        self._events = events
        self._inbox: deque[Call] = deque()
        self._held: list[Call] = []  # timers that came due during a pause
        self._unsent: list[Call] = []  # of the current turn
        self._busy_until_s = 0.0
        self._is_awaited = False  # a turn is scheduled

    @property
    def num_unheard(self) -> int:
        """The number of calls in the inbox."""
        return len(self._inbox)

    def post(self, call: Call) -> None:
        """Put a call into the inbox."""
        if self.is_dead:
            return
        self._inbox.append(call)
        assert len(self._inbox) < MAX_INBOX, f"{self.name}'s inbox is full"
        self.wake()

    def wake(self) -> None:
        """Schedule a turn, as soon as the current one is over."""
        if not self._is_awaited and not self.is_dead and not self.is_paused:
            self._is_awaited = True
            self._events.at(self._busy_until_s, self._take_turn)

    def hear(self) -> None:
        """Make the calls that are in the inbox at the start."""
        for _ in range(len(self._inbox)):
            if self._inbox:  # a call may have killed the process
                self._inbox.popleft()()

    def spend(self, seconds: float) -> None:
        """Make this turn last longer."""
        self._busy_until_s = max(self._busy_until_s, self._events.now_s) + seconds

    def send(self, call: Call) -> None:
        """Make this call, which puts a message on a wire, when the turn is over."""
        if self._busy_until_s <= self._events.now_s:
            call()
            return
        if not self._unsent:
            self._events.at(self._busy_until_s, lambda: self._due(self._flush))
        self._unsent.append(call)

    def later(self, delay_s: float, call: Call) -> None:
        """Make this call after a delay, beside the turns."""
        self._events.after(delay_s, lambda: self._due(call))

    def pause(self) -> None:
        """Stop turns and timers."""
        self.is_paused = True

    def resume(self) -> None:
        """End a pause, and make the calls that came due meanwhile."""
        self.is_paused = False
        held, self._held = self._held, []
        for call in held:
            self._due(call)
        self._is_awaited = False
        self.wake()

    def die(self) -> None:
        """End the process; `on_death` is called once."""
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
            return  # another turn has begun since, and has sent the messages
        unsent, self._unsent = self._unsent, []
        for call in unsent:
            call()


class TimedProcess(SimProcess):
    """A process with a clock that includes the time of the present turn so far, so that turns can measure
    themselves.

    What a turn begins after `spend` begins at the end of that time.
    """

    def __init__(self, name: str, events: Events) -> None:
        super().__init__(name, events)
        self.clock = self
        self._is_in_turn = False

    def now_s(self) -> float:
        now_s = self._events.now_s
        return self._busy_until_s if self._is_in_turn and self._busy_until_s > now_s else now_s

    @property
    def is_busy(self) -> bool:
        """A turn spends time now."""
        return self._busy_until_s > self._events.now_s

    def later(self, delay_s: float, call: Call) -> None:
        self._events.at(self.now_s() + delay_s, lambda: self._due(call))

    def _take_turn(self) -> None:
        if self.is_busy:  # a call asked for this turn before the last one got longer
            self._events.at(self._busy_until_s, self._take_turn)
            return
        self._is_in_turn = True
        super()._take_turn()
        self._is_in_turn = False
