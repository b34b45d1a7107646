"""Connections between Baton's processes, whose ends have proved that they hold the cluster key.

The life of a connection:

1. A connected socket, TCP or unix, is wrapped at both ends; `handshake` lets them challenge each other
   (see baton/rpc/auth.py), in frames of at most 64 bytes, within a deadline.
2. `send` and `recv` whole frames (see baton/rpc/frames.py), from any threads. Every body is followed by a
   seal of 16 bytes under the session key and the frame's number, so that a frame changed, repeated, left out
   or moved is found. A frame that has begun must end within its deadline.
3. A peer that breaks a rule is dropped: closed, counted by reason, and the caller gets the WireError. A peer
   that closes or dies is PeerGone. `close` may be called from any thread, any number of times.
"""

import array
import contextlib
import math
import os
import select
import socket
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn, Self, TypeAlias

from baton.clock import Clock, SystemClock
from baton.errors import PeerGone, WireError
from baton.rpc.auth import MAX_CHALLENGE_BYTES, NO_SCHEMA, Challenge, LinkSecret, Role
from baton.rpc.frames import MAX_BODY_BYTES, MAX_CONTROL_BYTES, FrameReader, Seals, encode_frame
from baton.rpc.liveness import LINK_TIMEOUT_S

# Socket options that bound a peer's silence, and open files that travel with a frame.

Rights: TypeAlias = "list[tuple[int, int, array.array[int]]]"  # ancillary data, as sendmsg takes it
MAX_DESCRIPTORS: Final = 4  # open files that come with one frame, over unix sockets only
NUM_PROBES: Final = 3  # unanswered, of keepalive


def keep_alive(sock: socket.socket, timeout_s: float = LINK_TIMEOUT_S) -> None:
    """Have the kernel end a TCP connection whose peer's host acknowledges nothing for `timeout_s`.

    TCP_USER_TIMEOUT bounds data that was sent and is not acknowledged, keepalive a connection that is idle.
    """
    pause_s = max(1, int(timeout_s / (NUM_PROBES + 1)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, pause_s),
        (socket.TCP_KEEPINTVL, pause_s),
        (socket.TCP_KEEPCNT, NUM_PROBES),
        (socket.TCP_USER_TIMEOUT, max(1, round(timeout_s * 1000))),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def rights_of(descriptors: Sequence[int]) -> Rights:
    """ValueError for more than the peer takes."""
    if len(descriptors) > MAX_DESCRIPTORS:
        raise ValueError(f"{len(descriptors)} open files in one frame, {MAX_DESCRIPTORS} is most")
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []


__all__ = [
    "MAX_BODY_BYTES",
    "MAX_CONTROL_BYTES",
    "Connection",
    "DroppedPeers",
    "FrameReader",
    "Role",
    "encode_frame",
]
FRAME_TIMEOUT_S: Final = 10.0  # from a frame's first byte to its last
HANDSHAKE_TIMEOUT_S: Final = 5.0
_RIGHTS_BYTES: Final = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)


class DroppedPeers:
    """How many peers were dropped, by reason; shared by all connections of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, reason: str) -> None:
        with self._lock:
            self._counts[reason] += 1

    def counts(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)


class Connection:
    """One end, which owns its socket. Only `handshake` and `close` may come before the handshake."""

    def __init__(
        self,
        sock: socket.socket,
        key: LinkSecret,
        role: Role,
        *,
        dropped: DroppedPeers | None = None,
        clock: Clock | None = None,
        link_timeout_s: float = LINK_TIMEOUT_S,
        schema: bytes = NO_SCHEMA,
    ) -> None:
        """key: the same at both ends, or the keys that this end may use. schema: see Challenge.

        role: CONNECTING where `connect` was called.
        """
        self._challenge = Challenge(key, role, schema=schema)
        self._role = role
        self._socket = sock
        self._dropped = dropped or DroppedPeers()
        self._clock = clock or SystemClock()
        self._reader = FrameReader(MAX_CHALLENGE_BYTES + 1)
        self._frame_deadline_s = math.inf
        self._descriptors: list[int] = []
        self._seals: Seals | None = None  # from the handshake on
        self._send_lock, self._recv_lock = threading.RLock(), threading.RLock()
        self._close_lock = threading.Lock()
        self._is_closed = self._is_dropped = False
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(sock, link_timeout_s)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def session_key(self) -> bytes:
        """32 bytes that both ends of this connection alone know, for whatever else they seal."""
        key = self._challenge.session_key
        if key is None:
            raise WireError("the peer has not shown yet that it holds the cluster's key", reason="handshake")
        return key

    def handshake(self, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> Self:
        """Raises WireError, PeerGone or TimeoutError, and the connection is closed then."""
        try:
            with self._send_lock, self._recv_lock:
                self._exchange(self._clock.now_s() + timeout_s)
        except TimeoutError:
            raise self.drop(WireError("the peer did not prove itself in time", reason="handshake")) from None
        except PeerGone as error:
            message = "the peer left during the handshake: it may hold another key, or speak another version"
            raise self.drop(WireError(message, reason="handshake")) from error
        except WireError as error:
            raise self.drop(error) from None
        self._reader = FrameReader()
        return self

    def send(
        self, body: bytes, descriptors: Sequence[int] = (), *, timeout_s: float = FRAME_TIMEOUT_S
    ) -> None:
        """Send one frame whole. `descriptors`: open files of which the peer gets its own.

        A peer that does not take the frame within the timeout is dropped: half a frame can't be taken back.
        """
        rights = rights_of(descriptors)
        with self._send_lock:
            frame = self.frame(body)
            try:
                self._send_all(frame, rights, self._clock.now_s() + timeout_s)
            except TimeoutError:
                message = f"the peer took no frame of {len(frame)} bytes within {timeout_s:g} s"
                raise self.drop(WireError(message, reason="slow")) from None

    def frame(self, body: bytes) -> bytes:
        """The next frame, sealed; it must be written whole and before the one after it (see outbox.py)."""
        if self._is_closed:
            raise PeerGone("the connection is closed")
        return encode_frame(self._sealing().seal(body))

    def write_some(self, view: memoryview) -> int:
        """How many bytes the kernel took, without waiting: 0 when there is no room."""
        with self._send_lock:
            try:
                return self._socket.send(view)
            except BlockingIOError:
                return 0
            except OSError as error:
                self._gone(error)

    def wait_for_room(self, timeout_s: float) -> bool:
        """True, as soon as the kernel takes bytes. A peer that takes none within the timeout is dropped."""
        try:
            if self._wait(select.POLLOUT, self._clock.now_s() + timeout_s):
                return True
        except ValueError:  # the socket was closed meanwhile
            raise PeerGone("the connection is closed") from None
        raise self.drop(WireError(f"the peer took no byte within {timeout_s:g} s", reason="slow"))

    def recv(self, timeout_s: float | None = None) -> bytes:
        """The next body. None: wait as long as the peer lives and is silent. PeerGone: there is no next.

        TimeoutError when no frame has ended in time: the connection is as good as before, call again.
        """
        with self._recv_lock:
            deadline_s = math.inf if timeout_s is None else self._clock.now_s() + timeout_s
            try:
                return self._sealing().open(self._recv_frame(deadline_s))
            except WireError as error:
                raise self.drop(error) from None

    def take_descriptors(self) -> list[int]:
        """Open files that came with the frames received so far; closing them is the caller's from now on."""
        with self._recv_lock:
            taken, self._descriptors = self._descriptors, []
            return taken

    def drop(self, error: WireError) -> WireError:
        """Close and count, once a connection; returns the error, for the caller to raise."""
        with self._close_lock:
            is_first, self._is_dropped = not self._is_dropped, True
        if is_first:
            self._dropped.add(error.reason)
        self.close()
        return error

    def close(self) -> None:
        """Threads that wait in `send` or `recv` get PeerGone."""
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
        with contextlib.suppress(OSError):  # the peer may have been faster
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._send_lock, self._recv_lock:
            self._socket.close()
            for descriptor in self.take_descriptors():
                os.close(descriptor)

    def detach(self) -> socket.socket:
        """The bare socket, non-blocking, for bytes that are no frames; the connection is closed without it.

        No byte is lost: a connection never reads beyond the frame that it waits for.
        """
        with self._send_lock, self._recv_lock, self._close_lock:
            self._is_closed = True
            return socket.socket(fileno=self._socket.detach())

    def _exchange(self, deadline_s: float) -> None:
        if self._role is Role.CONNECTING:
            self._send_all(encode_frame(self._challenge.first()), [], deadline_s)
        while self._challenge.session_key is None:
            answer = self._challenge.receive(self._recv_frame(deadline_s))
            if answer is not None:
                self._send_all(encode_frame(answer), [], deadline_s)
        self._challenge.check_version()

    def _sealing(self) -> Seals:
        if self._seals is None:
            self._seals = Seals(self.session_key, self._role)
        return self._seals

    def _send_all(self, frame: bytes, rights: Rights, deadline_s: float) -> None:
        view = memoryview(frame)
        while view:
            try:
                num_sent = self._socket.sendmsg([view], rights) if rights else self._socket.send(view)
                view, rights = view[num_sent:], []
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline_s)
            except OSError as error:
                self._gone(error)

    def _recv_frame(self, deadline_s: float) -> bytes:
        while True:
            try:
                received = self._recv_some()
            except BlockingIOError:
                self._wait_for_more(deadline_s)
                continue
            except OSError as error:
                self._gone(error)
            if not received:
                self._gone(None)
            if not self._reader.has_begun:
                self._frame_deadline_s = self._clock.now_s() + FRAME_TIMEOUT_S
            bodies = self._reader.feed(received)
            if bodies:
                self._frame_deadline_s = math.inf
                return bodies[0]

    def _recv_some(self) -> bytes:
        num_wanted = min(self._reader.num_wanted, 1 << 16)  # room is made for what is there, not announced
        if self._socket.family != socket.AF_UNIX:
            return self._socket.recv(num_wanted)
        received, ancillary, flags, _ = self._socket.recvmsg(
            num_wanted, _RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        descriptors = array.array("i")
        for _, _, rights in ancillary:
            descriptors.frombytes(rights[: len(rights) - len(rights) % descriptors.itemsize])
        self._descriptors += descriptors
        if len(self._descriptors) > MAX_DESCRIPTORS or flags & socket.MSG_CTRUNC:
            raise WireError("more open files came than anybody asked for", reason="descriptors")
        return received

    def _wait_for_more(self, deadline_s: float) -> None:
        if self._clock.now_s() >= self._frame_deadline_s:
            raise WireError(f"a frame took longer than {FRAME_TIMEOUT_S:g} s to arrive", reason="slow")
        self._wait(select.POLLIN, deadline_s, at_most_until_s=self._frame_deadline_s)

    def _wait(self, event: int, deadline_s: float, at_most_until_s: float = math.inf) -> bool:
        now_s = self._clock.now_s()
        if now_s >= deadline_s:
            raise TimeoutError
        until_s = min(deadline_s, at_most_until_s)
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(None if until_s == math.inf else math.ceil((until_s - now_s) * 1000)))

    def _gone(self, error: OSError | None) -> NoReturn:
        self.close()
        where = "in the middle of a frame" if self._reader.has_begun else "between two frames"
        raise PeerGone(f"the peer is gone, {where}: {error or 'end of the stream'}") from error


# What one end of a connection has said and its peer has not taken yet: whoever speaks never waits.
#
# 1. `send` gives the kernel what it takes at once. Mostly that is the whole frame.
# 2. The rest is kept, and a thread sends it as the peer takes it; it ends with the last byte.
# 3. A peer that lets too much wait, or takes nothing for too long, is dropped.

MAX_UNSENT_BYTES: Final = 4 * MAX_CONTROL_BYTES


class Outbox:
    """Of a connection after its handshake, over which nothing else is sent."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._num_bytes = 0
        self._thread: threading.Thread | None = None  # there is one while something is unsent

    def send(self, body: bytes) -> None:
        """Returns at once. PeerGone, or WireError where the peer had to be dropped."""
        with self._lock:
            frame = memoryview(self._connection.frame(body))
            if self._num_bytes + len(frame) > MAX_UNSENT_BYTES:
                message = f"the peer has {self._num_bytes} bytes to take, no more is kept for it"
                raise self._connection.drop(WireError(message, reason="slow"))
            self._unsent.append(frame)
            self._num_bytes += len(frame)
            if self._thread is None:
                self._push()
                if self._unsent:
                    self._thread = self._started()

    def close(self) -> None:
        """After the connection: returns when the thread has ended."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _started(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="wire-outbox", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the process may have no more threads
            message = f"what the peer has not taken cannot be kept for it: {error}"
            raise self._connection.drop(WireError(message, reason="slow")) from error
        return thread

    def _run(self) -> None:
        with contextlib.suppress(PeerGone, WireError):
            while self._connection.wait_for_room(FRAME_TIMEOUT_S):
                with self._lock:
                    self._push()
                    if not self._unsent:
                        self._thread = None
                        return

    def _push(self) -> None:
        while self._unsent:
            frame = self._unsent[0]
            num_sent = self._connection.write_some(frame)
            self._num_bytes -= num_sent
            if num_sent < len(frame):
                self._unsent[0] = frame[num_sent:]
                return
            self._unsent.popleft()
