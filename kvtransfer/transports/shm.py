"""Page bytes between CPUs of one host: one copy, straight into the destination's pages.

The destination's pool lies in shared memory and is given to the source by its descriptor. See
kvtransfer/transports/direct.py for the life of a transfer. A copy runs outside the interpreter's lock.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from baton.errors import WireError
from baton.kernels.copy_runs import copy_runs
from baton.kvtransfer.protocol.messages import PeerRank, RankListenerAddresses
from baton.kvtransfer.protocol.transfer_plan import Offsets, TransferPlan
from baton.kvtransfer.transports.base import LocalRank
from baton.kvtransfer.transports.direct import DirectListener, DirectSender, check_size
from baton.kvtransfer.transports.listener import decode_greeting
from baton.kvtransfer.transports.pages import PeerPages
from baton.messages.bounds import schema_hash

PART_BYTES: Final = 8 * 2**20  # between two looks at the table of generations: half a millisecond
INLINE_BYTES: Final = 2**21  # copied in 0.15 ms, less than it takes to wake a thread


class PoolOffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The size of the pool whose descriptor comes with this message."""

    num_pages: Annotated[int, Meta(ge=1, le=2**31)]
    page_bytes: Annotated[int, Meta(ge=1, le=2**40)]


POOL_SCHEMA: Final = schema_hash(PoolOffer)


class ShmTransport:
    """Serves CPU ranks of one host whose destination pool lies in shared memory."""

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

    def __init__(self, rank: LocalRank, address: str) -> None:
        self._pages: PeerPages | None = None
        super().__init__(
            "shm",
            rank,
            address,
            schema=POOL_SCHEMA,
            part_bytes=PART_BYTES,
            num_threads=1,
            inline_bytes=INLINE_BYTES,
        )

    def map_pages(self, message: bytes, descriptors: list[int]) -> int:
        offer = decode_greeting(message, PoolOffer, "pool")
        if len(descriptors) != 1:
            raise WireError(f"pages come with 1 descriptor, got {len(descriptors)}", reason="pool")
        check_size(descriptors[0], offer.num_pages * offer.page_bytes)
        self._pages = PeerPages(descriptors[0], offer.num_pages, offer.page_bytes)
        return offer.num_pages

    def copy(self, plan: TransferPlan, source_offset_N: Offsets, destination_offset_N: Offsets) -> None:
        assert self._pages is not None and self._rank.memory is not None
        copy_runs(
            self._rank.memory, self._pages.memory, source_offset_N, destination_offset_N, plan.run_bytes
        )

    def unmap_pages(self) -> None:
        if self._pages is not None:
            self._pages.close()
            self._pages = None
