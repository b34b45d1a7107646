"""Where the time of one transfer went, as its source saw it.

At every moment a transfer is in one phase, the first of these that applies; the spans are how long it was in
each, so they add up to the total:

    handshake   no transport is open yet
    reserve     the destination has not granted pages
    moving      a piece is under way; split into gather, wire and scatter as the pieces' own clocks say
    waiting     everything that was computed is there, and more is to come
    verify      all is written; digests, and the destination's word that they are right

`exposed_s` is none of them: what was left of the transfer when the last page was computed, which is what the
request had to wait for.
"""

from enum import Enum
from typing import Final

import msgspec

from baton.clock import Clock
from baton.kvtransfer.transport import Progress


class Phase(Enum):
    HANDSHAKE = "handshake"
    RESERVE = "reserve"
    MOVING = "moving"
    WAITING = "waiting"
    VERIFY = "verify"


class TransferTimes(msgspec.Struct, frozen=True, kw_only=True):
    """All but exposed_s add up to total_s."""

    total_s: float
    handshake_s: float
    reserve_s: float
    gather_s: float
    wire_s: float
    waiting_s: float
    verify_s: float
    exposed_s: float
    num_bytes: int
    num_messages: int


_NOTHING: Final = 0.0


class Timeline:
    """Told what happens when it happens."""

    def __init__(self, clock: Clock, num_units: int) -> None:
        """num_units: of all parts together, as `wrote` counts them."""
        self._clock = clock
        self._num_units = num_units
        self._started_s = self._changed_s = clock.now_s()
        self._last_offer_s = self._started_s
        self._ended_s: float | None = None
        self._phase = Phase.HANDSHAKE
        self._seconds = dict.fromkeys(Phase, _NOTHING)
        self._num_in_flight = 0
        self._num_unwritten = num_units
        self._gather_s = self._moving_s = _NOTHING  # of all pieces, which may be under way side by side
        self._num_bytes = self._num_messages = 0

    def settled(self) -> None:
        self._enter(Phase.RESERVE)

    def granted(self) -> None:
        self._enter(Phase.WAITING)

    def offered(self) -> None:
        self._last_offer_s = self._clock.now_s()

    def pushed(self) -> None:
        self._num_in_flight += 1
        self._enter(Phase.MOVING)

    def wrote(self, num_units: int, progress: Progress) -> None:
        """A piece of a part has ended, well or not."""
        self._num_in_flight -= 1
        self._num_unwritten -= num_units
        spans = progress.spans
        self._gather_s += spans.gather_s
        self._moving_s += spans.queued_s + spans.gather_s + spans.wire_s
        self._num_bytes += progress.num_bytes
        self._num_messages += progress.num_messages
        if not self._num_in_flight:
            self._enter(Phase.VERIFY if self._num_unwritten <= 0 else Phase.WAITING)

    def finished(self) -> None:
        self._enter(self._phase)
        self._ended_s = self._changed_s

    def times(self) -> TransferTimes:
        """Of a transfer that has finished."""
        assert self._ended_s is not None
        moving_s = self._seconds[Phase.MOVING]
        gather_s = moving_s * self._gather_s / self._moving_s if self._moving_s else _NOTHING
        return TransferTimes(
            total_s=self._ended_s - self._started_s,
            handshake_s=self._seconds[Phase.HANDSHAKE],
            reserve_s=self._seconds[Phase.RESERVE],
            gather_s=gather_s,
            wire_s=moving_s - gather_s,
            waiting_s=self._seconds[Phase.WAITING],
            verify_s=self._seconds[Phase.VERIFY],
            exposed_s=self._ended_s - self._last_offer_s,
            num_bytes=self._num_bytes,
            num_messages=self._num_messages,
        )

    def _enter(self, phase: Phase) -> None:
        now_s = self._clock.now_s()
        self._seconds[self._phase] += now_s - self._changed_s
        self._changed_s = now_s
        self._phase = phase
