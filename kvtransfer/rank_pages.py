"""One rank's pool, and the ways to its pages within this process: in place on a CPU, staged on a GPU."""

from typing import Literal

from torch import Tensor

from baton.kvtransfer.digests import HostDigests, StagedDigests, UnitDigests
from baton.kvtransfer.page_memory import PageMemory
from baton.kvtransfer.page_packing import PagePacking, packing_of


class RankPages:
    def __init__(self, pool: Tensor) -> None:
        """pool: contiguous [num_pages, ...], on a CPU or on a GPU; ValueError for any other."""
        self.pool = pool
        self.num_pages = len(pool)
        self.device: Literal["cpu", "cuda"] = "cuda" if pool.is_cuda else "cpu"
        self.memory = None if pool.is_cuda else PageMemory.of(pool)
        self.digests: UnitDigests = (
            HostDigests(self.memory) if self.memory is not None else StagedDigests(self.packing())
        )

    def packing(self) -> PagePacking:
        """For one user: on a GPU each has a stream of its own, and waits for nobody else's work."""
        return packing_of(self.pool)

    def for_sockets(self) -> PageMemory | PagePacking:
        return self.memory if self.memory is not None else self.packing()
