"""Page bytes over TCP, at the source: straight from the pages into several streams.

1. `open` connects the streams; each is authenticated with the cluster key, both ways.
2. A piece is cut into parts; each stream's thread takes the next part that nobody has taken, sends its
   header and its bytes in one go, and is up to `NUM_UNANSWERED` parts ahead of the receiver's answers.
3. An answer makes its part finished, or failed where the destination refused it.
4. `abort` in the middle of a part that the peer is slow to take gives up that stream's connection, for
   there is no other way to end a part early: the thread connects again and sends anew what the lost
   connection had not answered, as often as others' aborts make it.
5. A peer that is gone, silent or too slow ends the transport. All its pieces fail, and nobody else's.
"""

import contextlib
import ctypes
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from baton.clock import Clock, SystemClock
from baton.errors import BatonError, ConfigError, PeerGone, TransferFailed
from baton.kvtransfer.ranks.pages import PageMemory, PagePacking
from baton.kvtransfer.transports.base import OnEnd, Part, Piece, TransferProgress, TransferQueue, offsets_of
from baton.kvtransfer.transports.page_socket import PageSocket, Stopped, tune, unpace
from baton.kvtransfer.transports.tcp_streams import (
    ANSWER_BYTES,
    HEADER_BYTES,
    MAX_PART_BYTES,
    PartHeader,
    WriteOutcome,
    decode_answer,
    encode_header,
    stream_key,
    tcp_pool_of,
)
from baton.rpc.auth import LinkSecret
from baton.rpc.connection import Connection, DroppedPeers, Role

PART_BYTES: Final = 32 * 2**20  # a part costs each end a quarter of a millisecond of its core
NUM_UNANSWERED: Final = 2


class TcpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    num_streams: int = 2
    connect_s: float = 5.0  # for a connection and its handshake
    stall_s: float = 5.0  # without a byte
    part_s: float = 60.0  # for a part of a piece, 32 MiB at most


class TcpTransport:
    name = "tcp"

    def __init__(
        self,
        address: tuple[str, int],
        key: LinkSecret,
        pool: PageMemory | PagePacking,
        *,
        settings: TcpSettings | None = None,
        clock: Clock | None = None,
        on_end: OnEnd | None = None,
        dropped: DroppedPeers | None = None,
    ) -> None:
        """pool: the source's. key: the cluster's."""
        self.pool = tcp_pool_of(pool)
        self.settings = settings or TcpSettings()
        self.clock = clock or SystemClock()
        self.transfer_queue = TransferQueue(PART_BYTES, self.settings.num_streams, self.clock, on_end)
        self._address = address
        self._key = key
        self._dropped = dropped
        self._streams: list[_Stream] = []
        self._closing = threading.Lock()

    def open(self) -> None:
        for number in range(self.settings.num_streams):
            self._streams.append(_Stream(self, number))
        for stream in self._streams:
            stream.connect()
        for stream in self._streams:
            stream.thread.start()

    def push(self, piece: Piece) -> int:
        pages = piece.transfer.source_pages
        if pages and not 0 <= min(pages) <= max(pages) < self.pool.num_pages:
            raise ValueError(f"the pool has {self.pool.num_pages} pages: {pages}")
        unit_bytes = piece.transfer.plan.unit_bytes
        if unit_bytes > MAX_PART_BYTES:
            raise ConfigError(f"page_size: a page has {unit_bytes} bytes, tcp moves {MAX_PART_BYTES} at most")
        self.pool.note_written()
        return self.transfer_queue.push(piece)

    @property
    def is_broken(self) -> bool:
        return self.transfer_queue.end_reason is not None

    def poll(self, handle: int) -> TransferProgress:
        return self.transfer_queue.poll(handle)

    def forget(self, handle: int) -> None:
        self.transfer_queue.forget(handle)

    def abort(self, transfer: bytes) -> None:
        def cut() -> None:
            for stream in self._streams:
                stream.cut(transfer)

        self.transfer_queue.abort(transfer, cut=cut)

    def close(self) -> None:
        self.transfer_queue.break_off("the transport was closed")
        with self._closing:
            streams, self._streams = self._streams, []
            for stream in streams:
                stream.close()

    def dial(self, on_socket: Callable[[socket.socket], None]) -> tuple[PageSocket, bytes]:
        """A new stream and its key. TransferFailed when there can be none.

        on_socket: told before anything is waited for, so that another thread can end the wait.
        """
        host, port = self._address
        settings = self.settings
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise TransferFailed(f"tcp {host}:{port}: {error}") from error
        try:
            tune(sock)
            sock.settimeout(settings.connect_s)
            on_socket(sock)
            sock.connect((host, port))
            connection = Connection(sock, self._key, Role.CONNECTING, dropped=self._dropped, clock=self.clock)
            connection.handshake(settings.connect_s)
            bare = connection.detach()
            unpace(bare)
        except (OSError, BatonError) as error:
            sock.close()
            raise TransferFailed(f"tcp {host}:{port}: {error}") from error
        page_socket = PageSocket(bare, self.clock, stall_s=settings.stall_s, limit_s=settings.part_s)
        return page_socket, stream_key(connection.session_key)


class _Unanswered:
    def __init__(self, part: Part, num_calls: int, gather_s: float) -> None:
        self.part = part
        self.num_calls = num_calls
        self.gather_s = gather_s


class _Stream:
    """One connection and the thread that sends over it."""

    def __init__(self, transport: TcpTransport, number: int) -> None:
        self.thread = threading.Thread(target=self._run, name=f"tcp-source-{number}", daemon=True)
        self._transport = transport
        self._transfer_queue = transport.transfer_queue
        self._pages = transport.pool.stream()
        self._socket: PageSocket | None = None
        self._dialling: socket.socket | None = None
        self._sending: bytes | None = None  # the transfer in whose pages the thread is
        self._is_cut = False  # the connection there is
        self._key = b""
        self._is_closed = False
        self._num_sent = self._num_answered = 0
        self._unanswered: deque[_Unanswered] = deque()
        self._header = ctypes.create_string_buffer(HEADER_BYTES)

    def connect(self) -> None:
        self._socket, self._key = self._transport.dial(self._note)
        self._num_sent = self._num_answered = 0
        self._is_cut = False
        if self._is_closed:
            self._socket.close()
            self._check_open()

    def cut(self, transfer: bytes) -> None:
        """From another thread, while none may leave pages: break the connection that is held up in these."""
        if self._sending == transfer and self._socket is not None:
            self._is_cut = True
            self._socket.wake()

    def close(self) -> None:
        """From another thread, when the tickets hand out nothing any more."""
        self._is_closed = True
        if self._dialling is not None:
            with contextlib.suppress(OSError):  # it may have got no further, or be a stream already
                self._dialling.shutdown(socket.SHUT_RDWR)
        if self._socket is not None:
            self._socket.wake()
        if self.thread.ident is not None:
            self.thread.join()
        if self._socket is not None:
            self._socket.close()

    def _note(self, sock: socket.socket) -> None:
        self._dialling = sock
        self._check_open()

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
            self._transfer_queue.break_off(f"tcp: {error}")
        except BaseException as error:
            self._transfer_queue.break_off(f"tcp: {error!r}")
            raise

    def _serve(self) -> None:
        """Until the queue has ended and every answer is there."""
        while True:
            part = self._transfer_queue.take(wait=not self._unanswered)
            if part is not None:
                self._send(part)
            elif not self._unanswered:
                return
            if part is None or len(self._unanswered) >= NUM_UNANSWERED:
                self._read_answer()

    def _send(self, part: Part) -> None:
        transfer, clock = part.handle.piece.transfer, self._transport.clock
        stream = self._open_socket()
        begun_s, calls_before = clock.now_s(), stream.num_calls
        try:
            offset_N = offsets_of(transfer.plan.source, part.first, part.stop, transfer.source_pages)
            header = PartHeader(transfer.id, transfer.epoch, part.first, part.stop, part.num_bytes)
            self._header.raw = encode_header(self._key, self._num_sent, header)
            places = self._pages.outgoing(transfer.plan, offset_N, self._header)
            gather_s = clock.now_s() - begun_s
            self._sending = transfer.id
            stream.send(places, lambda: part.handle.is_failed)
        except PeerGone:
            if not part.handle.is_failed:
                raise
            raise Stopped(part.num_bytes) from None  # `cut`, or as good as that
        finally:
            self._sending = None
            self._transfer_queue.leave(part)
        if self._is_cut:  # when the last byte had just gone
            raise Stopped(0)
        self._num_sent += 1
        self._unanswered.append(_Unanswered(part, stream.num_calls - calls_before, gather_s))

    def _read_answer(self) -> None:
        record = self._open_socket().receive_record(ANSWER_BYTES)
        outcome = decode_answer(self._key, self._num_answered, record)
        self._num_answered += 1
        answered = self._unanswered.popleft()
        if outcome == WriteOutcome.WRITTEN:
            self._transfer_queue.finish(answered.part, answered.num_calls, answered.gather_s)
        else:
            self._transfer_queue.fail(answered.part, "the destination has ended the transfer")

    def _start_anew(self) -> None:
        """Connect again and send again what may not have arrived: writing a part twice does no harm."""
        self._open_socket().close()
        unanswered, self._unanswered = self._unanswered, deque()
        self._socket = None
        if self._is_closed or self._transfer_queue.end_reason is not None:
            return
        for waiting in reversed(unanswered):
            self._transfer_queue.requeue(waiting.part)
        self.connect()

    def _open_socket(self) -> PageSocket:
        assert self._socket is not None
        return self._socket
