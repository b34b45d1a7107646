"""Runs of a pool packed into staging memory, and unpacked from it, where the pool lies.

On a GPU it happens on a stream of our own, beside the model's: what a pusher has enqueued on its stream is
waited for there, and nothing waits for us on the model's stream. Suffix N: runs.
"""

import math
import threading
import time
from collections import deque
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from baton.errors import TransferFailed
from baton.kernels.copy_runs import copy_runs
from baton.kernels.gather_pages import gather_pages
from baton.kernels.huge_pages import huge_zeros
from baton.kernels.scatter_pages import scatter_pages
from baton.kvtransfer.page_memory import PageMemory
from baton.kvtransfer.transfer_plan import Offsets, TransferPlan

NO_SLEEP_S: Final = 2e-4  # a wait for the GPU looks all the time at first: a sleep takes 70 us at least
SHORTEST_SLEEP_S: Final = 2e-5  # then it sleeps, each time twice as long, up to
LONGEST_SLEEP_S: Final = 1e-3


class PagePacking(Protocol):
    """The pool of one rank. Staging is contiguous uint8 on the same device."""

    num_pages: int

    def staging(self, num_bytes: int) -> Tensor: ...

    def host_staging(self, num_bytes: int) -> Tensor:
        """uint8 on the CPU, of the kind that a GPU copies from and to by itself."""

    def note_written(self) -> None:
        """The caller's thread has written pages, or has told its current stream to: what is packed has it."""

    def pack(self, plan: TransferPlan, offset_N: Offsets, staging: Tensor) -> None:
        """The pool's runs, one after the other; on a GPU they are there after `finish`."""

    def unpack(self, plan: TransferPlan, offset_N: Offsets, staging: Tensor) -> None: ...

    def copy(self, source: Tensor, target: Tensor) -> None:
        """From staging to host staging or back, in the order of the calls; done after `finish`."""

    def finish(self, timeout_s: float = math.inf) -> None:
        """Wait for all that is on its way on our stream. TransferFailed when it takes too long.

        What touches pages is waited for without a limit: it ends by itself, and must have before others may.
        """


def packing_of(pool: Tensor | PageMemory) -> PagePacking:
    """pool: contiguous [num_pages, ...]."""
    if isinstance(pool, PageMemory):
        return HostPages(pool)
    if not pool.is_contiguous() or pool.dim() < 2:
        raise ValueError(f"a pool is contiguous [num_pages, ...], got {tuple(pool.shape)}")
    return DevicePages(pool) if pool.is_cuda else HostPages(PageMemory.of(pool))


class HostPages:
    def __init__(self, memory: PageMemory) -> None:
        self._memory = memory
        self.num_pages = memory.num_pages

    def staging(self, num_bytes: int) -> Tensor:
        return huge_zeros((num_bytes,), torch.uint8)

    def host_staging(self, num_bytes: int) -> Tensor:
        return huge_zeros((num_bytes,), torch.uint8)

    def note_written(self) -> None:
        """A CPU has written when it says so."""

    def pack(self, plan: TransferPlan, offset_N: Offsets, staging: Tensor) -> None:
        packed_N = np.arange(len(offset_N), dtype=np.int64) * plan.run_bytes
        # It is sent at once: in the cache it need not come from memory again.
        copy_runs(self._memory, staging, offset_N, packed_N, plan.run_bytes, keep_in_cache=True)

    def unpack(self, plan: TransferPlan, offset_N: Offsets, staging: Tensor) -> None:
        packed_N = np.arange(len(offset_N), dtype=np.int64) * plan.run_bytes
        copy_runs(staging, self._memory, packed_N, offset_N, plan.run_bytes)

    def copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def finish(self, timeout_s: float = math.inf) -> None:
        """Nothing is left to do."""


class DevicePages:
    """A pool on a GPU, taken for a table of rows that all runs consist of."""

    def __init__(self, pool: Tensor) -> None:
        self.pool = pool
        self.num_pages = len(pool)
        self.stream = torch.cuda.Stream(pool.device)
        self.content = pool.view(-1).view(torch.uint8)
        self._written: deque[torch.cuda.Event] = deque()
        self._ordering = threading.Lock()

    def staging(self, num_bytes: int) -> Tensor:
        with torch.cuda.stream(self.stream):  # memory of another one may still be in use by its work
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.pool.device)

    def host_staging(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def note_written(self) -> None:
        self._written.append(torch.cuda.current_stream(self.pool.device).record_event())

    def pack(self, plan: TransferPlan, offset_N: Offsets, staging: Tensor) -> None:
        row_bytes = plan.row_bytes
        with torch.cuda.stream(self.stream):
            self.wait_for_writers()
            rows = self.rows(plan, offset_N)
            gather_pages(self.content.view(-1, row_bytes), rows, staging.view(-1, row_bytes))

    def unpack(self, plan: TransferPlan, offset_N: Offsets, staging: Tensor) -> None:
        row_bytes = plan.row_bytes
        with torch.cuda.stream(self.stream):
            rows = self.rows(plan, offset_N)
            scatter_pages(staging.view(-1, row_bytes), rows, self.content.view(-1, row_bytes))

    def copy(self, source: Tensor, target: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def finish(self, timeout_s: float = math.inf) -> None:
        with torch.cuda.stream(self.stream):
            done = self.stream.record_event()
        begun_s, sleep_s = time.monotonic(), SHORTEST_SLEEP_S
        while not done.query():
            waited_s = time.monotonic() - begun_s
            if waited_s > timeout_s:
                raise TransferFailed(f"the GPU did not finish within {timeout_s:g} s")
            if waited_s < NO_SLEEP_S:
                time.sleep(0)  # lets other threads run
                continue
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, LONGEST_SLEEP_S)

    def wait_for_writers(self) -> None:
        """Have our stream wait for all that `note_written` was told of.

        Of two threads that pack, neither goes on before the other has told the stream what it took up.
        """
        with self._ordering:
            while self._written:
                self.stream.wait_event(self._written.popleft())

    def rows(self, plan: TransferPlan, offset_N: Offsets) -> Tensor:
        """int64 on the device: the rows of `plan.row_bytes` bytes that the runs consist of, in order."""
        first = offset_N // plan.row_bytes
        rows_of_run = np.arange(plan.run_bytes // plan.row_bytes, dtype=np.int64)
        rows = torch.from_numpy(np.add.outer(first, rows_of_run).reshape(-1))
        # Pinned, or the copy would wait for the stream; the allocator keeps it until the stream has read it.
        return rows.pin_memory().to(self.pool.device, non_blocking=True)
