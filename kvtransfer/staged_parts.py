"""The pages of a GPU by way of host memory: for sockets and digests, which only a CPU can serve.

A part is gathered into staging memory on the GPU and copied to pinned memory in one piece, or the other way
round. Each way costs a pass over the GPU's memory, and one over the bus at some 50 GB/s (PCIe 5, 16 lanes).
"""

from torch import Tensor

from baton.kvtransfer.page_packing import PagePacking
from baton.kvtransfer.transfer_plan import Offsets, TransferPlan


class StagedParts:
    """Room for one part at a time, which grows to the largest one. One thread uses it."""

    def __init__(self, packing: PagePacking) -> None:
        self._packing = packing
        self._staging = packing.staging(0)
        self._host = packing.host_staging(0)

    def room(self, num_bytes: int) -> Tensor:
        """Host memory uint8 [num_bytes] for what `store` is to put into pages; good until the next call."""
        if num_bytes > len(self._host):
            self._staging = self._packing.staging(num_bytes)
            self._host = self._packing.host_staging(num_bytes)
        return self._host[:num_bytes]

    def fetch(self, plan: TransferPlan, offset_N: Offsets) -> Tensor:
        """The runs' bytes, one run after the other, in host memory that is good until the next call."""
        host = self.room(len(offset_N) * plan.run_bytes)
        staging = self._staging[: len(host)]
        self._packing.pack(plan, offset_N, staging)
        self._packing.copy(staging, host)
        self._packing.finish()
        return host

    def store(self, plan: TransferPlan, offset_N: Offsets) -> None:
        """What was written into `room` is in the pages on return."""
        host = self.room(len(offset_N) * plan.run_bytes)
        staging = self._staging[: len(host)]
        self._packing.copy(host, staging)
        self._packing.unpack(plan, offset_N, staging)
        self._packing.finish()
