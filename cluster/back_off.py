"""How long a process that keeps ending is left alone before it is started again."""

from typing import Final

FIRST_S: Final = 0.2
LONGEST_S: Final = 10.0
WELL_AFTER_S: Final = 60.0  # it was no crash loop, then


class BackOff:
    """Doubles from FIRST_S to LONGEST_S, and starts anew after a life of WELL_AFTER_S."""

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def after(self, lived_s: float) -> float:
        """Seconds to wait now that a life of `lived_s` has ended."""
        if lived_s >= WELL_AFTER_S:
            self._next_s = FIRST_S
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, LONGEST_S)
        return pause_s
