"""Page bytes on one host, at the source: copied once, straight into the destination's pages.

1. `open` asks the destination's door for its pool and maps it, and its table of page generations.
2. A thread copies part after part. Before each it looks its pages up in the table: where the destination has
   taken one back, nothing is written. It looks again afterwards: only a part whose pages were the
   transfer's all the time is finished.
3. A source that is stopped between a look and the write, and goes on much later, is why the destination
   keeps an ended transfer's pages out of use until the source has released it or its process is dead.

The destination spends no time. A copy runs outside the interpreter's lock.
"""

import contextlib
import fcntl
import os
import socket
import threading
from typing import Final

import msgspec
import numpy as np

from baton.clock import Clock, SystemClock
from baton.errors import BatonError, TransferFailed, WireError
from baton.kernels.copy_runs import copy_runs
from baton.kvtransfer.page_memory import PageMemory, PeerGenerations, PeerPages, as_words
from baton.kvtransfer.shm_door import HANDSHAKE_S, PoolOffer
from baton.kvtransfer.tickets import Part, Tickets
from baton.kvtransfer.transport import OnEnd, Piece, Progress, offsets_of
from baton.wire import Connection, DroppedPeers, Role

PART_BYTES: Final = 8 * 2**20  # between two looks at the table: half a millisecond


class ShmTransport:
    name = "shm"

    def __init__(
        self,
        address: str,
        key: bytes,
        memory: PageMemory,
        incarnation: bytes,
        *,
        clock: Clock | None = None,
        on_end: OnEnd | None = None,
        dropped: DroppedPeers | None = None,
    ) -> None:
        """memory: the source's pages. incarnation: of this process, which landings name as their writer."""
        self.memory = memory
        self._address = address
        self._key = key
        self._incarnation = incarnation
        self._clock = clock or SystemClock()
        self._dropped = dropped
        self._tickets = Tickets(PART_BYTES, 1, self._clock, on_end)
        self._thread = threading.Thread(target=self._run, name="shm-source", daemon=True)
        self._pages: PeerPages | None = None
        self._generations: PeerGenerations | None = None

    def open(self) -> None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(HANDSHAKE_S)
                sock.connect(self._address)
                self._map(sock)
        except (OSError, BatonError, msgspec.ValidationError, msgspec.DecodeError) as error:
            raise TransferFailed(f"shm: {error}") from error
        self._thread.start()

    def push(self, piece: Piece) -> int:
        transfer = piece.transfer
        if not self.memory.has(transfer.source_pages):
            raise ValueError(f"the pool has {self.memory.num_pages} pages: {transfer.source_pages}")
        if len(transfer.destination_generations) != len(transfer.destination_pages):
            raise ValueError("every destination page comes with its generation")
        return self._tickets.push(piece)

    @property
    def is_broken(self) -> bool:
        return self._tickets.end_reason is not None

    def poll(self, ticket: int) -> Progress:
        return self._tickets.poll(ticket)

    def forget(self, ticket: int) -> None:
        self._tickets.forget(ticket)

    def abort(self, transfer: bytes) -> None:
        self._tickets.abort(transfer)

    def close(self) -> None:
        self._tickets.break_off("the transport was closed")
        if self._thread.ident is not None:
            self._thread.join()
        if self._pages is not None:
            self._pages.close()
        self._pages = self._generations = None

    def _map(self, sock: socket.socket) -> None:
        connection = Connection(sock, self._key, Role.CONNECTING, dropped=self._dropped, clock=self._clock)
        with contextlib.closing(connection):
            connection.handshake(HANDSHAKE_S)
            connection.send(self._incarnation)
            offer = msgspec.msgpack.decode(connection.recv(HANDSHAKE_S), type=PoolOffer)
            descriptors = connection.take_descriptors()
            try:
                if len(descriptors) != 2:
                    raise WireError(f"a pool comes with 2 descriptors, got {len(descriptors)}", reason="pool")
                pages, generations = descriptors
                _check_size(pages, offer.num_pages * offer.page_bytes)
                _check_size(generations, offer.num_pages * 4)
                self._pages = PeerPages(pages, offer.num_pages, offer.page_bytes)
                self._generations = PeerGenerations(generations, offer.num_pages)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _run(self) -> None:
        try:
            while (part := self._tickets.take(wait=True)) is not None:
                self._copy(part)
        except BaseException as error:
            self._tickets.break_off(f"shm: {error!r}")
            raise

    def _copy(self, part: Part) -> None:
        assert self._pages is not None and self._generations is not None
        transfer = part.ticket.piece.transfer
        plan = transfer.plan
        begun_s = self._clock.now_s()
        try:
            side = plan.destination
            used = slice(part.first // side.units_per_page, side.num_pages(part.stop))
            pages = np.asarray(transfer.destination_pages[used], dtype=np.int64)
            words = as_words(transfer.destination_generations[used])
            source_offset_N = offsets_of(plan.source, part.first, part.stop, transfer.source_pages)
            destination_offset_N = offsets_of(side, part.first, part.stop, transfer.destination_pages)
            gather_s = self._clock.now_s() - begun_s
            is_granted = self._generations.match(pages, words)
            if is_granted:
                copy_runs(
                    self.memory, self._pages.memory, source_offset_N, destination_offset_N, plan.run_bytes
                )
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


def _check_size(descriptor: int, num_bytes: int) -> None:
    """WireError unless the file has this size, and for good: reading past its end would kill this process."""
    has_size = os.fstat(descriptor).st_size == num_bytes > 0
    if not has_size or not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise WireError(f"a pool of {num_bytes} bytes was offered, the file is another", reason="pool")
