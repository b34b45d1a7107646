"""Collectives between CPU ranks of one machine, in memory that all of them have mapped.

The C kernel (csrc/collectives.c) copies and adds. A rank that waits for others first spins and then sleeps.

Shapes: T rows, N columns.
"""

import ctypes
import logging
import mmap
import os
import secrets
import stat
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import BinaryIO, Final

import torch
from torch import Tensor

from baton.kernels import native

logger = logging.getLogger(__name__)
SLOT_BYTES: Final = 2**20  # a rank has two
# A waiting rank spins this long at most, less when another thread needs its core.
SPIN: Final = timedelta(microseconds=100)
# This and the next two constants are those of csrc/collectives.c.
BARRIER_BYTES: Final = 4096
MAX_RANKS: Final = 64
MEMORY_NAME: Final = "baton-ranks-"  # before a random number
IS_ABORTED_OFFSET: Final = 192
OUTCOMES: Final = (
    "this rank has left",
    "another rank has ended or left",
    "another rank did not come in time",
)


def share_memory(
    rank: int, size: int, gather: Callable[[list[int]], list[list[int]]], timeout: timedelta
) -> "SharedMemoryGroup | None":
    """Form a group with the other ranks, which all make this call; None on all when one cannot join.

    Rank 0 creates the memory, and the others open it through rank 0's process. gather: exchanges a list of
    numbers with the other ranks and returns the lists of all ranks, in order. timeout: of each collective.
    """
    if size > MAX_RANKS:
        return None
    descriptor, token = -1, secrets.randbits(62)
    group: SharedMemoryGroup | None = None
    with ExitStack() as exchange:
        if rank == 0:
            with _logging_failure():
                descriptor = create_memory(f"{MEMORY_NAME}{token}", size)
                exchange.callback(os.close, descriptor)
        members = gather([os.getpid(), descriptor, token])
        process, descriptor, token = members[0]
        others = {process for process, _, _ in members} - {os.getpid()}
        with _logging_failure(), open_memory(process, descriptor, f"{MEMORY_NAME}{token}") as memory:
            group = SharedMemoryGroup(memory.fileno(), rank, size, sorted(others), timeout)
        has_all = all(has_joined for (has_joined,) in gather([group is not None]))
    return group if has_all else None


@contextmanager
def _logging_failure() -> Iterator[None]:
    try:
        yield
    except (OSError, AttributeError) as error:  # AttributeError: no memfd_create or pidfd_open in this Python
        logger.warning("ranks of this machine cannot share memory: %s", error)


def create_memory(name: str, size: int) -> int:
    """Memory for `size` ranks: a descriptor that the caller closes. Untouched parts take no memory.

    Other processes of this user, but no other user, can open it as /proc/PROCESS/fd/DESCRIPTOR. OSError when
    the system has no such memory.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    os.fchmod(descriptor, stat.S_IRUSR | stat.S_IWUSR)
    os.ftruncate(descriptor, _num_bytes(size))
    return descriptor


def open_memory(process: int, descriptor: int, name: str) -> BinaryIO:
    """Open memory that a process of this user has created under this name. OSError when it has none."""
    path = f"/proc/{process}/fd/{descriptor}"
    if not os.readlink(path).startswith(f"/memfd:{name} "):
        raise FileNotFoundError(f"{path} is other memory")
    return open(path, "r+b", buffering=0)


def _num_bytes(size: int) -> int:
    return BARRIER_BYTES + 2 * size * SLOT_BYTES


class SharedMemoryGroup:
    """A rank's place among ranks of this machine, which call the same collectives in the same order.

    A collective returns when all ranks have called it. It raises RuntimeError when another rank's process has
    ended, when its group was dropped, and when it does not call within the timeout. From then on every
    collective of every rank raises RuntimeError.
    """

    def __init__(
        self, descriptor: int, rank: int, size: int, processes: Sequence[int], timeout: timedelta
    ) -> None:
        """Map the memory of `create_memory`; the caller closes the descriptor.

        processes: ids of the other ranks' processes, and of no others. OSError when a process has ended.
        """
        if native.library() is None:
            raise OSError("the C kernels are not built")
        if not 0 <= rank < size <= MAX_RANKS:
            raise ValueError(f"rank {rank} of {size}: up to {MAX_RANKS} ranks share memory")
        memory = torch.frombuffer(mmap.mmap(descriptor, _num_bytes(size)), dtype=torch.uint8)
        watched: list[int] = []
        self._leave = weakref.finalize(self, _leave, os.getpid(), memory, watched)
        self._memory = memory  # mapped for as long as a thread may be in a collective
        watched += map(os.pidfd_open, processes)
        self._watched = (ctypes.c_int * len(watched))(*watched)
        self.rank, self.size = rank, size
        self._group = _Group(
            memory=memory.data_ptr(),
            slot_bytes=SLOT_BYTES,
            rank=rank,
            size=size,
            processes=ctypes.addressof(self._watched),
            num_processes=len(watched),
            timeout_ns=timeout // timedelta(microseconds=1) * 1000,
            spin_ns=SPIN // timedelta(microseconds=1) * 1000,
        )
        self._address = ctypes.addressof(self._group)

    def all_reduce(self, x: Tensor) -> None:
        """Replace x, which is contiguous, by the sum over all ranks: in the order of the ranks.

        bf16 is added in fp32 and rounded once. Types without a C kernel are rounded after each addition.
        """
        _check(x)
        if x.dtype in native.DTYPE_CODES:
            code = native.DTYPE_CODES[x.dtype]
            self._run("baton_all_reduce", "ppni", x.data_ptr(), x.numel(), code)
            return
        first, *others = self.all_gather(x.view(1, -1)).view(self.size, *x.shape)
        for other in others:
            first += other
        x.copy_(first)

    def all_gather(self, x_TN: Tensor) -> Tensor:
        """[T, N] of every rank side by side: [T, size * N]."""
        x_TN = x_TN.contiguous()
        _check(x_TN)
        num_rows, num_columns = x_TN.shape
        out_TN = x_TN.new_empty(num_rows, self.size * num_columns)
        row_bytes = num_columns * x_TN.itemsize
        self._run("baton_all_gather", "pppnn", x_TN.data_ptr(), out_TN.data_ptr(), num_rows, row_bytes)
        return out_TN

    def broadcast(self, x: Tensor) -> None:
        """Replace x, which is contiguous, by rank 0's."""
        _check(x)
        self._run("baton_broadcast", "ppn", x.data_ptr(), x.nbytes)

    def _run(self, name: str, signature: str, *arguments: int) -> None:
        if self._leave.alive:
            native.function(name, signature)(self._address, *arguments)
            if not self._group.outcome:
                return
            self._leave()
        raise RuntimeError(OUTCOMES[self._group.outcome])


def _check(x: Tensor) -> None:
    if x.device.type != "cpu" or not x.is_contiguous():
        raise ValueError(f"expected a contiguous tensor of a CPU, got strides {x.stride()} on {x.device}")


def _leave(process: int, memory: Tensor, watched: list[int]) -> None:
    """Tell the other ranks that this one calls no further collective. A forked child is no rank."""
    if os.getpid() != process:
        return
    memory[IS_ABORTED_OFFSET] = 1
    for descriptor in watched:
        os.close(descriptor)


class _Group(ctypes.Structure):
    """As `struct group` in csrc/collectives.c."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("processes", ctypes.c_void_p),
        ("num_processes", ctypes.c_int64),
        ("timeout_ns", ctypes.c_int64),
        ("spin_ns", ctypes.c_int64),
        ("outcome", ctypes.c_int),
    )
