"""The memory of a rank's pages, pools that other processes on the host can map, and copies out of and into
pages.

A shared pool is a file that has a descriptor but no name: it is freed when the last process that holds it has
ended. A table of generations belongs to each pool, with one word a page, which only the owner can write: a
writer in another process looks a page up there before it writes the page (kvtransfer/transports/direct.py).
"""

import contextlib
import ctypes
import fcntl
import math
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.errors import ConfigError, TransferFailed, WireError
from baton.kernels.native import huge_zeros
from baton.kernels.pages import (
    CodedRows,
    Offsets,
    copy_pages,
    decode_pages,
    decode_runs,
    encode_pages,
    encode_runs,
    pack_runs,
    unpack_runs,
)
from baton.kvtransfer.protocol.transfer_plan import TransferPlan

REVOKED: Final = 0  # no page that was ever handed out has generation 0
_WORD_BYTES: Final = 4
_SEALS: Final = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class PageMemory:
    """Page p is the bytes [address + p * page_bytes, address + (p + 1) * page_bytes) of this process."""

    def __init__(self, address: int, num_pages: int, page_bytes: int, owner: object) -> None:
        """owner: the object that keeps the memory mapped; it lives as long as this object."""
        self.address = address
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self._owner = owner

    @classmethod
    def of(cls, pool: Tensor) -> "PageMemory":
        """Return the pages of a contiguous CPU tensor [num_pages, ...]."""
        if pool.device.type != "cpu" or not pool.is_contiguous() or pool.dim() < 2:
            raise ValueError(f"pages must be contiguous on the CPU, got {pool.device} {tuple(pool.shape)}")
        return cls(pool.data_ptr(), len(pool), pool[0].numel() * pool.itemsize, pool)

    @classmethod
    def of_peer(cls, descriptor: int, num_pages: int, page_bytes: int) -> "PageMemory":
        """Map another process's pool for writing. It is unmapped with the last use of this object.

        Raises WireError when the file has another size.
        """
        check_size(descriptor, num_pages * page_bytes)
        mapped = map_shared(descriptor, num_pages * page_bytes)
        mapped.madvise(mmap.MADV_DONTFORK)  # a child of this process must not write after its death
        content = np.frombuffer(mapped, dtype=np.uint8)
        return cls(int(content.ctypes.data), num_pages, page_bytes, content)

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    def view(self) -> memoryview:
        """Return all pages as bytes, valid while this object lives."""
        return memoryview((ctypes.c_char * self.num_bytes).from_address(self.address)).cast("B")


class SharedFile:
    """Anonymous shared memory of a fixed size, zeros at first; untouched parts take no memory."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, num_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)  # a peer cannot shorten the file
        except OSError:
            self.close()
            raise

    def read_only(self) -> int:
        """Return a read-only descriptor of the same memory. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the descriptor. Mappings of the file stay."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class SharedPool:
    """A pool of pages that other processes can be given; `zeros` makes it, once.

    Everything is freed by `close` and the end of the tensor, or by the end of the processes.
    """

    def __init__(self) -> None:
        self.file: SharedFile
        self.memory: PageMemory
        self.generations: PageGenerations

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the pool's tensor [num_pages, ...] for an engine that asks for the memory of its pool."""
        page_bytes = math.prod(shape[1:]) * dtype.itemsize
        num_bytes = shape[0] * page_bytes
        if num_bytes == 0:
            raise ConfigError(f"a shared pool needs at least one page, got the shape {tuple(shape)}")
        self.file = SharedFile("baton-kv", num_bytes)
        mapped = map_shared(self.file.descriptor, num_bytes)
        tensor = torch.frombuffer(mapped, dtype=dtype).view(tuple(shape))
        self.memory = PageMemory(tensor.data_ptr(), shape[0], page_bytes, tensor)
        self.generations = PageGenerations(shape[0])
        return tensor

    def close(self) -> None:
        """Close the files. The tensor, and the mappings of other processes, stay."""
        if hasattr(self, "file"):
            self.file.close()
            self.generations.file.close()


class PageGenerations:
    """A shared table: page -> the generation that may be written, or REVOKED.

    Only the owner of the pool writes the table, word by word: readers see the old word or the new word.
    """

    def __init__(self, num_pages: int) -> None:
        self.file = SharedFile("baton-kv-generations", num_pages * _WORD_BYTES)
        self._words: NDArray[np.uint32] = np.frombuffer(
            map_shared(self.file.descriptor, self.file.num_bytes), dtype=np.uint32
        )

    def grant(self, pages: Sequence[int], generations: Sequence[int]) -> None:
        """Let other processes write each page in this generation."""
        self._words[list(pages)] = as_words(generations)

    def revoke(self, pages: Sequence[int]) -> None:
        """Revoke the pages. A writer that looked the page up before may still write."""
        self._words[list(pages)] = REVOKED


class PeerGenerations:
    """Another process's table, mapped for reading."""

    def __init__(self, descriptor: int, num_pages: int) -> None:
        """Map the table of a pool of so many pages. Raises WireError when the file has another size."""
        check_size(descriptor, num_pages * _WORD_BYTES)
        mapped = map_shared(descriptor, num_pages * _WORD_BYTES, prot=mmap.PROT_READ)
        self._words: NDArray[np.uint32] = np.frombuffer(mapped, dtype=np.uint32)

    def match(self, pages: NDArray[np.int64], words: NDArray[np.uint32]) -> bool:
        """Return True when each page still has its word. IndexError for a page outside the table."""
        return bool((self._words[pages] == words).all())


def as_words(generations: Sequence[int]) -> NDArray[np.uint32]:
    """Return generations as words of the table: 32 bits, never REVOKED."""
    wrapped = np.asarray(generations, dtype=np.int64) % (2**32 - 1) + 1
    return wrapped.astype(np.uint32)


def check_size(descriptor: int, num_bytes: int) -> None:
    """Raise WireError unless a peer's file has this size for good: a read past its end kills this process."""
    has_size = os.fstat(descriptor).st_size == num_bytes > 0
    if not has_size or not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise WireError(
            f"the offered pool is not a file of {num_bytes} bytes that keeps its size", reason="pool"
        )


def map_shared(descriptor: int, num_bytes: int, prot: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    """Map a file, shared with other processes, in huge pages where the system grants them."""
    mapped = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=prot)
    with contextlib.suppress(OSError):  # a kernel without them: small pages serve as well
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


# Runs of a pool packed into staging memory, and unpacked from it, where the pool lies.
#
# On a GPU the copies run on streams of the packing's own, the lanes. Each lane waits for the work that
# pushers have enqueued on theirs, and the model's stream never waits for a lane. Copies of one lane are done
# in order, those of different lanes side by side. Suffix N: runs.
#
# Where the plan sends codes, packing turns rows into codes, and unpacking turns them back: staging memory and
# the wire have codes, pages have rows.

NO_SLEEP_S: Final = 2e-4  # `poll` does not sleep for so long: a sleep takes 70 us at least
SHORTEST_SLEEP_S: Final = 2e-5  # afterwards each sleep is twice as long, up to
LONGEST_SLEEP_S: Final = 1e-3


class PagePacking(Protocol):
    """Packs runs of one rank's pool into staging memory, which is contiguous uint8 on the same device."""

    num_pages: int
    num_lanes: int  # lanes are numbers from 0; calls that name none use lane 0

    def staging(self, num_bytes: int) -> Tensor: ...

    def host_staging(self, num_bytes: int) -> Tensor:
        """Return uint8 on the CPU, pinned where the pool is on a GPU."""

    def warm_up(self, plan: TransferPlan) -> None:
        """Compile the kernels that transfers launch. plan: of this rank with itself: page 0 is copied onto
        itself.
        """

    def note_written(self) -> None:
        """Let later packs see the pages that the caller's thread, or its current stream, has written."""

    def pack(self, plan: TransferPlan, offset_N: Offsets, staging: Tensor, lane: int = 0) -> None:
        """Write what the plan sends for the runs into staging, run by run. Complete after `finish(lane)`."""

    def unpack(self, plan: TransferPlan, offset_N: Offsets, staging: Tensor, lane: int = 0) -> None: ...

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy from staging to host staging or back, in the order of the calls; done after `finish`."""

    def finish(self, timeout_s: float = math.inf, lane: int = 0) -> None:
        """Wait for all copies of a lane. TransferFailed when that takes too long.

        Copies that touch pages are waited for without a limit: they end by themselves, and the pages must not
        be reused before.
        """


def packing_of(pool: Tensor, num_lanes: int = 1, stream_priority: int = 0) -> PagePacking:
    """Return the packing of a pool.

    pool: contiguous [num_pages, ...]. num_lanes: of a pool on a GPU, with streams of this priority; a CPU has
    one lane.
    """
    if not pool.is_contiguous() or pool.dim() < 2:
        raise ValueError(f"a pool is contiguous [num_pages, ...], got {tuple(pool.shape)}")
    if pool.device.type == "cpu":
        return HostPages(PageMemory.of(pool))
    return DevicePages(pool, [torch.cuda.Stream(pool.device, stream_priority) for _ in range(num_lanes)])


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make a stream, and its GPU, the current ones of a thread that may have chosen no GPU.

    `torch.cuda.stream` alone would go back to GPU 0 afterwards, and open a context of CUDA there.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


class HostPages:
    """`PagePacking` of a pool in this process's memory."""

    num_lanes = 1

    def __init__(self, memory: PageMemory) -> None:
        self.memory = memory
        self.num_pages = memory.num_pages

    def staging(self, num_bytes: int) -> Tensor:
        return huge_zeros((num_bytes,), torch.uint8)

    def host_staging(self, num_bytes: int) -> Tensor:
        return huge_zeros((num_bytes,), torch.uint8)

    def warm_up(self, plan: TransferPlan) -> None:
        """Do nothing: a CPU's kernels are compiled already."""

    def note_written(self) -> None:
        """Do nothing: a CPU's writes are visible at once."""

    def pack(self, plan: TransferPlan, offset_N: Offsets, staging: Tensor, lane: int = 0) -> None:
        packed = staging[: len(offset_N) * plan.sent_run_bytes]
        if plan.sent_codes is None:
            pack_runs(self.memory, offset_N, plan.run_bytes, packed)
        else:
            encode_runs(self.memory, offset_N, plan.run_bytes, plan.sent_codes, packed)

    def unpack(self, plan: TransferPlan, offset_N: Offsets, staging: Tensor, lane: int = 0) -> None:
        packed = staging[: len(offset_N) * plan.sent_run_bytes]
        if plan.sent_codes is None:
            unpack_runs(self.memory, offset_N, plan.run_bytes, packed)
        else:
            decode_runs(self.memory, offset_N, plan.run_bytes, plan.sent_codes, packed)

    def copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def finish(self, timeout_s: float = math.inf, lane: int = 0) -> None:
        """Do nothing: a CPU's copies are done on return."""


class DevicePages:
    """`PagePacking` of a pool on a GPU, as a table of rows that all runs consist of."""

    def __init__(self, pool: Tensor, streams: Sequence[torch.cuda.Stream]) -> None:
        """streams: of each lane. Another pool that this GPU can write may have the same."""
        self.num_pages = len(pool)
        self.num_lanes = len(streams)
        self.streams = streams
        self._content = pool.view(-1).view(torch.uint8)
        self._written: deque[torch.cuda.Event] = deque()
        self._ordering = threading.Lock()

    def staging(self, num_bytes: int) -> Tensor:
        # The allocator reuses the memory on this stream alone. Other lanes have ended before memory is freed.
        with on_stream(self.streams[0]):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._content.device)

    def host_staging(self, num_bytes: int) -> Tensor:
        with on_stream(self.streams[0]):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def warm_up(self, plan: TransferPlan) -> None:
        offset_N = plan.source.offsets(0, 1, (0,))
        for each in (plan.as_stored(), plan):  # digests read pages as they are stored
            staging = self.staging(len(offset_N) * each.sent_run_bytes)
            self.pack(each, offset_N, staging)
            self.unpack(each, offset_N, staging)
        with on_stream(self.streams[0]):  # as cuda_ipc copies
            rows = self.rows(plan, offset_N)
            copy_pages(self.of_rows(plan), rows, self.of_rows(plan), rows)
        self.finish()

    def note_written(self) -> None:
        self._written.append(torch.cuda.current_stream(self._content.device).record_event())

    def pack(self, plan: TransferPlan, offset_N: Offsets, staging: Tensor, lane: int = 0) -> None:
        with on_stream(self.streams[lane]):
            self.wait_for_writers()
            rows = self.rows(plan, offset_N)
            if plan.sent_codes is None:
                copy_pages(self.of_rows(plan), rows, staging.view(-1, plan.row_bytes), None)
            else:
                encode_pages(*self._coded_rows(plan, plan.sent_codes, rows, staging))

    def unpack(self, plan: TransferPlan, offset_N: Offsets, staging: Tensor, lane: int = 0) -> None:
        with on_stream(self.streams[lane]):
            rows = self.rows(plan, offset_N)
            if plan.sent_codes is None:
                copy_pages(staging.view(-1, plan.row_bytes), None, self.of_rows(plan), rows)
            else:
                decode_pages(*self._coded_rows(plan, plan.sent_codes, rows, staging))

    def copy(self, source: Tensor, target: Tensor) -> None:
        with on_stream(self.streams[0]):
            target.copy_(source, non_blocking=True)

    def finish(self, timeout_s: float = math.inf, lane: int = 0) -> None:
        with on_stream(self.streams[lane]):
            done = self.streams[lane].record_event()
            if not poll(done.query, timeout_s):
                raise TransferFailed(f"the GPU did not finish within {timeout_s:g} s")

    def wait_for_writers(self) -> None:
        """Let all lanes wait for all work that `note_written` was told of.

        When two threads pack, neither continues before the other has enqueued its waits.
        """
        with self._ordering:
            while self._written:
                written = self._written.popleft()
                for stream in self.streams:
                    stream.wait_event(written)

    def of_rows(self, plan: TransferPlan) -> Tensor:
        """Return the pool as a table of rows of `plan.row_bytes` bytes."""
        return self._content.view(-1, plan.row_bytes)

    def rows(self, plan: TransferPlan, offset_N: Offsets) -> Tensor:
        """Return int64 on the device: the rows of `of_rows` that make up the runs.

        Raises ValueError for rows outside.
        """
        if len(offset_N) and int(offset_N.max()) + plan.run_bytes > len(self._content):
            raise ValueError(f"runs are not within a pool of {self.num_pages} pages")
        first = offset_N // plan.row_bytes
        rows_of_run = np.arange(plan.run_bytes // plan.row_bytes, dtype=np.int64)
        rows = torch.from_numpy(np.add.outer(first, rows_of_run).reshape(-1))
        # Pinned, or the copy would wait for the stream; the allocator keeps it until the stream has read it.
        return rows.pin_memory().to(self._content.device, non_blocking=True)

    def _coded_rows(
        self, plan: TransferPlan, codes: CodedRows, rows: Tensor, staging: Tensor
    ) -> tuple[Tensor, Tensor, torch.dtype, Tensor]:
        """Return the arguments of `encode_pages`: a page there is a row of `of_rows`."""
        num_rows = plan.row_bytes // codes.plain_bytes
        pages = self._content.view(codes.dtype).view(-1, num_rows, codes.head_dim)
        return pages, rows, codes.codes, staging.view(-1, num_rows, codes.coded_bytes)


def poll(has_ended: Callable[[], bool], timeout_s: float) -> bool:
    """Call `has_ended` until it returns True, at first without sleeping. Return False after the timeout."""
    begun_s, sleep_s = time.monotonic(), SHORTEST_SLEEP_S
    while not has_ended():
        waited_s = time.monotonic() - begun_s
        if waited_s > timeout_s:
            return False
        if waited_s < NO_SLEEP_S:
            time.sleep(0)  # lets other threads run
            continue
        time.sleep(sleep_s)
        sleep_s = min(2 * sleep_s, LONGEST_SLEEP_S)
    return True


class StagedParts:
    """Pages as they are sent, in host memory, for sockets and digests: one part at a time, for one thread.

    A part of a GPU's pages is gathered into staging memory on the GPU and copied to pinned memory in one
    piece, or the other way round. Each way costs a pass over the GPU's memory, and one over the bus at some
    50 GB/s (PCIe 5, 16 lanes).
    """

    def __init__(self, packing: PagePacking) -> None:
        self._packing = packing
        self._staging = packing.staging(0)
        self._host = packing.host_staging(0)

    def room(self, num_bytes: int) -> Tensor:
        """Return host memory uint8 [num_bytes] for `store` to put into pages; valid until the next call."""
        if num_bytes > len(self._host):
            self._staging = self._packing.staging(num_bytes)
            self._host = self._packing.host_staging(num_bytes)
        return self._host[:num_bytes]

    def fetch(self, plan: TransferPlan, offset_N: Offsets) -> Tensor:
        """Return the packed runs in host memory, valid until the next call."""
        host = self.room(len(offset_N) * plan.sent_run_bytes)
        staging = self._staging[: len(host)]
        self._packing.pack(plan, offset_N, staging)
        self._packing.copy(staging, host)
        self._packing.finish()
        return host

    def store(self, plan: TransferPlan, offset_N: Offsets) -> None:
        """Put the bytes that were written into `room` into the pages."""
        host = self.room(len(offset_N) * plan.sent_run_bytes)
        staging = self._staging[: len(host)]
        self._packing.copy(host, staging)
        self._packing.unpack(plan, offset_N, staging)
        self._packing.finish()
