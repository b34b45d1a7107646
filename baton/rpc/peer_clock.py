"""The offset between the monotonic clocks of two processes, measured by the pings of their link.

Each ping carries the time at which it is sent, and two times about the last ping that its sender received:
when that ping was sent and when it came. A received ping thus completes a round trip of four times, as in
NTP:

    t1  our ping is sent, by our clock          t2  it is received, by the peer's clock
    t3  the peer's ping is sent, by its clock   t4  it is received, by our clock

The peer's clock is ahead by ((t2 - t1) + (t3 - t4)) / 2, with an error of at most half of the time on the
wire, (t4 - t1) - (t3 - t2). Of all round trips the best one counts: the shortest, where age lengthens it by
the drift that two clocks may have.
"""

import math
from typing import Final, NamedTuple

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


class PeerClock:
    """Measures the offset of one peer's clock over one link."""

    def __init__(self) -> None:
        self._echo = (0.0, 0.0)
        self._best: ClockOffset | None = None
        self._best_s = 0.0  # when it was measured

    def times(self, now_s: float) -> PingTimes:
        """Return the times of a ping that is sent now."""
        return PingTimes(now_s, *self._echo)

    def take(self, ping: PingTimes, now_s: float) -> None:
        """Take a ping that was received now."""
        self._echo = ping.sent_s, now_s
        if ping.echo_s <= 0.0:
            return
        wire_s = (now_s - ping.echo_s) - (ping.sent_s - ping.echo_received_s)
        if not (math.isfinite(wire_s) and wire_s >= 0.0):
            return  # one of the clocks was set, or the peer makes up times
        offset_s = ((ping.echo_received_s - ping.echo_s) + (ping.sent_s - now_s)) / 2
        best = self._offset(now_s)
        if best is None or wire_s / 2 <= best.error_s:
            self._best, self._best_s = ClockOffset(offset_s, wire_s / 2), now_s

    @property
    def offset(self) -> ClockOffset | None:
        """The offset by the best round trip; None before the first one."""
        return self._best

    def _offset(self, now_s: float) -> ClockOffset | None:
        """Return the best round trip with the error that it has now."""
        best = self._best
        return None if best is None else best._replace(error_s=best.error_s + DRIFT * (now_s - self._best_s))
