"""The duration of a transfer, by phase, measured at the source.

At every moment a transfer is in exactly one phase, the first phase in this list that applies. The phases'
durations add up to the total:

    handshake   the transports are being opened
    moving      at least one piece is being sent
    waiting     all offered units are written, and more units follow
    verify      all units are written; the destination compares digests

`exposed_s` is not a phase: it is the rest of the transfer after the last page was computed, which is the
delay that the request sees.
"""

from enum import Enum

import msgspec

from baton.clock import Clock
from baton.kvtransfer.transports.base import PieceOutcome


class Phase(Enum):
    """The phases of an outgoing transfer, as listed above."""

    HANDSHAKE = "handshake"
    MOVING = "moving"
    WAITING = "waiting"
    VERIFY = "verify"


class TransferTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Durations and counts of one transfer. The durations of the phases add up to total_s."""

    total_s: float
    handshake_s: float
    moving_s: float
    waiting_s: float
    verify_s: float
    exposed_s: float
    num_bytes: int


class Timeline:
    """Measures the phases of one transfer. The caller reports each event when it happens."""

    def __init__(self, clock: Clock, num_units: int) -> None:
        """Start in HANDSHAKE. num_units: the units of all shards together, as `wrote` counts them."""
        self._clock = clock
        self._started_s = self._changed_s = clock.now_s()
        self._last_offer_s = self._started_s
        self._phase = Phase.HANDSHAKE
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._num_in_flight = 0
        self._num_unwritten = num_units
        self._num_bytes = 0

    def opened(self) -> None:
        """Record that the transports are open."""
        self._enter(Phase.WAITING)

    def offered(self) -> None:
        """Record that pages were offered."""
        self._last_offer_s = self._clock.now_s()

    def pushed(self) -> None:
        """Record that a piece is being sent."""
        self._num_in_flight += 1
        self._enter(Phase.MOVING)

    def wrote(self, num_units: int, outcome: PieceOutcome) -> None:
        """Record the end of a piece, successful or not. num_units: the units of the piece."""
        self._num_in_flight -= 1
        self._num_unwritten -= num_units
        self._num_bytes += outcome.num_bytes
        if not self._num_in_flight:
            self._enter(Phase.VERIFY if self._num_unwritten <= 0 else Phase.WAITING)

    @property
    def active_s(self) -> float:
        """The seconds so far in which transports were opened or pieces were sent."""
        active_s = self._seconds[Phase.HANDSHAKE] + self._seconds[Phase.MOVING]
        if self._phase in (Phase.HANDSHAKE, Phase.MOVING):
            active_s += self._clock.now_s() - self._changed_s
        return active_s

    def end(self) -> TransferTimes:
        """Record the end of the transfer and return its durations."""
        self._enter(self._phase)
        return TransferTimes(
            total_s=self._changed_s - self._started_s,
            handshake_s=self._seconds[Phase.HANDSHAKE],
            moving_s=self._seconds[Phase.MOVING],
            waiting_s=self._seconds[Phase.WAITING],
            verify_s=self._seconds[Phase.VERIFY],
            exposed_s=self._changed_s - self._last_offer_s,
            num_bytes=self._num_bytes,
        )

    def _enter(self, phase: Phase) -> None:
        now_s = self._clock.now_s()
        self._seconds[self._phase] += now_s - self._changed_s
        self._changed_s = now_s
        self._phase = phase
