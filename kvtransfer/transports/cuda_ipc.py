"""Page bytes between GPUs of one host: one copy, straight into the destination's pages.

The source maps the destination's pool by its CUDA handle. See kvtransfer/transports/shm.py for the life of
a transfer. A kernel on a stream of the sender's own copies a part, and has ended before the table of
generations is looked at again.

The handle crosses as plain fields of a message on an authenticated connection. It opens the whole block of
memory in which the pool lies: the listener gives it to processes of the same user that hold the cluster key.
"""

from typing import Annotated, Final

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from baton.errors import TransferFailed, WireError
from baton.kernels.pages import Offsets, copy_pages
from baton.kvtransfer.protocol.messages import PeerRank, RankListenerAddresses
from baton.kvtransfer.protocol.transfer_plan import TransferPlan
from baton.kvtransfer.transports.base import LocalRank
from baton.kvtransfer.transports.pages import DevicePages
from baton.kvtransfer.transports.shm import DirectListener, DirectSender
from baton.messages.bounds import schema_hash
from baton.rpc.listener import decode_greeting

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
    """A CudaOffer for one source; each source needs an offer of its own.

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
    """The pages of another process's pool, for kernels on this process's GPU `device`.

    Returns uint8 [num_pages, page_bytes], mapped for that GPU, which need not be the GPU that holds the
    pages: a kernel that reads pages without that mapping ends the process. TransferFailed when `device`
    cannot reach the pages.
    """
    offer = decode_greeting(message, CudaOffer, "pool")
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
        with torch.cuda.stream(source.streams[0]):
            source.wait_for_writers()
            copy_pages(
                source.of_rows(plan),
                source.rows(plan, source_offset_N),
                destination.of_rows(plan),
                destination.rows(plan, destination_offset_N),
            )


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
