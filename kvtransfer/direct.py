"""Sources that write into the destination's pages themselves: what shm and cuda_ipc have in common.

1. `open` asks the destination's door for its pool and maps it, and its table of page generations.
2. A thread, or two, copies part after part. Before each it looks its pages up in the table: where the
   destination has taken one back, nothing is written. It looks again afterwards: only a part whose pages
   were the transfer's all the time is finished.
3. A source that is stopped between a look and the write, and goes on much later, is why the destination
   keeps an ended transfer's pages out of use until the source has released it or its process is dead.

The destination spends no time.
"""

import contextlib
import fcntl
import os
import socket
import threading
from typing import Final

import numpy as np

from baton.challenge import LinkSecret
from baton.clock import Clock, SystemClock
from baton.errors import BatonError, TransferFailed, WireError
from baton.kvtransfer.page_memory import PeerGenerations, as_words
from baton.kvtransfer.shm_door import HANDSHAKE_S
from baton.kvtransfer.tickets import Part, Tickets
from baton.kvtransfer.transfer_plan import Offsets, TransferPlan
from baton.kvtransfer.transport import OnEnd, Piece, Progress, offsets_of
from baton.wire import Connection, DroppedPeers, Role

INLINE_BYTES: Final = 2**21  # copied by whoever pushes: 0.15 ms, less than it takes to wake a thread
_WORD_BYTES: Final = 4  # of the table of generations, a page


class DirectTransport:
    """A subclass maps the pool that the door gives, and copies runs into it."""

    name: str
    inline_bytes = INLINE_BYTES
    num_threads = 1

    def __init__(
        self,
        address: str,
        key: LinkSecret,
        num_pages: int,
        incarnation: bytes,
        part_bytes: int,
        *,
        clock: Clock | None = None,
        on_end: OnEnd | None = None,
        dropped: DroppedPeers | None = None,
    ) -> None:
        """num_pages: of the source. part_bytes: about what is copied between two looks at the table.

        incarnation: of this process, which landings name as their writer.
        """
        self._address = address
        self._key = key
        self._num_pages = num_pages
        self._incarnation = incarnation
        self._clock = clock or SystemClock()
        self._dropped = dropped
        self._tickets = Tickets(part_bytes, self.num_threads, self._clock, on_end)
        self._threads = [
            threading.Thread(target=self._run, name=f"{self.name}-source", daemon=True)
            for _ in range(self.num_threads)
        ]
        self._door: socket.socket | None = None  # while it is being opened
        self._generations: PeerGenerations | None = None

    # What a subclass adds.

    def map_pages(self, message: bytes, descriptors: list[int]) -> int:
        """Map what the door gave, but for the table; how many pages it has. The caller closes descriptors."""
        raise NotImplementedError

    def copy(self, plan: TransferPlan, source_offset_N: Offsets, destination_offset_N: Offsets) -> None:
        """Copy runs, and return when they are there. ValueError when they are not within the pools."""
        raise NotImplementedError

    def unmap_pages(self) -> None:
        """Also when nothing is mapped."""
        raise NotImplementedError

    # The transport.

    @property
    def is_broken(self) -> bool:
        return self._tickets.end_reason is not None

    def open(self) -> None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(HANDSHAKE_S)
                self._door = sock
                sock.connect(self._address)
                self._map(sock)
        except (OSError, BatonError) as error:
            raise TransferFailed(f"{self.name}: {error}") from error
        finally:
            self._door = None
        if self.is_broken:
            raise TransferFailed(f"{self.name}: {self._tickets.end_reason}")
        for thread in self._threads:
            thread.start()

    def push(self, piece: Piece) -> int:
        transfer = piece.transfer
        pages = transfer.source_pages
        if pages and not 0 <= min(pages) <= max(pages) < self._num_pages:
            raise ValueError(f"the pool has {self._num_pages} pages: {pages}")
        if len(transfer.destination_generations) != len(transfer.destination_pages):
            raise ValueError("every destination page comes with its generation")
        if piece.num_bytes > self.inline_bytes or not self._tickets.is_idle:
            return self._tickets.push(piece)
        ticket = self._tickets.push(piece, wakes=False)
        while (part := self._tickets.take(wait=False)) is not None:
            self._copy(part)
        return ticket

    def poll(self, ticket: int) -> Progress:
        return self._tickets.poll(ticket)

    def forget(self, ticket: int) -> None:
        self._tickets.forget(ticket)

    def abort(self, transfer: bytes) -> None:
        self._tickets.abort(transfer)

    def close(self) -> None:
        self._tickets.break_off("the transport was closed")
        if (door := self._door) is not None:
            with contextlib.suppress(OSError):  # it may have got no further
                door.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self.unmap_pages()
        self._generations = None

    def _map(self, sock: socket.socket) -> None:
        connection = Connection(sock, self._key, Role.CONNECTING, dropped=self._dropped, clock=self._clock)
        with contextlib.closing(connection):
            connection.handshake(HANDSHAKE_S)
            connection.send(self._incarnation)
            message = connection.recv(HANDSHAKE_S)
            descriptors = connection.take_descriptors()
            try:
                if not descriptors:
                    raise WireError("a pool comes with the table of its generations", reason="pool")
                num_pages = self.map_pages(message, descriptors[:-1])
                check_size(descriptors[-1], num_pages * _WORD_BYTES)
                self._generations = PeerGenerations(descriptors[-1], num_pages)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _run(self) -> None:
        try:
            while (part := self._tickets.take(wait=True)) is not None:
                self._copy(part)
        except BaseException as error:
            self._tickets.break_off(f"{self.name}: {error!r}")
            raise

    def _copy(self, part: Part) -> None:
        assert self._generations is not None
        transfer = part.ticket.piece.transfer
        plan = transfer.plan
        begun_s = self._clock.now_s()
        try:
            side = plan.destination
            first_page = part.first // side.units_per_page
            before, used = first_page * side.units_per_page, slice(first_page, side.num_pages(part.stop))
            pages = np.asarray(transfer.destination_pages[used], dtype=np.int64)
            words = as_words(transfer.destination_generations[used])
            source_offset_N = offsets_of(plan.source, part.first, part.stop, transfer.source_pages)
            destination_offset_N = side.offsets(part.first - before, part.stop - before, pages)
            gather_s = self._clock.now_s() - begun_s
            is_granted = self._generations.match(pages, words)
            if is_granted:
                self.copy(plan, source_offset_N, destination_offset_N)
                is_granted = self._generations.match(pages, words)
        except (ValueError, IndexError) as error:  # what the destination granted is not in its pool
            is_granted = False
            reason = str(error)
        else:
            reason = "the destination has taken pages back"
        finally:
            self._tickets.leave(part)
        if is_granted:
            self._tickets.finish(part, 1, gather_s)
        else:
            self._tickets.fail(part, reason)


def check_size(descriptor: int, num_bytes: int) -> None:
    """WireError unless the file has this size, and for good: reading past its end would kill this process."""
    has_size = os.fstat(descriptor).st_size == num_bytes > 0
    if not has_size or not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise WireError(f"a pool of {num_bytes} bytes was offered, the file is another", reason="pool")
