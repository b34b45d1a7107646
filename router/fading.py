"""A sum in which what was added long ago counts little."""

from math import exp


class Fading:
    def __init__(self, memory_s: float, now_s: float) -> None:
        """What was added memory_s ago counts e times less; a steady flow of 1 a second comes to memory_s."""
        self._memory_s = memory_s
        self._sum = 0.0
        self._at_s = now_s

    def add(self, amount: float, now_s: float) -> None:
        self._sum = self.at(now_s) + amount
        self._at_s = now_s

    def at(self, now_s: float) -> float:
        return self._sum * exp((self._at_s - now_s) / self._memory_s)
