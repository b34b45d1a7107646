"""The overload ladder: which rung (baton/pressure.py) the cluster is on, by what is measured.

A pressure of 1 is all that can be borne: answers about to be late, all KV pages in use, or tokens as slow as
was promised at most. Above HIGH for CLIMB_S the ladder is climbed by one rung, below LOW for DESCEND_S it is
climbed down by one; in between it stays. Only promises can be broken: where no request has an objective,
waiting is all that is done. And only lateness is a reason to refuse anybody: the other two can be relieved.
"""

from collections import Counter
from typing import Final, NamedTuple

from baton.pressure import Rung

HIGH: Final = 0.9
LOW: Final = 0.6
CLIMB_S: Final = 1.0
DESCEND_S: Final = 1.0
MAX_TOLD: Final = 64  # moves that are remembered


class Reading(NamedTuple):
    """Shares of what can be borne; see above."""

    has_waiting: bool
    has_objectives: bool  # any request that waits, or that workers have
    lateness: float  # of what waits: its wait by the wait that it can bear
    pages: float  # of the decode workers' KV pages, those in use
    itl: float  # the time of a step by the shortest tpot_ms that was promised

    @property
    def pressure(self) -> float:
        return max(self.lateness, self.pages, self.itl)


class Move(NamedTuple):
    at_s: float
    rung: Rung
    reading: Reading


class Ladder:
    def __init__(self, now_s: float) -> None:
        self.rung = Rung.CALM
        self.climbs: Counter[Rung] = Counter()  # how often each rung was climbed to
        self.moves: list[Move] = []  # the latest
        self._since_s = now_s  # the pressure has been where it is
        self._zone = 0  # 1: above HIGH, -1: below LOW

    def update(self, reading: Reading, now_s: float) -> bool:
        """Whether the rung has changed. To be called twice a second at least, or it is climbed slower."""
        zone = 1 if reading.pressure > HIGH else -1 if reading.pressure < LOW else 0
        if zone != self._zone or now_s < self._since_s:
            self._zone, self._since_s = zone, now_s
        rung = min(self._next(reading, now_s), _highest(reading))
        if rung == self.rung:
            return False
        if rung > self.rung:
            self.climbs[rung] += 1
        self.rung = rung
        self._since_s = now_s
        self.moves.append(Move(now_s, rung, reading))
        del self.moves[:-MAX_TOLD]
        return True

    def _next(self, reading: Reading, now_s: float) -> Rung:
        if self.rung is Rung.CALM and reading.has_waiting:
            return Rung.QUEUE
        held_s = now_s - self._since_s
        if self._zone > 0 and held_s >= CLIMB_S and self.rung < Rung.SHED:
            return Rung(self.rung + 1)
        if self._zone < 0 and held_s >= DESCEND_S and self.rung > Rung.QUEUE:
            return Rung(self.rung - 1)
        if self.rung <= Rung.QUEUE and self._zone <= 0:
            return Rung.QUEUE if reading.has_waiting else Rung.CALM
        return self.rung


def _highest(reading: Reading) -> Rung:
    if not reading.has_objectives:
        return Rung.QUEUE
    return Rung.SHED if reading.lateness > LOW else Rung.CLIP
