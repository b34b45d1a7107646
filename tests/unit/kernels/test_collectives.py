"""Collectives in shared memory, beside plain sums. A rank is a thread, or a process to kill."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.errors import TransferFailed
from baton.kernels import collectives, native
from baton.kernels.collectives import SharedMemoryGroup, create_memory
from tests.remote import Remote

MAX_RANKS: Final = 4
LONG: Final = timedelta(seconds=60)
SOON_S: Final = 5.0  # on a busy machine
pytestmark = pytest.mark.skipif(native.library() is None, reason="the C kernels are not built")

Call = Callable[[SharedMemoryGroup, Tensor], Tensor | None]


@contextmanager
def memory(size: int) -> Iterator[int]:
    descriptor = create_memory("test", size)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class Ranks:
    """Ranks in threads."""

    def __init__(self, size: int) -> None:
        self._threads = ThreadPoolExecutor(size)
        with memory(size) as descriptor:
            self.groups = [SharedMemoryGroup(descriptor, rank, size, [], LONG) for rank in range(size)]

    def close(self) -> None:
        self._threads.shutdown()

    def run(self, call: Call, inputs: list[Tensor]) -> list[Tensor]:
        """The results; None: the inputs, which the call has replaced."""

        def one(group: SharedMemoryGroup, x: Tensor) -> Tensor:
            result = call(group, x)
            return x if result is None else result

        return list(self._threads.map(one, self.groups, inputs))


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, Ranks]]:
    """With slots so small that tensors take several rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "SLOT_BYTES", 256)
        made = {size: Ranks(size) for size in range(1, MAX_RANKS + 1)}
    yield made
    for each in made.values():
        each.close()


def values(rank: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return elements of very different sizes: their sum depends on the order of the additions."""
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-8, 9, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * 2.0**exponents).to(dtype)


shapes = st.tuples(st.integers(0, 7), st.integers(1, 200))
sizes = st.integers(1, MAX_RANKS)


@given(size=sizes, shape=shapes, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_sum_is_in_the_order_of_the_ranks(
    ranks: dict[int, Ranks], size: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    inputs = [values(rank, shape, dtype) for rank in range(size)]
    added_in = torch.float32 if dtype == torch.bfloat16 else dtype
    expected = reduce(torch.add, (x.to(added_in) for x in inputs)).to(dtype)
    for got in ranks[size].run(SharedMemoryGroup.all_reduce, inputs):
        assert torch.equal(got, expected)


@given(size=sizes, shape=shapes, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_gathered_columns_lie_side_by_side(
    ranks: dict[int, Ranks], size: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    inputs = [values(rank, (shape[0], 2 * shape[1]), dtype)[:, ::2] for rank in range(size)]
    for got in ranks[size].run(SharedMemoryGroup.all_gather, inputs):
        assert torch.equal(got, torch.cat(inputs, dim=1))


@given(size=sizes, shape=shapes, dtype=st.sampled_from([torch.int64, torch.uint8, torch.float32]))
def test_all_get_the_tensor_of_rank_0(
    ranks: dict[int, Ranks], size: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    inputs = [values(rank, shape, dtype) for rank in range(size)]
    expected = inputs[0].clone()
    for got in ranks[size].run(SharedMemoryGroup.broadcast, inputs):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("size", [2, 3])
def test_large_tensors_follow_one_another(size: int) -> None:
    """In slots of the usual size, with all threads, and ranks that come at different times."""
    with closing(Ranks(size)) as made:
        for seed in range(10):
            inputs = [values(seed + rank, (300, 2000), torch.float32) for rank in range(size)]
            expected = reduce(torch.add, inputs)
            whole = torch.cat(inputs, dim=1)
            for got in made.run(SharedMemoryGroup.all_gather, inputs):
                assert torch.equal(got, whole)
            for got in made.run(SharedMemoryGroup.all_reduce, inputs):
                assert torch.equal(got, expected)


def test_tensors_that_the_kernel_cannot_read_are_refused() -> None:
    with memory(1) as descriptor:
        group = SharedMemoryGroup(descriptor, 0, 1, [], LONG)
        with pytest.raises(ValueError, match=r"contiguous tensor of a CPU, got strides \(1, 2\)"):
            group.all_reduce(torch.zeros(3, 2).T)
        with pytest.raises(ValueError, match="rank 2 of 2: up to 64 ranks share memory"):
            SharedMemoryGroup(descriptor, 2, 2, [], LONG)


# Ranks that end or hang.


class Rank:
    """Rank 1 of two, for a process of its own."""

    def __init__(self, process_of_rank_0: int, descriptor: int) -> None:
        with open(f"/proc/{process_of_rank_0}/fd/{descriptor}", "r+b", buffering=0) as file:
            self._group = SharedMemoryGroup(file.fileno(), 1, 2, [process_of_rank_0], LONG)

    def add(self, count: int = 1) -> None:
        for _ in range(count):
            self._group.all_reduce(torch.ones(2**19))

    def close(self) -> None:
        pass


@contextmanager
def pair(timeout: timedelta = LONG) -> Iterator[tuple[SharedMemoryGroup, Remote]]:
    """Rank 0, and the process of rank 1, once both have met."""
    with memory(2) as descriptor, Remote(Rank, os.getpid(), descriptor) as other:
        other.add(0)  # its process has started
        assert other.process.pid is not None
        group = SharedMemoryGroup(descriptor, 0, 2, [other.process.pid], timeout)
        other.start_call("add")
        x = torch.ones(2**19)
        group.all_reduce(x)
        assert (x == 2).all()
        other.result()
        yield group, other


def test_rank_that_is_killed_while_it_is_awaited_is_reported_at_once() -> None:
    with pair() as (group, other), ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(group.all_reduce, torch.ones(3))
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        other.kill()
        with pytest.raises(RuntimeError, match="another rank has ended or left"):
            waiting.result(SOON_S)
        with pytest.raises(RuntimeError, match="another rank has ended or left"):
            group.broadcast(torch.ones(3))


def test_rank_that_is_killed_within_a_sum_is_reported() -> None:
    with pair() as (group, other):
        other.start_call("add", 10**9)
        for _ in range(20):
            group.all_reduce(torch.ones(2**19))
        other.process.kill()
        started_s = time.monotonic()
        with pytest.raises(RuntimeError, match="another rank has ended or left"):
            while time.monotonic() - started_s < SOON_S:
                group.all_reduce(torch.ones(2**19))


def test_rank_that_hangs_is_reported_after_the_timeout_and_sums_no_more() -> None:
    with pair(timedelta(seconds=0.3)) as (group, other):
        other.signal(signal.SIGSTOP)
        started_s = time.monotonic()
        with pytest.raises(RuntimeError, match="another rank did not come in time"):
            group.all_reduce(torch.ones(3))
        assert 0.3 <= time.monotonic() - started_s < SOON_S
        other.signal(signal.SIGCONT)
        with pytest.raises(TransferFailed, match="another rank has ended or left"):
            other.add()


def test_rank_is_told_that_the_group_of_another_was_dropped() -> None:
    with closing(Ranks(2)) as made, ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(made.groups[0].all_reduce, torch.ones(3))
        made.groups.pop()
        with pytest.raises(RuntimeError, match="another rank has ended or left"):
            waiting.result(SOON_S)


def test_forked_child_that_drops_the_group_does_not_end_it() -> None:
    with closing(Ranks(2)) as ranks:
        if not (child := os.fork()):
            ranks.groups.clear()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        sums = ranks.run(SharedMemoryGroup.all_reduce, [torch.ones(3), torch.ones(3)])
        assert [each.tolist() for each in sums] == [[2.0] * 3] * 2


def test_waiting_rank_sleeps() -> None:
    with closing(Ranks(2)) as made:
        first, second = made.groups
        with ThreadPoolExecutor(1) as thread:
            before_s = time.process_time()
            waiting = thread.submit(first.all_reduce, torch.ones(3))
            with pytest.raises(TimeoutError):
                waiting.result(0.5)
            used_s = time.process_time() - before_s
            second.all_reduce(torch.ones(3))
            waiting.result()
        assert used_s < 0.1


def test_dropped_group_frees_its_memory_and_its_descriptors() -> None:
    def held() -> tuple[int, int]:
        return Path("/proc/self/maps").read_text().count("memfd:test"), len(os.listdir("/proc/self/fd"))

    before = held()
    with memory(2) as descriptor:
        group = SharedMemoryGroup(descriptor, 0, 2, [os.getppid()], LONG)
        assert held() == (before[0] + 1, before[1] + 3)  # its own, the caller's, the other process
    del group
    assert held() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a program as another user")
def test_other_users_cannot_open_the_memory() -> None:
    with memory(2) as descriptor:
        read = ["head", "--bytes=1", f"/proc/{os.getpid()}/fd/{descriptor}"]
        assert subprocess.run(read, capture_output=True, check=False).returncode == 0
        stranger = subprocess.run(
            read, user=65534, group=65534, extra_groups=[], capture_output=True, text=True, check=False
        )
        assert stranger.returncode != 0 and "Permission denied" in stranger.stderr
