"""Page bytes over TCP, at the destination: from the streams straight into the pages.

1. A stream is accepted; in a thread of its own it proves, within a deadline, that it holds the cluster key.
   Of too many that have proved nothing yet, the oldest makes way (kvtransfer/transports/listener.py).
2. It waits for a header, as long as it takes. The header says which units come; where they go is for the
   landing to say, and for nobody else.
3. The bytes are received into the pages, or drained where the landing lets nobody in; then the answer.
4. A landing that is closed meanwhile is left within a slice of time; the rest of the part is drained.
5. A record that is not the one due, or bytes that stop coming, end this stream and no other.
"""

import ctypes
import logging
import socket
import threading
from collections.abc import Callable
from typing import Final

from baton.clock import Clock, SystemClock
from baton.errors import BatonError, WireError
from baton.kvtransfer.ranks.pages import PageMemory, PagePacking
from baton.kvtransfer.ranks.receive_registration import ReceiveRegistrations, Writing
from baton.kvtransfer.transports.listener import Listener
from baton.kvtransfer.transports.page_socket import MemoryRuns, PageSocket, Stopped, tune, unpace
from baton.kvtransfer.transports.tcp import TcpSettings
from baton.kvtransfer.transports.tcp_streams import (
    HEADER_BYTES,
    PartHeader,
    WriteOutcome,
    decode_header,
    encode_answer,
    stream_key,
    tcp_pool_of,
)
from baton.rpc.auth import LinkSecret
from baton.rpc.connection import Connection, DroppedPeers, Role

logger = logging.getLogger(__name__)

MAX_STREAMS: Final = 4096
SCRATCH_BYTES: Final = 2**18

# Called after a part was written and answered, before its writer leaves: its bytes are still in the cache.
OnWritten = Callable[[Writing], None]


class TcpReceiver:
    """Accepts streams of any number of sources for one rank's pages."""

    def __init__(
        self,
        registrations: ReceiveRegistrations,
        pool: PageMemory | PagePacking,
        key: LinkSecret,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        settings: TcpSettings | None = None,
        clock: Clock | None = None,
        dropped: DroppedPeers | None = None,
        on_written: OnWritten | None = None,
    ) -> None:
        self.registrations = registrations
        self.pool = tcp_pool_of(pool)
        self.settings = settings or TcpSettings()
        self.clock = clock or SystemClock()
        self.dropped = dropped or DroppedPeers()
        self.on_written = on_written
        self.is_closed = False
        self._key = key
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, PageSocket] = {}
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=128)
        tune(listener)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._acceptor = Listener(listener, self._greet, "tcp", self.dropped)

    def num_streams(self) -> int:
        """Streams that have proved that they hold the cluster key."""
        with self._lock:
            return len(self._threads)

    def close(self) -> None:
        """End all streams and threads; no page is written any more when it returns."""
        with self._lock:
            self.is_closed = True
        self._acceptor.close()
        with self._lock:
            streams = list(self._threads.items())
        for thread, page_socket in streams:
            page_socket.wake()
            thread.join()

    def _greet(self, sock: socket.socket) -> None:
        """In a thread of the acceptor's: have the newcomer prove itself, then serve it in one of its own."""
        try:
            page_socket, key = self._prove(sock)
        except WireError as error:
            logger.warning("a data stream was dropped: %s", error)
        except (BatonError, OSError) as error:
            logger.info("a data stream ended: %s", error)
        else:
            self._start(page_socket, key)
            return
        sock.close()

    def _start(self, page_socket: PageSocket, key: bytes) -> None:
        thread = threading.Thread(
            target=self._serve, args=(page_socket, key), name="tcp-receive", daemon=True
        )
        with self._lock:
            if len(self._threads) >= MAX_STREAMS or self.is_closed:
                self.dropped.add("crowd")
                page_socket.close()
                return
            try:
                thread.start()
            except RuntimeError as error:  # no thread is to be had
                logger.warning("no stream accepted: %s", error)
                page_socket.close()
                return
            self._threads[thread] = page_socket

    def _serve(self, page_socket: PageSocket, key: bytes) -> None:
        try:
            TcpStream(self, page_socket, key).run()
        except WireError as error:
            logger.warning("a data stream was dropped: %s", error)
        except (BatonError, OSError) as error:
            logger.info("a data stream ended: %s", error)
        finally:
            with self._lock:
                del self._threads[threading.current_thread()]
                page_socket.close()

    def _prove(self, sock: socket.socket) -> tuple[PageSocket, bytes]:
        settings = self.settings
        connection = Connection(sock, self._key, Role.ACCEPTING, dropped=self.dropped, clock=self.clock)
        connection.handshake(settings.connect_s)
        bare = connection.detach()
        unpace(bare)
        page_socket = PageSocket(bare, self.clock, stall_s=settings.stall_s, limit_s=settings.part_s)
        return page_socket, stream_key(connection.session_key)


class TcpStream:
    """One authenticated stream, in its thread."""

    def __init__(self, receiver: TcpReceiver, page_socket: PageSocket, key: bytes) -> None:
        self._receiver = receiver
        self._socket = page_socket
        self._key = key
        self._num_parts = 0
        self._pages = receiver.pool.stream()
        self._scratch: ctypes.Array[ctypes.c_char] | None = None

    def run(self) -> None:
        """Until the source closes the stream, which is no error between parts."""
        while (record := self._socket.next_record(HEADER_BYTES)) is not None:
            try:
                self._receive_part(decode_header(self._key, self._num_parts, record))
            except WireError as error:
                self._receiver.dropped.add(error.reason)
                raise

    def _receive_part(self, header: PartHeader) -> None:
        registrations = self._receiver.registrations
        writing = registrations.begin(
            header.transfer, header.epoch, header.first, header.stop, header.num_bytes
        )
        if writing is None:
            self._drain(header.num_bytes)
            self._say(WriteOutcome.REFUSED)
            return
        is_whole = False
        try:
            num_left = self._fill(writing)
            is_whole = num_left == 0
            if is_whole:
                self._say(WriteOutcome.WRITTEN)
                if self._receiver.on_written is not None:
                    self._receiver.on_written(writing)
        finally:
            registrations.end(writing, is_whole=is_whole)
        if not is_whole:
            self._drain(num_left)
            self._say(WriteOutcome.REFUSED)

    def _fill(self, writing: Writing) -> int:
        """Receive a part into its pages; how many bytes are still to come when the landing was closed."""
        plan, offset_N = writing.registration.plan, writing.offsets()
        try:
            self._socket.receive(self._pages.incoming(plan, offset_N), lambda: writing.must_stop)
        except Stopped as stopped:
            return stopped.num_left
        self._pages.received(plan, offset_N)
        return 0

    def _drain(self, num_bytes: int) -> None:
        if self._scratch is None:
            self._scratch = ctypes.create_string_buffer(SCRATCH_BYTES)
        while num_bytes:
            step = min(num_bytes, SCRATCH_BYTES)
            self._socket.receive(MemoryRuns.of_buffer(self._scratch, step), self._is_closed)
            num_bytes -= step

    def _say(self, outcome: WriteOutcome) -> None:
        self._socket.send_record(encode_answer(self._key, self._num_parts, outcome))
        self._num_parts += 1

    def _is_closed(self) -> bool:
        return self._receiver.is_closed
