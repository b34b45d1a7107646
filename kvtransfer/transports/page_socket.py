"""A connected socket that sends from, and receives into, many places of memory in one system call.

Python's own `sendmsg` makes an object of every buffer; here the list of places is an array that the kernel
reads as it lies, and the interpreter's lock is free while bytes move.

A call waits for a slice of time at most, then checks whether to go on. It ends when `must_stop` says so, when
no byte has moved for `stall_s`, or when it has taken `limit_s` in all.
"""

import contextlib
import ctypes
import errno
import select
import socket
import struct
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.clock import Clock
from baton.errors import PeerGone, TransferFailed
from baton.kernels.pages import Offsets

IOV_MAX: Final = 1024  # places in one call, of Linux's limits.h
SLICE_S: Final = 0.1
MERGED_BYTES: Final = 16_384  # longer runs cost the kernel no more than one place would

MustStop = Callable[[], bool]
Buffer: TypeAlias = ctypes.Array[ctypes.c_char]


class Stopped(TransferFailed):
    """`must_stop` has ended a call; all but `num_left` bytes have moved."""

    def __init__(self, num_left: int) -> None:
        super().__init__(f"stopped with {num_left} bytes left")
        self.num_left = num_left


class _Message(ctypes.Structure):
    """struct msghdr"""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("places", ctypes.c_void_p),
        ("num_places", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_libc: Final = ctypes.CDLL(None, use_errno=True)
for _name in ("sendmsg", "recvmsg"):
    getattr(_libc, _name).argtypes = (ctypes.c_int, ctypes.POINTER(_Message), ctypes.c_int)
    getattr(_libc, _name).restype = ctypes.c_ssize_t


class MemoryRuns:
    """Byte ranges of memory, in order: rows (address, length). The maker keeps the memory mapped."""

    def __init__(self, rows: NDArray[np.int64]) -> None:
        self.rows = rows
        self.num_bytes = int(rows[:, 1].sum())

    @classmethod
    def of_runs(
        cls, address: int, offset_N: Offsets, run_bytes: int, head: Buffer | None = None
    ) -> "MemoryRuns":
        """Return the runs of a pool at `address`, after `head` if there is one.

        Adjacent short runs become one place, which the kernel copies in one go. Such runs occur in the
        smaller pages when page sizes differ, and in the rank with fewer heads when tp sizes differ.
        """
        length_N: Offsets | int = run_bytes
        if run_bytes <= MERGED_BYTES:
            offset_N, length_N = _merged(offset_N, run_bytes)
        num_before = 0 if head is None else 1
        rows = np.empty((num_before + len(offset_N), 2), dtype=np.int64)
        if head is not None:
            rows[0] = ctypes.addressof(head), len(head)
        np.add(offset_N, address, out=rows[num_before:, 0])
        rows[num_before:, 1] = length_N
        return cls(rows)

    @classmethod
    def of_buffer(cls, buffer: Buffer, num_bytes: int | None = None) -> "MemoryRuns":
        """Return the buffer, or its first bytes, as one place."""
        length = len(buffer) if num_bytes is None else num_bytes
        return cls(np.array([[ctypes.addressof(buffer), length]], dtype=np.int64))


class PageSocket:
    """Owns the socket. One thread sends or receives at a time; any other thread may call `wake`."""

    def __init__(self, sock: socket.socket, clock: Clock, *, stall_s: float, limit_s: float) -> None:
        self._socket = sock
        self._clock = clock
        self._stall_s = stall_s
        self._limit_s = limit_s
        sock.setblocking(True)
        interval = struct.pack("ll", int(SLICE_S), round(SLICE_S % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)

    def send(self, places: MemoryRuns, must_stop: MustStop) -> None:
        """Send all the places. Raises Stopped, TransferFailed for a slow peer, or PeerGone."""
        self._move(_libc.sendmsg, socket.MSG_NOSIGNAL, places, must_stop)

    def receive(self, places: MemoryRuns, must_stop: MustStop) -> None:
        """Fill all the places; raises as `send`."""
        self._move(_libc.recvmsg, socket.MSG_WAITALL, places, must_stop)

    def send_record(self, record: bytes) -> None:
        """Send a few bytes; raises as `send`."""
        try:
            num_sent = self._socket.send(record)
        except BlockingIOError:
            num_sent = 0
        except OSError as error:
            raise PeerGone(f"the stream broke: {error}") from error
        if num_sent < len(record):
            rest = ctypes.create_string_buffer(record[num_sent:], len(record) - num_sent)
            self.send(MemoryRuns.of_buffer(rest), _never)

    def receive_record(self, num_bytes: int) -> bytes:
        """Return the next num_bytes bytes. The first must come within `stall_s`; raises as `receive`."""
        return self._rest_of(self._first_of(num_bytes), num_bytes)

    def next_record(self, num_bytes: int) -> bytes | None:
        """Return the next num_bytes bytes; None when the stream ends before them.

        The first byte may take any time; raises as `receive` for the others.
        """
        begun = self._first_of(num_bytes)
        if begun is None:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            poll.poll()
            begun = self._first_of(num_bytes)
        return self._rest_of(begun, num_bytes) if begun != b"" else None

    def wake(self) -> None:
        """End every call on this socket, now and later, with PeerGone."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # not connected any more

    def close(self) -> None:
        """Close the socket. No other thread is in a call: `wake` has ended it."""
        self._socket.close()

    def _first_of(self, num_bytes: int) -> bytes | None:
        """Return the bytes that come within a slice of time: None for none, b"" at the stream's end."""
        try:
            return self._socket.recv(num_bytes)
        except BlockingIOError:
            return None
        except OSError as error:
            raise PeerGone(f"the stream broke: {error}") from error

    def _rest_of(self, begun: bytes | None, num_bytes: int) -> bytes:
        if begun == b"":
            raise PeerGone("the peer has closed the stream")
        record = begun or b""
        if len(record) < num_bytes:
            rest = ctypes.create_string_buffer(num_bytes - len(record))
            self.receive(MemoryRuns.of_buffer(rest), _never)
            record += rest.raw
        return record

    def _move(self, call: Callable[..., int], flags: int, places: MemoryRuns, must_stop: MustStop) -> None:
        rows = places.rows
        index, num_left = 0, places.num_bytes
        message = _Message()
        started_s = moved_s = self._clock.now_s()
        while num_left:
            message.places = rows.ctypes.data + index * rows.strides[0]
            message.num_places = min(IOV_MAX, len(rows) - index)
            moved = call(self._socket.fileno(), ctypes.byref(message), flags)
            now_s = self._clock.now_s()
            if moved > 0:
                num_left -= moved
                index = _advance(rows, index, moved)
                moved_s = now_s
            else:
                _check_outcome(moved, ctypes.get_errno())
            if num_left and must_stop():
                raise Stopped(num_left)
            if num_left and now_s - moved_s > self._stall_s:
                raise TransferFailed(f"the peer took or sent no byte for {self._stall_s} s")
            if num_left and now_s - started_s > self._limit_s:
                raise TransferFailed(f"{places.num_bytes} bytes did not pass within {self._limit_s} s")


def _merged(offset_N: Offsets, run_bytes: int) -> tuple[Offsets, Offsets]:
    """Return the beginnings and lengths of stretches of adjacent runs."""
    is_first_N = np.ones(len(offset_N), dtype=np.bool_)
    np.not_equal(np.diff(offset_N), run_bytes, out=is_first_N[1:])
    first = np.flatnonzero(is_first_N)
    return offset_N[first], np.diff(first, append=len(offset_N)) * run_bytes


def _never() -> bool:
    return False


def unpace(sock: socket.socket) -> None:
    """Turn the pacing of a connection within this host off; a connection to another host stays as it is.

    Over loopback, which cannot be congested, the pacing of BBR costs a third of the rate. Reno does not pace,
    and every Linux has it.
    """
    with contextlib.suppress(OSError):  # the peer has left already, or an operator forbids the choice
        if sock.getsockname()[0] == sock.getpeername()[0]:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _advance(rows: NDArray[np.int64], index: int, moved: int) -> int:
    """Take `moved` bytes off the rows from `index` on, in place. Return the first index with bytes left."""
    window = rows[index : index + IOV_MAX, 1]
    ends = np.cumsum(window)
    done = int(np.searchsorted(ends, moved, side="right"))
    before = int(ends[done - 1]) if done else 0
    if moved > before:
        rows[index + done, 0] += moved - before
        rows[index + done, 1] -= moved - before
    return index + done


def _check_outcome(moved: int, code: int) -> None:
    """Raise PeerGone unless the call may be tried again."""
    if moved == 0:
        raise PeerGone("the peer has closed the stream")
    if code not in (errno.EAGAIN, errno.EINTR):
        raise PeerGone(f"the stream broke: {errno.errorcode.get(code, code)}")
