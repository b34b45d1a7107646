"""Where a tcp stream takes a part's bytes from, and where it puts them.

A CPU's pages are sent from and received into as they lie. A GPU's go by way of pinned memory, of which each
stream has as much as its largest part, some 32 MiB: a fallback, at the speed of the bus or of the network.
"""

from typing import Final, Protocol

import numpy as np

from baton.kvtransfer.page_memory import PageMemory
from baton.kvtransfer.page_packing import PagePacking
from baton.kvtransfer.page_socket import Buffer, Places
from baton.kvtransfer.staged_parts import StagedParts
from baton.kvtransfer.transfer_plan import Offsets, TransferPlan

_START: Final = np.zeros(1, dtype=np.int64)  # the one run that a part is when it is staged


class StreamPages(Protocol):
    """A rank's pool, for one thread."""

    def outgoing(self, plan: TransferPlan, offset_N: Offsets, head: Buffer) -> Places:
        """The head, then the runs' bytes; good until the next call."""

    def incoming(self, plan: TransferPlan, offset_N: Offsets) -> Places:
        """Where the runs' bytes are to be received."""

    def received(self, plan: TransferPlan, offset_N: Offsets) -> None:
        """All of them were: they are in the pages on return."""


class TcpPool(Protocol):
    """A rank's pool, for all streams."""

    num_pages: int

    def note_written(self) -> None:
        """As PagePacking's."""

    def stream(self) -> StreamPages: ...


def tcp_pool_of(pool: PageMemory | PagePacking) -> TcpPool:
    return HostTcpPool(pool) if isinstance(pool, PageMemory) else StagedTcpPool(pool)


class HostTcpPool:
    def __init__(self, memory: PageMemory) -> None:
        self._memory = memory
        self.num_pages = memory.num_pages

    def note_written(self) -> None:
        """A CPU has written when it says so."""

    def stream(self) -> StreamPages:
        return _InPlace(self._memory)


class StagedTcpPool:
    def __init__(self, packing: PagePacking) -> None:
        self._packing = packing
        self.num_pages = packing.num_pages

    def note_written(self) -> None:
        self._packing.note_written()

    def stream(self) -> StreamPages:
        return _Staged(self._packing)


class _InPlace:
    def __init__(self, memory: PageMemory) -> None:
        self._memory = memory

    def outgoing(self, plan: TransferPlan, offset_N: Offsets, head: Buffer) -> Places:
        return Places.of_runs(self._memory.address, offset_N, plan.run_bytes, head)

    def incoming(self, plan: TransferPlan, offset_N: Offsets) -> Places:
        return Places.of_runs(self._memory.address, offset_N, plan.run_bytes)

    def received(self, plan: TransferPlan, offset_N: Offsets) -> None:
        """They were received where they belong."""


class _Staged:
    def __init__(self, packing: PagePacking) -> None:
        self._parts = StagedParts(packing)

    def outgoing(self, plan: TransferPlan, offset_N: Offsets, head: Buffer) -> Places:
        host = self._parts.fetch(plan, offset_N)
        return Places.of_runs(host.data_ptr(), _START, len(host), head)

    def incoming(self, plan: TransferPlan, offset_N: Offsets) -> Places:
        host = self._parts.room(len(offset_N) * plan.run_bytes)
        return Places.of_runs(host.data_ptr(), _START, len(host))

    def received(self, plan: TransferPlan, offset_N: Offsets) -> None:
        self._parts.store(plan, offset_N)
