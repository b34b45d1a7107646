"""Page bytes on one host, at the source: copied once, straight into the destination's pages.

The pool is shared memory, given by its descriptor; see direct.py for the life of a transfer. A copy runs
outside the interpreter's lock.
"""

from typing import Final

from baton.challenge import LinkSecret
from baton.clock import Clock
from baton.errors import WireError
from baton.kernels.copy_runs import copy_runs
from baton.kvtransfer.direct import DirectTransport, check_size
from baton.kvtransfer.door_messages import decode_said
from baton.kvtransfer.page_memory import PageMemory, PeerPages
from baton.kvtransfer.shm_door import PoolOffer
from baton.kvtransfer.transfer_plan import Offsets, TransferPlan
from baton.kvtransfer.transport import OnEnd
from baton.wire import DroppedPeers

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
