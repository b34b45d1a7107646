"""A connection between two processes for code that runs on threads.

The life of a connection:

1. Each end wraps its connected socket, TCP or unix. In `handshake` both ends prove, within a deadline, that
   they hold the cluster key (baton/rpc/session.py).
2. `send` and `recv` whole frames, from any threads. A frame that has begun must end within its deadline.
3. A peer that breaks a rule is dropped: the connection is closed, the peer is counted by reason, and the
   caller gets the WireError. When a peer closes or dies, the caller gets PeerGone. Any thread may call
   `close`, any number of times.

An `Outbox` sends without waiting for the peer. A `MessageStream` also reads, in a thread of its own.
"""

import array
import contextlib
import logging
import math
import os
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Generic, NoReturn, Self, TypeAlias, TypeVar

import msgspec

from baton.clock import Clock, SystemClock
from baton.errors import PeerGone, WireError
from baton.messages.bounds import LINK_TIMEOUT_S, MAX_BODY_BYTES, MAX_FRAME_BYTES
from baton.messages.workers import RankZero
from baton.rpc.auth import NO_SCHEMA, Generations, LinkSecret, Role
from baton.rpc.liveness import PING_S, LinkLife
from baton.rpc.session import FRAME_TIMEOUT_S, HANDSHAKE_TIMEOUT_S, Session

logger = logging.getLogger(__name__)
Rights: TypeAlias = "list[tuple[int, int, array.array[int]]]"  # ancillary data, as sendmsg takes it
MAX_DESCRIPTORS: Final = 4  # open files that come with one frame, over unix sockets only
NUM_PROBES: Final = 3  # unanswered keepalive probes
MessageT = TypeVar("MessageT")
_RIGHTS_BYTES: Final = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)


def keep_alive(sock: socket.socket, timeout_s: float = LINK_TIMEOUT_S) -> None:
    """Have the kernel end a TCP connection when the peer's host acknowledges nothing for `timeout_s`.

    TCP_USER_TIMEOUT covers unacknowledged data. Keepalive covers an idle connection.
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


DROPPED: Final = "dropped_"  # before the reason, in the name of a counter


class RankNetwork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The addresses and keys of the connections between a rank, or its agent, and rank 0."""

    rank_zero: RankZero
    own_host: str  # the address of this rank's node
    link_timeout_s: float = LINK_TIMEOUT_S  # of the connections to other ranks
    keys: Generations  # of workers, or of this replica alone; they never cross the network


class DroppedPeers:
    """Counts of dropped peers by reason, shared by all connections of a process."""

    def __init__(self, counters: Counter[str] | None = None) -> None:
        """counters: the counters of the process, to count in; None: counters of its own."""
        self._lock = threading.Lock()
        self._counters = Counter[str]() if counters is None else counters

    def add(self, reason: str) -> None:
        """Count one dropped peer."""
        with self._lock:
            self._counters[DROPPED + reason] += 1

    def counts(self) -> Mapping[str, int]:
        """Return a copy: reason -> number of peers."""
        with self._lock:
            every = dict(self._counters)
        return {name.removeprefix(DROPPED): num for name, num in every.items() if name.startswith(DROPPED)}


class Connection:
    """One end of a connection; owns its socket.

    Before the handshake only `handshake` and `close` are legal.
    """

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
        """role: CONNECTING at the end that called `connect`. key, schema: see Session."""
        self._session = Session(key, role, self._write_handshake, schema=schema)
        self._socket = sock
        self._dropped = dropped or DroppedPeers()
        self._clock = clock or SystemClock()
        self._handshake_deadline_s = math.inf
        self._descriptors: list[int] = []
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
        """32 secret bytes that both ends share, to derive other keys from. WireError before the handshake."""
        return self._session.session_key

    def handshake(self, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> Self:
        """Prove both ends to each other. Raises WireError when that fails; the connection is closed then."""
        try:
            with self._send_lock, self._recv_lock:
                self._handshake_deadline_s = self._clock.now_s() + timeout_s
                self._session.open()
                while not self._session.is_proven:
                    self._receive(self._handshake_deadline_s)
        except TimeoutError:
            raise self.drop(WireError("the peer did not prove itself in time", reason="handshake")) from None
        except PeerGone as error:
            message = "the peer left during the handshake: it may hold another key, or speak another version"
            raise self.drop(WireError(message, reason="handshake")) from error
        except WireError as error:
            raise self.drop(error) from None
        return self

    def send(
        self, body: bytes, descriptors: Sequence[int] = (), *, timeout_s: float = FRAME_TIMEOUT_S
    ) -> None:
        """Send one whole frame, and duplicates of these open files. ValueError: too many descriptors.

        A peer that does not take the frame within the timeout is dropped: half a frame cannot be taken back.
        """
        if len(descriptors) > MAX_DESCRIPTORS:
            raise ValueError(f"{len(descriptors)} open files in one frame, {MAX_DESCRIPTORS} is most")
        rights: Rights = []
        if descriptors:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        with self._send_lock:
            frame = self.frame(body)
            try:
                self._send_all(frame, rights, self._clock.now_s() + timeout_s)
            except TimeoutError:
                message = f"the peer took no frame of {len(frame)} bytes within {timeout_s:g} s"
                raise self.drop(WireError(message, reason="slow")) from None

    def frame(self, body: bytes) -> bytes:
        """Return the sealed frame of a body. Frames must be written whole and in the order of the calls."""
        if self._is_closed:
            raise PeerGone("the connection is closed")
        return self._session.frame(body)

    def write_some(self, view: memoryview) -> int:
        """Write without waiting. Return the number of written bytes; 0 when the kernel has no room."""
        with self._send_lock:
            try:
                return self._socket.send(view)
            except BlockingIOError:
                return 0
            except OSError as error:
                self._gone(error)

    def wait_for_room(self, timeout_s: float) -> None:
        """Wait until the kernel has room for bytes. A peer that takes none within the timeout is dropped."""
        try:
            if self._wait(select.POLLOUT, self._clock.now_s() + timeout_s):
                return
        except ValueError:  # another thread has closed the socket
            raise PeerGone("the connection is closed") from None
        raise self.drop(WireError(f"the peer took no byte within {timeout_s:g} s", reason="slow"))

    def recv(self, timeout_s: float | None = None) -> bytes:
        """Return the next body. timeout_s: None waits as long as the peer lives.

        Raises PeerGone when the peer has closed the connection or died, and TimeoutError when no frame is
        complete in time; after a TimeoutError `recv` may be called again.
        """
        with self._recv_lock:
            deadline_s = math.inf if timeout_s is None else self._clock.now_s() + timeout_s
            try:
                while True:
                    for body in self._receive(deadline_s):
                        return body
            except WireError as error:
                raise self.drop(error) from None

    def recv_message(self, decode: Callable[[bytes], MessageT], timeout_s: float | None = None) -> MessageT:
        """Return the next message, decoded. A peer that sends a body that `decode` refuses is dropped.

        Raises WireError then, and otherwise what `recv` raises.
        """
        try:
            return decode(self.recv(timeout_s))
        except WireError as error:
            raise self.drop(error) from None

    def take_descriptors(self) -> list[int]:
        """Return the open files of the frames received so far. The caller must close them."""
        with self._recv_lock:
            taken, self._descriptors = self._descriptors, []
            return taken

    def drop(self, error: WireError) -> WireError:
        """Close the connection, and count the peer once. Return the error, for the caller to raise."""
        with self._close_lock:
            is_first, self._is_dropped = not self._is_dropped, True
        if is_first:
            self._dropped.add(error.reason)
        self.close()
        return error

    def close(self) -> None:
        """Close the socket. Threads that wait in `send` or `recv` get PeerGone."""
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
        """Close the connection, and return its non-blocking socket for bytes without frames.

        No byte is lost: a connection never reads beyond the present frame.
        """
        with self._send_lock, self._recv_lock, self._close_lock:
            self._is_closed = True
            return socket.socket(fileno=self._socket.detach())

    def _write_handshake(self, frame: bytes) -> None:
        self._send_all(frame, [], self._handshake_deadline_s)

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

    def _receive(self, deadline_s: float) -> list[bytes]:
        """Receive some bytes. Return the bodies that they complete, at most one."""
        while True:
            try:
                received = self._recv_some()
            except BlockingIOError:
                self._session.check_deadline(self._clock.now_s())
                self._wait(select.POLLIN, deadline_s, at_most_until_s=self._session.frame_deadline_s)
                continue
            except OSError as error:
                self._gone(error)
            if not received:
                self._gone(None)
            return list(self._session.receive(received, self._clock.now_s()))

    def _recv_some(self) -> bytes:
        num_wanted = min(self._session.num_wanted, 1 << 16)  # no memory for what a header only announces
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
            raise WireError("more open files came than were asked for", reason="descriptors")
        return received

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
        where = "in the middle of a frame" if self._session.has_begun else "between two frames"
        raise PeerGone(f"the peer is gone, {where}: {error or 'end of the stream'}") from error


MAX_UNSENT_BYTES: Final = 4 * MAX_FRAME_BYTES


class Outbox:
    """Sends over a connection without waiting for the peer. Nothing else may send over that connection.

    1. `send` writes the bytes that the kernel takes at once, mostly the whole frame.
    2. A thread sends the other bytes as the peer takes them. The thread ends with the last byte.
    3. A peer is dropped when too many bytes wait for it, or when it takes none for too long.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        max_unsent_bytes: float = MAX_UNSENT_BYTES,
        timeout_s: float = FRAME_TIMEOUT_S,
    ) -> None:
        """max_unsent_bytes: that may wait for the peer. timeout_s: in which the peer must take a byte."""
        self._connection = connection
        self._max_unsent_bytes = max_unsent_bytes
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._num_bytes = 0
        self._thread: threading.Thread | None = None  # while something is unsent

    def send(self, body: bytes) -> None:
        """Send a body without waiting. Raises PeerGone, or WireError when the peer had to be dropped."""
        with self._lock:
            frame = memoryview(self._connection.frame(body))
            if self._num_bytes + len(frame) > self._max_unsent_bytes:
                message = f"the peer has {self._num_bytes} bytes to take, no more is kept for it"
                raise self._connection.drop(WireError(message, reason="slow"))
            self._unsent.append(frame)
            self._num_bytes += len(frame)
            if self._thread is None:
                self._push()
                if self._unsent:
                    self._thread = self._start_thread()

    def close(self) -> None:
        """Wait until the thread has ended. Close the connection first."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _start_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="rpc-outbox", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the process may have no more threads
            message = f"what the peer has not taken cannot be kept for it: {error}"
            raise self._connection.drop(WireError(message, reason="slow")) from error
        return thread

    def _run(self) -> None:
        with contextlib.suppress(PeerGone, WireError):
            while True:
                self._connection.wait_for_room(self._timeout_s)
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


# A connection as a stream of messages, which the owner's thread handles.
#
# 1. A thread reads messages and posts each as a call for the owner's thread to make. While MAX_WAITING_BYTES
#    wait for the owner, the thread reads no more. Sending never waits for the peer.
# 2. With a link timeout both ends ping, from the reading thread, and drop a peer that is silent for so long
#    (baton/rpc/liveness.py). While too much waits for the owner, nothing is read and no peer is dropped.
# 3. A peer that breaks a rule, closes or dies ends the stream. `on_lost` is called once, after all messages
#    that were received before.

Call: TypeAlias = Callable[[], None]
Post: TypeAlias = Callable[[Call], None]  # hands a call to the owner's thread, from any thread

MAX_WAITING_BYTES: Final = 2 * MAX_BODY_BYTES  # room for the largest message, and for the one before it


class MessageStream(Generic[MessageT]):
    """The messages over one connection; `start` begins to read."""

    def __init__(
        self,
        connection: Connection,
        decode: Callable[[bytes], MessageT],
        name: str,
        *,
        link_timeout_s: float | None = None,
    ) -> None:
        """connection: after its handshake. decode: may raise WireError. name: of the reading thread.

        link_timeout_s: both ends ping, and drop a silent peer. None: neither pings; a unix socket always
        reports the end of its peer.
        """
        self._connection = connection
        self._decode = decode
        self._name = name
        self._outbox = Outbox(connection)
        self._life = None if link_timeout_s is None else LinkLife(link_timeout_s, time.monotonic())
        self._has_room = threading.Condition()
        self._num_waiting_bytes = 0  # of messages with calls that are still to be made
        self._thread: threading.Thread | None = None

    def start(self, post: Post, on_message: Callable[[MessageT], None], on_lost: Call) -> None:
        """Start to read; the calls are posted to the owner's thread. RuntimeError: no thread can start."""
        thread = threading.Thread(
            target=self._read, args=(post, on_message, on_lost), name=self._name, daemon=True
        )
        thread.start()
        self._thread = thread

    def send(self, body: bytes) -> None:
        """Send a body without waiting. When the peer is gone, the body is lost and `on_lost` follows."""
        with contextlib.suppress(PeerGone, WireError):
            self._outbox.send(body)

    def drop(self, error: WireError) -> None:
        """End the stream of a peer that broke a rule, and count it."""
        logger.warning("%s was dropped: %s", self._name, error)
        self._connection.drop(error)

    def close(self) -> None:
        """Close the connection, and wait for the stream's threads. Any thread may call."""
        self._connection.close()
        with self._has_room:
            self._has_room.notify()
        self._outbox.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _read(self, post: Post, on_message: Callable[[MessageT], None], on_lost: Call) -> None:
        try:
            while True:
                body = self._next_body()
                message = self._decode(body)
                self._make_room(len(body))
                post(partial(self._deliver, on_message, message, len(body)))
        except WireError as error:
            self.drop(error)
        except PeerGone:
            logger.info("%s has ended", self._name)
        finally:
            self._connection.close()
            post(on_lost)

    def _make_room(self, num_bytes: int) -> None:
        def has_room() -> bool:
            return self._num_waiting_bytes + num_bytes <= MAX_WAITING_BYTES or self._connection.is_closed

        with self._has_room:
            while not self._has_room.wait_for(has_room, None if self._life is None else PING_S):
                self._keep_alive(has_received=True)
            self._num_waiting_bytes += num_bytes

    def _next_body(self) -> bytes:
        """Return the next body that is no ping."""
        if self._life is None:
            return self._connection.recv()
        while True:
            try:
                body = self._connection.recv(PING_S)
            except TimeoutError:
                self._keep_alive(has_received=False)
                continue
            self._keep_alive(has_received=True)
            if not self._life.take_ping(body, time.monotonic()):
                return body

    def _keep_alive(self, *, has_received: bool) -> None:
        """Ping the peer when a ping is due. Raises WireError when the peer is silent."""
        assert self._life is not None
        now_s = time.monotonic()
        if has_received:
            self._life.heard(now_s)
        ping = self._life.tick(now_s)
        if ping is not None:
            self.send(ping)

    def _deliver(self, on_message: Callable[[MessageT], None], message: MessageT, num_bytes: int) -> None:
        with self._has_room:
            self._num_waiting_bytes -= num_bytes
            self._has_room.notify()
        on_message(message)
