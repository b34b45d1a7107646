"""Page bytes between GPUs of one host: copied once, straight into the destination's pages.

The pool is mapped once, by its CUDA handle; see kvtransfer/transports/shm.py for the life of a transfer. A
kernel on a stream of our own copies a part, and is waited for before the table of generations is looked at
again.

The handle crosses as plain fields of a message on an authenticated connection. It opens the whole block of
memory that the pool lies in: the door gives it to processes of the same user that hold the cluster key.
"""

from collections.abc import Callable
from typing import Annotated, Final

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from baton.clock import Clock
from baton.errors import TransferFailed, WireError
from baton.kernels.pages import copy_pages
from baton.kvtransfer.protocol.transfer_plan import Offsets, TransferPlan
from baton.kvtransfer.ranks.pages import DevicePages, PageGenerations
from baton.kvtransfer.ranks.receive_registration import ReceiveRegistrations
from baton.kvtransfer.transports.base import OnEnd, Piece
from baton.kvtransfer.transports.listener import decode_said
from baton.kvtransfer.transports.shm import DirectTransport, MappedPool
from baton.rpc.auth import LinkSecret
from baton.rpc.connection import DroppedPeers

PART_BYTES: Final = 2**29  # a quarter of a millisecond within a GPU: more than a thread needs to prepare one

Count = Annotated[int, Meta(ge=1, le=2**48)]
Offset = Annotated[int, Meta(ge=0, le=2**48)]
Handle = Annotated[bytes, Meta(max_length=256)]


class CudaOffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool, as torch exports the storage that it lies in. It can be opened once, in another process."""

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


class SharedDevicePool:
    """A pool on a GPU that sources on this host may be given, and the table of who may write which page."""

    def __init__(self, pool: Tensor) -> None:
        """pool: contiguous [num_pages, ...]. It must not come from torch's expandable segments."""
        if not pool.is_cuda or not pool.is_contiguous() or pool.dim() < 2:
            raise ValueError(f"a shared GPU pool is contiguous [num_pages, ...], got one on {pool.device}")
        self.pool = pool
        self.generations = PageGenerations(len(pool))

    def offer(self) -> tuple[bytes, tuple[int, ...]]:
        """For one source; each needs an offer of its own. TransferFailed when its memory can't be shared."""
        pool = self.pool
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
        return msgspec.msgpack.encode(offer), ()

    def close(self) -> None:
        """Offer it to nobody any more; who has opened it keeps it."""
        self.generations.file.close()


def open_offer(message: bytes, device: int) -> Tensor:
    """The pages of another process's pool, for kernels on our GPU `device`: uint8 [num_pages, page_bytes].

    They are mapped for that GPU, which need not be the one that they are on: a kernel that reached for them
    without leave would end the process. TransferFailed when they can't be reached from it.
    """
    offer = decode_said(message, CudaOffer, "pool")
    if offer.pool_offset + offer.num_pages * offer.page_bytes > offer.storage_bytes:
        raise WireError("the pool that was offered is not within its storage", reason="pool")
    devices = [index for index in range(torch.cuda.device_count()) if _uuid(index) == offer.device]
    if not devices:
        raise TransferFailed(f"GPU {offer.device} of the destination can't be reached by this process")
    if devices[0] != device and not torch.cuda.can_device_access_peer(device, devices[0]):
        raise TransferFailed(f"GPU {device} can't reach the memory of GPU {devices[0]}")
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
        raise TransferFailed(f"the destination's pool can't be mapped: {error}") from error
    pages = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}")
    return pages.set_(storage, offer.pool_offset, (offer.num_pages, offer.page_bytes), (offer.page_bytes, 1))


class CudaIpcTransport(DirectTransport):
    name = "cuda_ipc"
    inline_bytes = -1  # whoever pushes would wait for the step that computes the pages
    num_threads = 2  # one prepares a part while the other's is copied

    def __init__(
        self,
        address: str,
        key: LinkSecret,
        pool: Tensor,
        incarnation: bytes,
        *,
        clock: Clock | None = None,
        on_end: OnEnd | None = None,
        dropped: DroppedPeers | None = None,
    ) -> None:
        """pool: the source's. incarnation: of this process, which landings name as their writer."""
        self._packing = DevicePages(pool)
        self._pages: Tensor | None = None  # the destination's
        super().__init__(
            address,
            key,
            self._packing.num_pages,
            incarnation,
            PART_BYTES,
            clock=clock,
            on_end=on_end,
            dropped=dropped,
        )

    def push(self, piece: Piece) -> int:
        self._packing.note_written()
        return super().push(piece)

    def map_pages(self, message: bytes, descriptors: list[int]) -> int:
        self._pages = open_offer(message, self._packing.pool.device.index)
        return len(self._pages)

    def copy(self, plan: TransferPlan, source_offset_N: Offsets, destination_offset_N: Offsets) -> None:
        assert self._pages is not None
        if int(destination_offset_N.max()) + plan.run_bytes > self._pages.numel():
            raise ValueError(f"the destination's pool has {len(self._pages)} pages")
        packing, row_bytes = self._packing, plan.row_bytes
        with torch.cuda.stream(packing.stream):
            packing.wait_for_writers()
            copy_pages(
                packing.content.view(-1, row_bytes),
                packing.rows(plan, source_offset_N),
                self._pages.view(-1, row_bytes),
                packing.rows(plan, destination_offset_N),
            )
        packing.finish()

    def unmap_pages(self) -> None:
        self._pages = None


class CudaIpcListener(MappedPool):
    """The door of a pool on a GPU."""

    def __init__(
        self,
        pool: SharedDevicePool,
        registrations: ReceiveRegistrations,
        key: LinkSecret,
        on_death: Callable[[list[bytes]], None],
        *,
        clock: Clock | None = None,
        dropped: DroppedPeers | None = None,
    ) -> None:
        super().__init__(
            pool.offer, pool.generations, registrations, key, on_death, clock=clock, dropped=dropped
        )


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
