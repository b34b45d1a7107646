"""Page bytes between CPUs (shm) and between GPUs (cuda_ipc) of one host: one copy, straight into the
destination's pages. The source writes the pages itself; the destination spends no time on the bytes.

1. The destination's listener is a unix socket. A source proves that it holds the key of page links, and must
   be a process of the same user. The source sends its incarnation. The listener answers with what the source
   needs to map the pool for writing and the table of page generations for reading.
2. The source's process is watched from then on. Only its death is reported to the registrations: a closed
   connection does not prove that the pool is unmapped.
3. The source's threads copy part after part. Before and after each copy a thread looks the part's pages up in
   the table: pages that the destination has taken back are not written, and a part is finished only if its
   pages were granted before and after the copy.
4. A source that is stopped between a look and the write may go on much later. Therefore the destination keeps
   an ended transfer's pages out of use until the source has released them or its process is dead.

shm: the destination's pool lies in shared memory and is given to the source by its descriptor. A copy runs
outside the interpreter's lock.

cuda_ipc: the source maps the destination's pool by its CUDA handle. A kernel on a stream of the sender's own
copies a part, and has ended before the table of generations is looked at again. The handle crosses as plain
fields of a message on an authenticated connection. It opens the whole block of memory in which the pool lies:
the listener gives it to processes of the same user that hold the cluster key.
"""

import contextlib
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Annotated, Final, TypeAlias

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from baton.errors import BatonError, TransferFailed, WireError
from baton.kernels.pages import Offsets, copy_pages, copy_runs
from baton.kvtransfer.protocol.messages import ID_BYTES, PeerRank, RankListenerAddresses
from baton.kvtransfer.protocol.transfer_plan import TransferPlan
from baton.kvtransfer.transports.base import LocalRank, OnEnd, Part, Piece, QueueSender
from baton.kvtransfer.transports.pages import (
    DevicePages,
    HostPages,
    PageMemory,
    PagePacking,
    PeerGenerations,
    on_stream,
)
from baton.kvtransfer.transports.process_watch import ProcessWatch, peer_process
from baton.messages.bounds import schema_hash
from baton.messages.codec import decode_as
from baton.rpc.auth import Role
from baton.rpc.connection import Connection
from baton.rpc.listener import Listener, listen_on_host

HANDSHAKE_S: Final = 5.0
MAX_WRITERS: Final = 256  # each is watched, which takes an open file; more sources use another transport

# What a source needs to map the pages: a message and open descriptors, which stay the listener's.
Offer: TypeAlias = Callable[[], tuple[bytes, tuple[int, ...]]]


class DirectListener:
    """A `TransportListener` that lets processes of this host and user map a rank's pool."""

    def __init__(self, name: str, rank: LocalRank, schema: bytes, offer: Offer) -> None:
        """schema: of the offer's message, which both ends must have. offer: called for each source."""
        assert rank.generations is not None
        self._rank = rank
        self._schema = schema
        self._offer = offer
        self._read_only = rank.generations.file.read_only()
        self._watch = ProcessWatch()
        self._lock = threading.Lock()
        self._incarnations: set[bytes] = set()  # of processes that are watched
        self._is_closed = False
        listener, self.address = listen_on_host("baton-kv")
        self._acceptor = Listener(listener, self._greet, name, rank.dropped)

    def close(self) -> None:
        """Stop giving the pool to processes, and stop watching the processes that have mapped it."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._acceptor.close()
        self._watch.close()
        os.close(self._read_only)

    def _greet(self, sock: socket.socket) -> None:
        rank = self._rank
        process = peer_process(sock, rank.dropped)
        try:
            self._give(rank.connect(sock, Role.ACCEPTING, HANDSHAKE_S, self._schema), process)
        finally:
            os.close(process)

    def _give(self, connection: Connection, process: int) -> None:
        """Watch the source's process and give the pool to it.

        process: a descriptor of the process; the caller closes it.
        """
        with contextlib.closing(connection):
            incarnation = connection.recv(HANDSHAKE_S)
            if len(incarnation) != ID_BYTES:
                raise connection.drop(WireError("an incarnation has 16 bytes", reason="length"))
            with self._lock:
                is_new = incarnation not in self._incarnations
                has_room = not is_new or len(self._incarnations) < MAX_WRITERS
                if is_new and has_room:  # the process is watched before it can write
                    # OSError: the process cannot be watched, and nothing has changed.
                    self._watch.add(os.dup(process), partial(self._on_death, incarnation))
                    self._incarnations.add(incarnation)
                    self._rank.registrations.writer_came(incarnation)
            if not has_room:
                raise connection.drop(WireError(f"{MAX_WRITERS} processes have the pool", reason="limit"))
            message, descriptors = self._offer()
            connection.send(message, (*descriptors, self._read_only))
            with contextlib.suppress(BatonError, TimeoutError):
                connection.recv(HANDSHAKE_S)  # until the source has mapped the pool and closes

    def _on_death(self, incarnation: bytes) -> None:
        with self._lock:
            self._incarnations.discard(incarnation)
        self._rank.on_writer_death(self._rank.registrations.writer_died(incarnation))


class DirectSender(QueueSender, ABC):
    """A `Sender` that copies runs into the pool that it has mapped. A subclass says how."""

    name: str
    schema: bytes  # as in DirectListener
    part_bytes: int  # about as much is copied between two looks at the table
    num_threads: int
    # Pieces of at most so many bytes are copied by the thread that pushes them, unless rows become codes.
    inline_bytes: int

    def __init__(self, rank: LocalRank, address: str) -> None:
        """address: of the destination's listener."""
        super().__init__(rank, self.part_bytes, self.num_threads)
        self._address = address
        self._threads = [
            threading.Thread(target=self._run, name=f"{self.name}-source", daemon=True)
            for _ in range(self.num_threads)
        ]
        self._pages: PagePacking | None = None  # the destination's
        self._generations: PeerGenerations | None = None

    @abstractmethod
    def map_pages(self, message: bytes, descriptors: list[int]) -> PagePacking:
        """Map the pool of the listener's offer, for writing. The caller closes the descriptors."""

    @abstractmethod
    def copy(self, plan: TransferPlan, source_offset_N: Offsets, destination_offset_N: Offsets) -> None:
        """Copy runs; complete after `finish` of the packing. ValueError for runs outside the pools."""

    def open(self) -> None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(HANDSHAKE_S)
                sock.connect(self._address)
                self._map(sock)
        except (OSError, BatonError) as error:
            raise TransferFailed(f"{self.name}: {error}") from error
        if self.is_broken:
            raise TransferFailed(f"{self.name}: {self._queue.end_reason}")
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._queue.break_off("the transport was closed")
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._pages = self._generations = None

    def _enqueue(self, piece: Piece, on_end: OnEnd) -> None:
        if len(piece.destination_generations) != len(piece.destination_pages):
            raise ValueError("every destination page comes with its generation")
        is_short = piece.num_bytes <= self.inline_bytes and not self._rank.sends_codes
        if not is_short or not self._queue.is_idle:
            self._queue.push(piece, on_end)
            return
        self._queue.push(piece, on_end, wakes=False)
        while (part := self._queue.take(wait=False)) is not None:
            self._copy(part)

    def _map(self, sock: socket.socket) -> None:
        rank = self._rank
        connection = rank.connect(sock, Role.CONNECTING, HANDSHAKE_S, self.schema)
        with contextlib.closing(connection):
            connection.send(rank.incarnation)
            message = connection.recv(HANDSHAKE_S)
            descriptors = connection.take_descriptors()
            try:
                if not descriptors:
                    raise WireError("a pool comes with the table of its generations", reason="pool")
                self._pages = self.map_pages(message, descriptors[:-1])
                self._generations = PeerGenerations(descriptors[-1], self._pages.num_pages)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _run(self) -> None:
        try:
            while (part := self._queue.take(wait=True)) is not None:
                self._copy(part)
        except BaseException as error:
            self._queue.break_off(f"{self.name}: {error!r}")
            raise

    def _copy(self, part: Part) -> None:
        try:
            reason = None if self._write(part) else "the destination has taken pages back"
        except (ValueError, IndexError) as error:  # granted pages are not in the destination's pool
            reason = str(error)
        finally:
            self._queue.leave(part)
        if reason is None:
            self._queue.finish(part)
        else:
            self._queue.fail(part, reason)

    def _write(self, part: Part) -> bool:
        """Write a part into its pages. Return True when the pages were granted before and after."""
        assert self._generations is not None
        piece = part.piece
        granted = piece.granted(part.first, part.stop)
        source_offset_N = piece.plan.source.offsets(part.first, part.stop, piece.source_pages)
        destination_offset_N = piece.plan.destination.offsets(part.first, part.stop, piece.destination_pages)
        if not self._generations.match(*granted):
            return False
        self._move(piece.plan, source_offset_N, destination_offset_N)
        return self._generations.match(*granted)

    def _move(self, plan: TransferPlan, source_offset_N: Offsets, destination_offset_N: Offsets) -> None:
        """Move runs into the destination's pages, and return when they are there."""
        if not self._rank.sends_codes:
            self.copy(plan, source_offset_N, destination_offset_N)
        else:  # no wire, but the pages must not depend on the transport
            assert self._pages is not None
            staging = self._packing.staging(len(source_offset_N) * plan.sent_run_bytes)
            self._packing.pack(plan, source_offset_N, staging)
            self._pages.unpack(plan, destination_offset_N, staging)
        self._packing.finish()


# Between CPUs.


class PoolOffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The size of a pool. The pool's descriptor comes with this message."""

    num_pages: Annotated[int, Meta(ge=1, le=2**31)]
    page_bytes: Annotated[int, Meta(ge=1, le=2**40)]


POOL_SCHEMA: Final = schema_hash(PoolOffer)


class ShmTransport:
    """Serves CPU ranks of one host when the destination's pool lies in shared memory."""

    name = "shm"
    is_automatic = True

    def can_serve(self, source: RankListenerAddresses, destination: RankListenerAddresses) -> bool:
        return source.host == destination.host and source.device == destination.device == "cpu"

    def listen(self, rank: LocalRank) -> DirectListener | None:
        shared = rank.shared
        if shared is None:
            return None
        offer = PoolOffer(num_pages=shared.memory.num_pages, page_bytes=shared.memory.page_bytes)
        message = msgspec.msgpack.encode(offer)
        return DirectListener(self.name, rank, POOL_SCHEMA, lambda: (message, (shared.file.descriptor,)))

    def connect(self, rank: LocalRank, peer: PeerRank) -> "ShmSender":
        return ShmSender(rank, peer.listeners.addresses[self.name])


class ShmSender(DirectSender):
    """A `Sender` that copies with the CPU."""

    name = "shm"
    schema = POOL_SCHEMA
    part_bytes = 8 * 2**20  # copied in half a millisecond
    num_threads = 1
    inline_bytes = 2**21  # copied in 0.15 ms, less than it takes to wake a thread

    def map_pages(self, message: bytes, descriptors: list[int]) -> HostPages:
        offer = decode_as(PoolOffer, message, "pool")
        if len(descriptors) != 1:
            raise WireError(f"pages come with 1 descriptor, got {len(descriptors)}", reason="pool")
        return HostPages(PageMemory.of_peer(descriptors[0], offer.num_pages, offer.page_bytes))

    def copy(self, plan: TransferPlan, source_offset_N: Offsets, destination_offset_N: Offsets) -> None:
        assert isinstance(self._pages, HostPages) and self._rank.memory is not None
        copy_runs(
            self._rank.memory, self._pages.memory, source_offset_N, destination_offset_N, plan.run_bytes
        )


# Between GPUs.

Count = Annotated[int, Meta(ge=1, le=2**48)]
Offset = Annotated[int, Meta(ge=0, le=2**48)]
Handle = Annotated[bytes, Meta(max_length=256)]


class CudaOffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool, as torch exports the storage in which it lies. It can be opened once, in another process."""

    device: Annotated[str, Meta(min_length=1, max_length=64)]  # the GPU's UUID: numbers differ by process
    num_pages: Count
    page_bytes: Count
    pool_offset: Offset  # bytes, from the start of the storage
    storage_bytes: Count
    storage_offset: Offset  # bytes, from the start of the block that the handle opens
    block: Handle
    counter: Handle  # how torch learns that the storage is in use elsewhere
    counter_offset: Offset
    event: Handle
    has_event: bool


CUDA_SCHEMA: Final = schema_hash(CudaOffer)


class CudaIpcTransport:
    """Serves GPU ranks of one host."""

    name = "cuda_ipc"
    is_automatic = True

    def can_serve(self, source: RankListenerAddresses, destination: RankListenerAddresses) -> bool:
        return source.host == destination.host and source.device == destination.device == "cuda"

    def listen(self, rank: LocalRank) -> DirectListener | None:
        if rank.device != "cuda":
            return None
        return DirectListener(self.name, rank, CUDA_SCHEMA, lambda: (make_offer(rank.pool), ()))

    def connect(self, rank: LocalRank, peer: PeerRank) -> "CudaIpcSender":
        return CudaIpcSender(rank, peer.listeners.addresses[self.name])


def make_offer(pool: Tensor) -> bytes:
    """Return a CudaOffer for one source; each source needs an offer of its own.

    pool: contiguous [num_pages, ...], not from torch's expandable segments. TransferFailed when its memory
    cannot be shared.
    """
    try:
        shared = pool.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        raise TransferFailed(f"the pool cannot be shared: {error}") from error
    _, block, storage_bytes, storage_offset, counter, counter_offset, event, has_event = shared
    offer = CudaOffer(
        device=_uuid(pool.device.index),
        num_pages=len(pool),
        page_bytes=pool[0].numel() * pool.itemsize,
        pool_offset=int(pool.storage_offset()) * pool.itemsize,
        storage_bytes=storage_bytes,
        storage_offset=storage_offset,
        block=block,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        has_event=has_event,
    )
    return msgspec.msgpack.encode(offer)


def open_offer(message: bytes, device: int) -> Tensor:
    """Map the pages of another process's pool for kernels on this process's GPU `device`.

    Returns uint8 [num_pages, page_bytes], mapped for that GPU, which need not be the GPU that holds the
    pages: a kernel that reads pages without that mapping ends the process. TransferFailed when `device`
    cannot reach the pages.
    """
    offer = decode_as(CudaOffer, message, "pool")
    if offer.pool_offset + offer.num_pages * offer.page_bytes > offer.storage_bytes:
        raise WireError("the pool that was offered is not within its storage", reason="pool")
    # A worker may see its own GPU alone. The driver opens a handle of a hidden GPU too, or refuses it below.
    visible = [index for index in range(torch.cuda.device_count()) if _uuid(index) == offer.device]
    for index in visible:
        if index != device and not torch.cuda.can_device_access_peer(device, index):
            raise TransferFailed(f"GPU {device} cannot reach the memory of GPU {index}")
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            device,
            offer.block,
            offer.storage_bytes,
            offer.storage_offset,
            offer.counter,
            offer.counter_offset,
            offer.event,
            offer.has_event,
        )
    except RuntimeError as error:
        raise TransferFailed(f"the destination's pool cannot be mapped: {error}") from error
    pages = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}")
    return pages.set_(storage, offer.pool_offset, (offer.num_pages, offer.page_bytes), (offer.page_bytes, 1))


class CudaIpcSender(DirectSender):
    """A `Sender` that copies with a kernel."""

    name = "cuda_ipc"
    schema = CUDA_SCHEMA
    part_bytes = 2**29  # copied in a quarter of a millisecond, longer than a thread needs to prepare one
    num_threads = 2  # one prepares a part while the other's is copied
    inline_bytes = -1  # none: the thread that pushes would wait for the step that computes the pages

    def map_pages(self, message: bytes, descriptors: list[int]) -> DevicePages:
        assert isinstance(self._packing, DevicePages)
        return DevicePages(open_offer(message, self._rank.pool.device.index), self._packing.streams)

    def copy(self, plan: TransferPlan, source_offset_N: Offsets, destination_offset_N: Offsets) -> None:
        source, destination = self._packing, self._pages
        assert isinstance(source, DevicePages) and isinstance(destination, DevicePages)
        with on_stream(source.streams[0]):
            source.wait_for_writers()
            copy_pages(
                source.of_rows(plan),
                source.rows(plan, source_offset_N),
                destination.of_rows(plan),
                destination.rows(plan, destination_offset_N),
            )


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
