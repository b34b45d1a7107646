"""Liveness of one connection between two processes: when to send a ping, and when to drop the peer.

1. Each end pings every PING_S, also when other frames leave. A ping says for how long its sender has heard
   nothing, so that an end also learns that its own frames do not arrive.
2. Any byte counts as life. A link over which nothing came, or over which nothing arrived, for `timeout_s` is
   dropped by the end that notices.
3. Time in which this process itself did not run (SIGSTOP, a starved machine) does not count as the peer's
   silence: bytes that arrived meanwhile are unread.

The module does no I/O and reads no clock: the owner of the connection calls `tick` several times a second.
"""

import struct
from typing import Final

from baton.errors import WireError

LINK_TIMEOUT_S: Final = 8.0  # the default of the setting `link_timeout_s`
PING_S: Final = 0.5
LATE_TICK_S: Final = 1.0

# The first byte is one that no msgpack value begins with, so that a ping is never taken for a message.
_PING: Final = struct.Struct(">BI")
_MARK: Final = 0xC1
_MAX_MS: Final = 2**32 - 1


def is_ping(body: bytes) -> bool:
    """Return whether this frame body is a ping."""
    return len(body) == _PING.size and body[0] == _MARK


class LinkLife:
    """One end of one connection, from its handshake on."""

    def __init__(self, timeout_s: float, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._heard_s = self._looked_s = now_s
        self._pinged_s = now_s
        self._unheard_s = 0.0  # how long the peer had heard nothing, when it last said so

    def heard(self, now_s: float) -> None:
        """Bytes have come."""
        self._heard_s = now_s

    def take_ping(self, body: bytes) -> bool:
        """Return whether this frame body is a ping, and record the silence that the ping reports."""
        if not is_ping(body):
            return False
        self._unheard_s = _PING.unpack(body)[1] / 1000
        return True

    def silence_s(self, now_s: float) -> float:
        """Seconds since a byte came from the peer, or since one reached the peer: the longer of both."""
        return max(now_s - self._heard_s, self._unheard_s, 0.0)

    def tick(self, now_s: float) -> bytes | None:
        """The body of a ping that is due, None while none is. Raises WireError for a link to be dropped."""
        held_up_s, self._looked_s = now_s - self._looked_s, now_s
        if held_up_s > LATE_TICK_S:
            self._heard_s = min(now_s, self._heard_s + held_up_s)
            self._unheard_s = 0.0
        self._check(now_s)
        if now_s - self._pinged_s < PING_S:
            return None
        self._pinged_s = now_s
        return _PING.pack(_MARK, min(_MAX_MS, max(0, round((now_s - self._heard_s) * 1000))))

    def _check(self, now_s: float) -> None:
        if now_s - self._heard_s > self._timeout_s:
            raise WireError(f"nothing has come from the peer for {self._timeout_s:g} s", reason="silent")
        if self._unheard_s > self._timeout_s:
            raise WireError(f"nothing has reached the peer for {self._timeout_s:g} s", reason="unheard")
