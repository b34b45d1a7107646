"""Liveness of a connection (`LinkLife`) and of an engine's step (`StepWatchdog`).

A connection:

1. Each end pings every PING_S, also when other frames leave. A ping says for how long its sender has heard
   nothing, so that an end also learns that its own frames do not arrive. Its times measure the offset of the
   peer's clock (baton/rpc/peer_clock.py).
2. Any received byte counts as life. An end drops a link after `timeout_s` in which nothing came from the peer
   or nothing reached the peer.
3. Time in which this process itself did not run (SIGSTOP, a starved machine) does not count as the peer's
   silence: bytes that arrived meanwhile are unread.

A step:

1. The engine's thread calls `begin` at the head of each turn of its loop and `sized` once the batch is known.
   Any other thread may read `present`: one immutable value, replaced as a whole.
2. A step's bound is the longest of `timeout_s` and FACTOR times the expected duration. The expected duration
   comes from this process's own steps, by size in powers of two: the slowest recent step of the nearest
   measured size, scaled up from a smaller size by the number of tokens.
3. The first step of a process may compile kernels, so it may take FIRST_STEP_S.
4. Routers get the age of the step every BEAT_S: see `SignsOfLife` in baton/rpc/server.py.

`LinkLife` reads no clock: the owner of the connection calls `tick` several times a second.
"""

import struct
from typing import Final

from baton.clock import Clock, PauseDetector
from baton.errors import WireError
from baton.messages.bounds import MAX_SECONDS, STEP_TIMEOUT_S
from baton.messages.workers import RunningStep
from baton.rpc.peer_clock import PeerClock, PingTimes

BEAT_S: Final = 1.0  # between two heartbeats, and two signs of life
PING_S: Final = 0.5

# The first byte is one that no msgpack value begins with, so that a ping is never taken for a message.
_PING: Final = struct.Struct(">BIddd")
_MARK: Final = 0xC1
_MAX_MS: Final = 2**32 - 1


def is_ping(body: bytes) -> bool:
    """Return whether this frame body is a ping."""
    return len(body) == _PING.size and body[0] == _MARK


class LinkLife:
    """Liveness of one connection at one of its ends, from the handshake on."""

    def __init__(self, timeout_s: float, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._heard_s = self._pinged_s = now_s
        self._pauses = PauseDetector(now_s)
        self._unheard_s = 0.0  # how long the peer had heard nothing, by its last ping
        self.peer_clock = PeerClock()

    def heard(self, now_s: float) -> None:
        """Record that bytes have come from the peer."""
        self._heard_s = now_s

    def take_ping(self, body: bytes, now_s: float) -> bool:
        """Return whether this frame body is a ping, and record what it reports. now_s: it was received."""
        if not is_ping(body):
            return False
        _, unheard_ms, *times = _PING.unpack(body)
        self._unheard_s = unheard_ms / 1000
        self.peer_clock.take(PingTimes(*times), now_s)
        return True

    def silence_s(self, now_s: float) -> float:
        """Return the seconds since a byte came from the peer or reached the peer, the longer of both."""
        return max(self.quiet_s(now_s), self._unheard_s)

    def quiet_s(self, now_s: float) -> float:
        """Return the seconds since a byte came from the peer."""
        return max(now_s - self._heard_s, 0.0)

    def tick(self, now_s: float) -> bytes | None:
        """Return the body of a ping when one is due, to be sent at once.

        Raises WireError when the link must be dropped.
        """
        if pause_s := self._pauses.pause_s(now_s):
            self._heard_s = min(now_s, self._heard_s + pause_s)
            self._unheard_s = 0.0
        if now_s - self._heard_s > self._timeout_s:
            raise WireError(f"nothing has come from the peer for {self._timeout_s:g} s", reason="silent")
        if self._unheard_s > self._timeout_s:
            raise WireError(f"nothing has reached the peer for {self._timeout_s:g} s", reason="unheard")
        if now_s - self._pinged_s < PING_S:
            return None
        self._pinged_s = now_s
        unheard_ms = min(_MAX_MS, max(0, round((now_s - self._heard_s) * 1000)))
        return _PING.pack(_MARK, unheard_ms, *self.peer_clock.times(now_s))


FACTOR: Final = 8.0
FIRST_STEP_S: Final = 600.0
_FADE: Final = 0.02  # of the slowest step, with each faster step of its size


class StepWatchdog:
    """Measures steps on the engine's thread. The thread that sends signs of life reads `present`."""

    def __init__(self, clock: Clock, timeout_s: float = STEP_TIMEOUT_S) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._slowest_s: dict[int, float] = {}  # bit length of the number of tokens -> seconds
        # Work outside a batch, such as copies, may take as long as a first step until a step has ended.
        self._present = clock.now_s(), 0, self.bound_s(1)  # its beginning, tokens and bound

    def begin(self) -> None:
        """Begin a turn of the engine's loop, and learn from the duration of the last step."""
        now_s, (began_s, num_tokens, _) = self._clock.now_s(), self._present
        if num_tokens:
            self._learn(num_tokens, now_s - began_s)
        self._present = now_s, 0, self.bound_s(1)

    def sized(self, num_tokens: int) -> None:
        """Set the size of this turn's batch, which is about to run."""
        if num_tokens:
            self._present = self._present[0], num_tokens, self.bound_s(num_tokens)

    @property
    def present(self) -> RunningStep:
        """The current step. Any thread may ask."""
        began_s, num_tokens, bound_s = self._present
        age_s = min(MAX_SECONDS, max(0.0, self._clock.now_s() - began_s))
        return RunningStep(age_s=age_s, num_tokens=num_tokens, bound_s=bound_s)

    def bound_s(self, num_tokens: int) -> float:
        """Return the seconds that a step of this many tokens may take."""
        expected_s = self._expected_s(num_tokens)
        allowed_s = FIRST_STEP_S if expected_s is None else FACTOR * expected_s
        return min(MAX_SECONDS, max(self._timeout_s, allowed_s))

    def _learn(self, num_tokens: int, step_s: float) -> None:
        size = num_tokens.bit_length()
        slowest_s = self._slowest_s.get(size, step_s)
        self._slowest_s[size] = max(step_s, slowest_s + _FADE * (step_s - slowest_s))

    def _expected_s(self, num_tokens: int) -> float | None:
        """Return the expected seconds of a step of this many tokens; None before the first step has ended."""
        size = num_tokens.bit_length()
        if size in self._slowest_s:
            return self._slowest_s[size]
        smaller = max((other for other in self._slowest_s if other < size), default=None)
        larger = min((other for other in self._slowest_s if other > size), default=None)
        guesses_s = [] if larger is None else [self._slowest_s[larger]]
        if smaller is not None:
            guesses_s.append(self._slowest_s[smaller] * 2 ** (size - smaller))
        return min(guesses_s, default=None)
