"""Time as an argument, so that the simulator and the tests own it."""

import time
from typing import Final, Protocol

LATE_TICK_S: Final = 1.0


class Clock(Protocol):
    """A source of monotonic time."""

    def now_s(self) -> float:
        """Return monotonic seconds; only differences mean anything."""


class SystemClock:
    """The clock of the machine."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that stands still until `advance` is called."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward. ValueError for negative seconds."""
        if seconds < 0:
            raise ValueError(f"time cannot go back: advance({seconds})")
        self._now_s += seconds


class TurnClock:
    """Stands still while one input is handled, so that a state machine is a function of its inputs and of
    one reading for each.
    """

    def __init__(self, source: Clock) -> None:
        self._source = source
        self._now_s = source.now_s()

    def now_s(self) -> float:
        """Return the reading of the last `turn`."""
        return self._now_s

    def turn(self) -> float:
        """Read the source; call before each input is handled."""
        self._now_s = self._source.now_s()
        return self._now_s


class PauseDetector:
    """Measures how long this process itself did not run, by the times of its ticks.

    Messages that arrived meanwhile are unread, so such a time does not count as silence of another process.
    """

    def __init__(self, now_s: float) -> None:
        self._ticked_s = now_s

    def pause_s(self, now_s: float) -> float:
        """Return the seconds since the last tick if they exceed LATE_TICK_S, else 0. Call in each tick."""
        since_s, self._ticked_s = now_s - self._ticked_s, now_s
        return since_s if since_s > LATE_TICK_S else 0.0
