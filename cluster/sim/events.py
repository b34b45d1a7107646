"""Virtual time: what happens when, in one thread and always in the same order."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import TypeAlias

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
