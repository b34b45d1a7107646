"""Page bytes over TCP: straight from the source's pages into several streams, and from there into the pages.

1. The source connects its streams. On each, both ends prove that they hold the key of page links.
2. A piece is cut into parts. Each stream's thread takes the next part, sends its header and its bytes in one
   call, and is up to NUM_UNANSWERED parts ahead of the answers.
3. The destination has a thread for each stream: the thread that greeted the source. A header says which units
   come; the registration of their transfer says where the units go. The bytes are received into the pages, or
   drained where the registration admits no writer, and the part is answered. When the registration closes in
   the middle of a part, the thread leaves the pages within a slice of time and drains the rest of the part.
4. An answer finishes its part, or fails the part where the destination refused it.
5. `abort` in the middle of a part that the peer is slow to take gives up the stream's connection: a part
   cannot end early in another way. The thread connects again and sends again what was not answered.
6. A wrong record ends its stream. A peer that is gone, silent or too slow breaks the sender: all pieces of
   this sender fail. Other senders are unaffected.

A CPU's pages are sent from and received into in place. A GPU's pages go through pinned host memory, of which
each stream has as much as its largest part; pages that are sent as codes go through host memory too.
"""

import contextlib
import ctypes
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from baton.errors import BatonError, ConfigError, PeerGone, TransferFailed, WireError
from baton.kernels.pages import Offsets
from baton.kvtransfer.protocol.messages import PeerRank, RankListenerAddresses
from baton.kvtransfer.protocol.transfer_plan import TransferPlan
from baton.kvtransfer.transports.base import LocalRank, OnEnd, Part, Piece, QueueSender, TransferQueue
from baton.kvtransfer.transports.page_socket import Buffer, MemoryRuns, PageSocket, Stopped, unpace
from baton.kvtransfer.transports.pages import PagePacking, StagedParts
from baton.kvtransfer.transports.receive_registration import Writing
from baton.kvtransfer.transports.records import (
    ANSWER_BYTES,
    HEADER_BYTES,
    MAX_PART_BYTES,
    PartHeader,
    WriteOutcome,
    decode_answers,
    decode_headers,
    encode_answers,
    encode_headers,
    stream_key,
)
from baton.rpc.auth import Role
from baton.rpc.listener import Listener, listen, port_of

PART_BYTES: Final = 32 * 2**20  # a part costs each end a quarter of a millisecond of its core
NUM_UNANSWERED: Final = 2
MAX_STREAMS: Final = 4096  # of one destination rank
SCRATCH_BYTES: Final = 2**18
_START: Final = np.zeros(1, dtype=np.int64)  # a staged part is one run


class TcpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The number of streams of one sender, and the limits of both ends."""

    num_streams: int = 2
    connect_s: float = 5.0  # for a connection and its handshake
    stall_s: float = 5.0  # without a byte
    part_s: float = 60.0  # for a part of a piece, 32 MiB at most


class TcpTransport:
    """Serves every pair of ranks. For pages on a GPU it is slow: the fallback of the other transports."""

    name = "tcp"
    is_automatic = True

    def can_serve(self, source: RankListenerAddresses, destination: RankListenerAddresses) -> bool:
        return True

    def listen(self, rank: LocalRank) -> "TcpReceiver":
        return TcpReceiver(rank)

    def connect(self, rank: LocalRank, peer: PeerRank) -> "TcpSender":
        return TcpSender(rank, (peer.host, port_of(peer.listeners.addresses[self.name])))


class StreamPages:
    """A rank's pool, for the thread of one stream: in place, or by way of host memory (a GPU, codes)."""

    def __init__(self, rank: LocalRank, packing: PagePacking) -> None:
        """packing: of the rank; all streams of a sender or receiver share it."""
        self._memory = None if rank.sends_codes else rank.memory  # None: by way of host memory
        self._parts = StagedParts(packing)

    def outgoing(self, plan: TransferPlan, offset_N: Offsets, head: Buffer) -> MemoryRuns:
        """Return the head and the runs' bytes, valid until the next call."""
        if self._memory is not None:
            return MemoryRuns.of_runs(self._memory.address, offset_N, plan.run_bytes, head)
        host = self._parts.fetch(plan, offset_N)
        return MemoryRuns.of_runs(host.data_ptr(), _START, len(host), head)

    def incoming(self, plan: TransferPlan, offset_N: Offsets) -> MemoryRuns:
        """Return the memory that receives the runs' bytes; `received` then puts them into the pages."""
        if self._memory is not None:
            return MemoryRuns.of_runs(self._memory.address, offset_N, plan.run_bytes)
        host = self._parts.room(len(offset_N) * plan.sent_run_bytes)
        return MemoryRuns.of_runs(host.data_ptr(), _START, len(host))

    def received(self, plan: TransferPlan, offset_N: Offsets) -> None:
        """Put the bytes that were received into the pages."""
        if self._memory is None:
            self._parts.store(plan, offset_N)


def _page_socket(
    rank: LocalRank, sock: socket.socket, role: Role, settings: TcpSettings
) -> tuple[PageSocket, bytes]:
    """Return a stream over a connected socket, and the key of its records; raises as LocalRank.connect."""
    connection = rank.connect(sock, role, settings.connect_s)
    key = stream_key(connection.session_key)
    sock = connection.detach()
    # The kernel sizes the socket's buffers: larger ones would push the pages out of the CPU's cache between
    # the two copies.
    unpace(sock)
    return PageSocket(sock, rank.clock, stall_s=settings.stall_s, limit_s=settings.part_s), key


# The source.


class TcpSender(QueueSender):
    """A `Sender` over `num_streams` connections."""

    def __init__(
        self, rank: LocalRank, address: tuple[str, int], settings: TcpSettings | None = None
    ) -> None:
        """rank: the source. address: host and port of the destination's TcpReceiver."""
        self._settings = settings or TcpSettings()
        super().__init__(rank, PART_BYTES, self._settings.num_streams)
        self._address = address
        self._streams: list[_SendStream] = []
        self._closing = threading.Lock()

    def open(self) -> None:
        for number in range(self._settings.num_streams):
            pages = StreamPages(self._rank, self._packing)
            self._streams.append(
                _SendStream(self._rank, self._address, self._settings, self._queue, pages, number)
            )
        for stream in self._streams:
            stream.connect()
        for stream in self._streams:
            stream.thread.start()

    def push(self, piece: Piece, on_end: OnEnd) -> None:
        """Queue a piece, as `Sender.push`. ConfigError for units that are larger than a part may be."""
        unit_bytes = piece.plan.sent_unit_bytes
        if unit_bytes > MAX_PART_BYTES:
            raise ConfigError(f"page_size: a page has {unit_bytes} bytes, tcp moves {MAX_PART_BYTES} at most")
        super().push(piece, on_end)

    def abort(self, transfer: bytes) -> None:
        def cut() -> None:
            for stream in self._streams:
                stream.cut(transfer)

        self._queue.abort(transfer, cut)

    def close(self) -> None:
        self._queue.break_off("the transport was closed")
        with self._closing:
            streams, self._streams = self._streams, []
            for stream in streams:
                stream.close()


class _SendStream:
    """One connection and the thread that sends over it."""

    def __init__(
        self,
        rank: LocalRank,
        address: tuple[str, int],
        settings: TcpSettings,
        queue: TransferQueue,
        pages: StreamPages,
        number: int,
    ) -> None:
        self.thread = threading.Thread(target=self._run, name=f"tcp-source-{number}", daemon=True)
        self._rank = rank
        self._address = address
        self._settings = settings
        self._queue = queue
        self._pages = pages
        self._socket: PageSocket | None = None
        self._dialling: socket.socket | None = None
        self._sending: bytes | None = None  # the transfer of the pages that the thread reads
        self._is_cut = False  # the present connection
        self._key = b""
        self._is_closed = False
        self._num_sent = self._num_answered = 0
        self._unanswered: deque[Part] = deque()
        self._header = ctypes.create_string_buffer(HEADER_BYTES)

    def connect(self) -> None:
        self._socket, self._key = self._dial()
        self._num_sent = self._num_answered = 0
        self._is_cut = False
        if self._is_closed:
            self._socket.close()
            self._check_open()

    def cut(self, transfer: bytes) -> None:
        """Break the connection that is held up in this transfer's pages. The queue is locked meanwhile."""
        if self._sending == transfer and self._socket is not None:
            self._is_cut = True
            self._socket.wake()

    def close(self) -> None:
        """End the thread and its connection. Called from another thread, when the queue has ended."""
        self._is_closed = True
        if self._dialling is not None:
            with contextlib.suppress(OSError):  # not connected yet, or a stream already
                self._dialling.shutdown(socket.SHUT_RDWR)
        if self._socket is not None:
            self._socket.wake()
        if self.thread.ident is not None:
            self.thread.join()
        if self._socket is not None:
            self._socket.close()

    def _dial(self) -> tuple[PageSocket, bytes]:
        """Return a new stream and its key. TransferFailed when the destination cannot be reached."""
        host, port = self._address
        sock: socket.socket | None = None
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._dialling = sock = socket.socket(family, socket.SOCK_STREAM)  # `close` may end the waits
            self._check_open()
            sock.settimeout(self._settings.connect_s)
            sock.connect((host, port))
            return _page_socket(self._rank, sock, Role.CONNECTING, self._settings)
        except (OSError, BatonError) as error:
            if sock is not None:
                sock.close()
            raise TransferFailed(f"tcp {host}:{port}: {error}") from error

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransferFailed("tcp: the transport was closed")

    def _run(self) -> None:
        try:
            while not self._is_closed:
                try:
                    self._serve()
                    return
                except Stopped:
                    self._start_anew()
        except BatonError as error:
            self._queue.break_off(f"tcp: {error}")
        except BaseException as error:
            self._queue.break_off(f"tcp: {error!r}")
            raise

    def _serve(self) -> None:
        """Send parts until the queue has ended and every part is answered."""
        while True:
            part = self._queue.take(wait=not self._unanswered)
            if part is not None:
                self._send(part)
            elif not self._unanswered:
                return
            if part is None or len(self._unanswered) >= NUM_UNANSWERED:
                self._read_answer()

    def _send(self, part: Part) -> None:
        piece = part.piece
        try:
            offset_N = piece.plan.source.offsets(part.first, part.stop, piece.source_pages)
            self._header.raw = encode_headers(self._key, self._num_sent, (part.header,))
            places = self._pages.outgoing(piece.plan, offset_N, self._header)
            self._sending = piece.transfer
            self._open_socket().send(places, lambda: part.queued.is_over)
        except PeerGone:
            if not part.queued.is_over:
                raise
            raise Stopped(part.num_bytes) from None  # `cut` has closed the connection
        finally:
            self._sending = None
            self._queue.leave(part)
        if self._is_cut:  # when the last byte had just gone
            raise Stopped(0)
        self._num_sent += 1
        self._unanswered.append(part)

    def _read_answer(self) -> None:
        record = self._open_socket().receive_record(ANSWER_BYTES)
        (outcome,) = decode_answers(self._key, self._num_answered, record, 1)
        self._num_answered += 1
        self._queue.answered(self._unanswered.popleft(), outcome)

    def _start_anew(self) -> None:
        """Connect again and send the unanswered parts again: a part may be written twice."""
        self._open_socket().close()
        unanswered, self._unanswered = self._unanswered, deque()
        self._socket = None
        if self._is_closed or self._queue.end_reason is not None:
            return
        for part in reversed(unanswered):
            self._queue.requeue(part)
        self.connect()

    def _open_socket(self) -> PageSocket:
        assert self._socket is not None
        return self._socket


# The destination.


class TcpReceiver:
    """A `TransportListener`: accepts streams of any number of sources for one rank's pages."""

    def __init__(self, rank: LocalRank, settings: TcpSettings | None = None) -> None:
        """rank: the destination."""
        self._rank = rank
        self._packing = rank.packing()
        self._settings = settings or TcpSettings()
        listener = listen(rank.settings.host)
        self.address = str(listener.getsockname()[1])
        self._acceptor = Listener(listener, self._greet, "tcp", rank.dropped)

    def close(self) -> None:
        self._acceptor.close()

    def _greet(self, sock: socket.socket) -> None:
        """Let a source prove itself, then serve its stream; called in a thread for this source."""
        rank = self._rank
        page_socket, key = _page_socket(rank, sock, Role.ACCEPTING, self._settings)
        with contextlib.closing(page_socket):
            if not self._acceptor.keep(sock, page_socket.wake, MAX_STREAMS):
                rank.dropped.add("limit")
                return
            pages = StreamPages(rank, self._packing)
            ReceiveStream(rank, page_socket, key, pages, lambda: self._acceptor.is_closing).run()


class ReceiveStream:
    """One authenticated stream at the destination, in its thread."""

    def __init__(
        self,
        rank: LocalRank,
        page_socket: PageSocket,
        key: bytes,
        pages: StreamPages,
        is_closed: Callable[[], bool],
    ) -> None:
        self._rank = rank
        self._socket = page_socket
        self._key = key
        self._pages = pages
        self._is_closed = is_closed
        self._num_parts = 0
        self._scratch = ctypes.create_string_buffer(0)

    def run(self) -> None:
        """Receive parts until the source closes the stream, which is no error between parts."""
        while (record := self._socket.next_record(HEADER_BYTES)) is not None:
            try:
                (header,) = decode_headers(self._key, self._num_parts, record)
                self._receive_part(header)
            except WireError as error:
                self._rank.dropped.add(error.reason)
                raise

    def _receive_part(self, header: PartHeader) -> None:
        registrations = self._rank.registrations
        writing = registrations.begin(*header)
        num_left = header.num_bytes
        if writing is not None:
            is_whole = False
            try:
                num_left = self._fill(writing)
                is_whole = num_left == 0
                if is_whole:
                    self._answer(WriteOutcome.WRITTEN)
            finally:
                registrations.end(writing, is_whole=is_whole)
            if is_whole:
                return
        self._drain(num_left)
        self._answer(WriteOutcome.REFUSED)

    def _fill(self, writing: Writing) -> int:
        """Receive a part into its pages. Return the bytes that were left when the registration closed."""
        plan, offset_N = writing.registration.plan, writing.offsets()
        try:
            self._socket.receive(self._pages.incoming(plan, offset_N), lambda: writing.must_stop)
        except Stopped as stopped:
            return stopped.num_left
        self._pages.received(plan, offset_N)
        return 0

    def _drain(self, num_bytes: int) -> None:
        if not len(self._scratch):
            self._scratch = ctypes.create_string_buffer(SCRATCH_BYTES)
        while num_bytes:
            step = min(num_bytes, SCRATCH_BYTES)
            self._socket.receive(MemoryRuns.of_buffer(self._scratch, step), self._is_closed)
            num_bytes -= step

    def _answer(self, outcome: WriteOutcome) -> None:
        self._socket.send_record(encode_answers(self._key, self._num_parts, (outcome,)))
        self._num_parts += 1
