"""Time as an argument, so that the simulator and the tests own it."""

import time
from typing import Protocol


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
