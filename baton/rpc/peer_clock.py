"""The offset between the monotonic clocks of two processes, measured by the pings of their link.

Each ping carries the time at which it is sent, and two times about the last ping that its sender received:
when that ping was sent and when it came. A received ping thus tells of both ways, as in NTP:

    t1  our ping is sent, by our clock          t2  it is received, by the peer's clock
    t3  the peer's ping is sent, by its clock   t4  it is received, by our clock

t2 - t1 is the time there plus the offset of the peer's clock, t4 - t3 the time back less the offset. A ping
may wait, for a busy process or for a core, and never takes less than its wire, so the shortest of each way
counts, where age lengthens it by the drift that two clocks may have. The offset is half of the difference of
both, with an error of at most half of their sum.
"""

import math
from typing import Final, NamedTuple

from baton.messages.bounds import MAX_SECONDS

DRIFT: Final = 15e-6  # seconds a second, as NTP assumes


class ClockOffset(NamedTuple):
    """A peer's clock relative to ours."""

    offset_s: float  # the peer's clock less ours
    error_s: float  # at most

    def ours(self, peer_s: float) -> float:
        """Return the time by our clock of a time by the peer's."""
        return peer_s - self.offset_s


SAME_CLOCK: Final = ClockOffset(0.0, 0.0)


class PingTimes(NamedTuple):
    """The times in a ping, by the clocks of its two ends; 0 before its sender has received a ping."""

    sent_s: float  # by the sender's clock
    echo_s: float = 0.0  # when the last ping to the sender was sent, by the clock of the ping's receiver
    echo_received_s: float = 0.0  # when it came, by the sender's clock


class _Shortest:
    """The shortest time of one way, and when it was measured."""

    def __init__(self) -> None:
        self.seconds = math.inf
        self._measured_s = 0.0

    def take(self, seconds: float, now_s: float, *, is_reset: bool = False) -> None:
        """Take a measured time if it is the shortest, or the first after a reset."""
        aged_s = self.seconds + DRIFT * (now_s - self._measured_s)
        if is_reset or seconds <= aged_s:
            self.seconds, self._measured_s = seconds, now_s


class PeerClock:
    """Measures the offset of one peer's clock over one link."""

    def __init__(self) -> None:
        # None before the first ping has returned, or when the times are unusable.
        self.offset: ClockOffset | None = None
        self._echo = (0.0, 0.0)
        self._there, self._back = _Shortest(), _Shortest()

    def times(self, now_s: float) -> PingTimes:
        """Return the times of a ping that is sent now."""
        return PingTimes(now_s, *self._echo)

    def take(self, ping: PingTimes, now_s: float) -> None:
        """Take a ping that was received now. Times that are no numbers are ignored."""
        if not all(map(math.isfinite, ping)):
            return
        self._echo = ping.sent_s, now_s
        if ping.echo_s <= 0.0:
            return
        there_s, back_s = ping.echo_received_s - ping.echo_s, now_s - ping.sent_s
        self._there.take(there_s, now_s)
        self._back.take(back_s, now_s)
        if self._there.seconds + self._back.seconds < 0.0:  # a clock has jumped: one machine was suspended
            self._there.take(there_s, now_s, is_reset=True)
            self._back.take(back_s, now_s, is_reset=True)
        self.offset = self._measured()

    def _measured(self) -> ClockOffset | None:
        """Return the offset by the shortest times; None if they tell nothing."""
        there_s, back_s = self._there.seconds, self._back.seconds
        offset = ClockOffset((there_s - back_s) / 2, max(0.0, (there_s + back_s) / 2))
        return offset if math.isfinite(offset.offset_s) and offset.error_s <= MAX_SECONDS else None
