"""Page bytes on one host, at the source: copied once, straight into the destination's pages.

The pool is shared memory, given by its descriptor; see kvtransfer/transports/shm.py for the life of a
transfer. A copy runs outside the interpreter's lock.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

from baton.clock import Clock, SystemClock
from baton.errors import BatonError, TransferFailed, WireError
from baton.kernels.copy_runs import copy_runs
from baton.kvtransfer.protocol.transfer_plan import Offsets, TransferPlan
from baton.kvtransfer.ranks.pages import (
    PageGenerations,
    PageMemory,
    PeerGenerations,
    PeerPages,
    SharedPool,
    as_words,
)
from baton.kvtransfer.ranks.receive_registration import ReceiveRegistrations
from baton.kvtransfer.transports.base import OnEnd, Part, Piece, TransferProgress, TransferQueue, offsets_of
from baton.kvtransfer.transports.listener import Listener, ProcessWatch, decode_said, peer_process, peer_user
from baton.rpc.auth import LinkSecret
from baton.rpc.connection import Connection, DroppedPeers, Role

# Sources that write into the destination's pages themselves: what shm and cuda_ipc have in common.
#
# 1. `open` asks the destination's door for its pool and maps it, and its table of page generations.
# 2. A thread, or two, copies part after part. Before each it looks its pages up in the table: where the
# destination has taken one back, nothing is written. It looks again afterwards: only a part whose pages
# were the transfer's all the time is finished.
# 3. A source that is stopped between a look and the write, and goes on much later, is why the destination
# keeps an ended transfer's pages out of use until the source has released it or its process is dead.
#
# The destination spends no time.

# The destination's side of the shm transport: it gives its pool to sources on the same host.
#
# 1. A source connects to a unix socket that has an address but no file, and proves that it holds the cluster
# key. It must be a process of the same user.
# 2. It says its incarnation, and gets the pool to write and the table of generations to read.
# 3. Its process is watched from then on. The landings hear of its death, and of nothing less: a connection
# that closes says nothing about what is mapped.
logger = logging.getLogger(__name__)
INCARNATION_BYTES: Final = 16
HANDSHAKE_S: Final = 5.0
MAX_WRITERS: Final = 256  # each is watched, which takes an open file; the rest come over tcp


class PoolOffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes with the two descriptors: pages, then generations."""

    num_pages: Annotated[int, Meta(ge=1, le=2**31)]
    page_bytes: Annotated[int, Meta(ge=1, le=2**40)]


# What a source gets to reach the pages with: a message, and descriptors of the caller's.
Offer = Callable[[], tuple[bytes, tuple[int, ...]]]


class MappedPool:
    """`address` is what a source needs, with the cluster key, to open the pool."""

    def __init__(
        self,
        offer: Offer,
        generations: PageGenerations,
        registrations: ReceiveRegistrations,
        key: LinkSecret,
        on_death: Callable[[list[bytes]], None],
        *,
        clock: Clock | None = None,
        dropped: DroppedPeers | None = None,
    ) -> None:
        """on_death: told, in a thread of the door, which open transfers a dead process has left behind."""
        self._offer = offer
        self._registrations = registrations
        self._key = key
        self._on_death = on_death
        self._clock = clock or SystemClock()
        self._dropped = dropped or DroppedPeers()
        self._read_only = generations.file.read_only()
        self._watch = ProcessWatch()
        self._lock = threading.Lock()
        self._incarnations: set[bytes] = set()  # of processes that are watched
        self._is_closed = False
        self.address = f"\0baton-kv-{secrets.token_hex(16)}"  # abstract: nothing in any folder
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.address)
        listener.listen(128)
        self._acceptor = Listener(listener, self._serve, "shm", self._dropped)

    def close(self) -> None:
        """Give the pool to nobody any more. Who has mapped it can still write, and is watched no more."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._acceptor.close()
        self._watch.close()
        os.close(self._read_only)

    def _serve(self, sock: socket.socket) -> None:
        try:
            user = peer_user(sock)
            if user != os.getuid():
                self._dropped.add("user")
                raise WireError(f"user {user} may not open a pool of user {os.getuid()}", reason="user")
            process = peer_process(sock)
            try:
                connection = Connection(
                    sock, self._key, Role.ACCEPTING, dropped=self._dropped, clock=self._clock
                )
                self._give(connection.handshake(HANDSHAKE_S), process)
            finally:
                os.close(process)
        except WireError as error:
            logger.warning("a source was not given the pool: %s", error)
        except (BatonError, OSError) as error:
            logger.info("a source was not given the pool: %s", error)
        finally:
            sock.close()

    def _give(self, connection: Connection, process: int) -> None:
        """process: the caller closes this descriptor."""
        with contextlib.closing(connection):
            incarnation = connection.recv(HANDSHAKE_S)
            if len(incarnation) != INCARNATION_BYTES:
                raise connection.drop(WireError("an incarnation has 16 bytes", reason="length"))
            with self._lock:
                is_new = incarnation not in self._incarnations
                has_room = not is_new or len(self._incarnations) < MAX_WRITERS
                if is_new and has_room:  # watched before it can write, by whichever of its connections
                    watched = os.dup(process)  # OSError: no descriptor is free, and nothing has changed
                    self._incarnations.add(incarnation)
                    self._registrations.writer_came(incarnation)
                    self._watch.add(watched, lambda: self._on_peer_death(incarnation))
            if not has_room:
                raise connection.drop(WireError(f"{MAX_WRITERS} processes have the pool", reason="crowd"))
            message, descriptors = self._offer()
            connection.send(message, (*descriptors, self._read_only))
            with contextlib.suppress(BatonError, TimeoutError):
                connection.recv(HANDSHAKE_S)  # until the source has what it needs and closes

    def _on_peer_death(self, incarnation: bytes) -> None:
        with self._lock:
            self._incarnations.discard(incarnation)
        self._on_death(self._registrations.writer_died(incarnation))


class ShmListener(MappedPool):
    """The door of a pool in shared memory."""

    def __init__(
        self,
        pool: SharedPool,
        registrations: ReceiveRegistrations,
        key: LinkSecret,
        on_death: Callable[[list[bytes]], None],
        *,
        clock: Clock | None = None,
        dropped: DroppedPeers | None = None,
    ) -> None:
        memory = pool.memory
        message = msgspec.msgpack.encode(PoolOffer(num_pages=memory.num_pages, page_bytes=memory.page_bytes))
        super().__init__(
            lambda: (message, (pool.file.descriptor,)),
            pool.generations,
            registrations,
            key,
            on_death,
            clock=clock,
            dropped=dropped,
        )


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
        self._transfer_queue = TransferQueue(part_bytes, self.num_threads, self._clock, on_end)
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
        return self._transfer_queue.end_reason is not None

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
            raise TransferFailed(f"{self.name}: {self._transfer_queue.end_reason}")
        for thread in self._threads:
            thread.start()

    def push(self, piece: Piece) -> int:
        transfer = piece.transfer
        pages = transfer.source_pages
        if pages and not 0 <= min(pages) <= max(pages) < self._num_pages:
            raise ValueError(f"the pool has {self._num_pages} pages: {pages}")
        if len(transfer.destination_generations) != len(transfer.destination_pages):
            raise ValueError("every destination page comes with its generation")
        if piece.num_bytes > self.inline_bytes or not self._transfer_queue.is_idle:
            return self._transfer_queue.push(piece)
        handle = self._transfer_queue.push(piece, wakes=False)
        while (part := self._transfer_queue.take(wait=False)) is not None:
            self._copy(part)
        return handle

    def poll(self, handle: int) -> TransferProgress:
        return self._transfer_queue.poll(handle)

    def forget(self, handle: int) -> None:
        self._transfer_queue.forget(handle)

    def abort(self, transfer: bytes) -> None:
        self._transfer_queue.abort(transfer)

    def close(self) -> None:
        self._transfer_queue.break_off("the transport was closed")
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
            while (part := self._transfer_queue.take(wait=True)) is not None:
                self._copy(part)
        except BaseException as error:
            self._transfer_queue.break_off(f"{self.name}: {error!r}")
            raise

    def _copy(self, part: Part) -> None:
        assert self._generations is not None
        transfer = part.handle.piece.transfer
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
            self._transfer_queue.leave(part)
        if is_granted:
            self._transfer_queue.finish(part, 1, gather_s)
        else:
            self._transfer_queue.fail(part, reason)


def check_size(descriptor: int, num_bytes: int) -> None:
    """WireError unless the file has this size, and for good: reading past its end would kill this process."""
    has_size = os.fstat(descriptor).st_size == num_bytes > 0
    if not has_size or not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise WireError(f"a pool of {num_bytes} bytes was offered, the file is another", reason="pool")


PART_BYTES: Final = 8 * 2**20  # between two looks at the table: half a millisecond


class ShmTransport(DirectTransport):
    name = "shm"

    def __init__(
        self,
        address: str,
        key: LinkSecret,
        memory: PageMemory,
        incarnation: bytes,
        *,
        clock: Clock | None = None,
        on_end: OnEnd | None = None,
        dropped: DroppedPeers | None = None,
    ) -> None:
        """memory: the source's pages. incarnation: of this process, which landings name as their writer."""
        self.memory = memory
        self._pages: PeerPages | None = None
        super().__init__(
            address,
            key,
            memory.num_pages,
            incarnation,
            PART_BYTES,
            clock=clock,
            on_end=on_end,
            dropped=dropped,
        )

    def map_pages(self, message: bytes, descriptors: list[int]) -> int:
        offer = decode_said(message, PoolOffer, "pool")
        if len(descriptors) != 1:
            raise WireError(f"pages come with 1 descriptor, got {len(descriptors)}", reason="pool")
        check_size(descriptors[0], offer.num_pages * offer.page_bytes)
        self._pages = PeerPages(descriptors[0], offer.num_pages, offer.page_bytes)
        return offer.num_pages

    def copy(self, plan: TransferPlan, source_offset_N: Offsets, destination_offset_N: Offsets) -> None:
        assert self._pages is not None
        copy_runs(self.memory, self._pages.memory, source_offset_N, destination_offset_N, plan.run_bytes)

    def unmap_pages(self) -> None:
        if self._pages is not None:
            self._pages.close()
            self._pages = None
