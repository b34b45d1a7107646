"""Copies of runs between two areas. Shapes: N runs."""

import mmap
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels import native
from baton.kernels.pages import Offsets, copy_runs, copy_runs_reference


@dataclass(frozen=True)
class Area:
    address: int
    num_bytes: int


def random_bytes(count: int) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


def slots(num_runs: int, run_bytes: int, gap: int, shift: int, seed: int) -> tuple[Offsets, int]:
    """Runs in a random order, `gap` bytes apart, the lowest at `shift`; and the bytes of an area for them."""
    order = np.random.default_rng(seed).permutation(num_runs).astype(np.int64)
    return order * (run_bytes + gap) + shift, num_runs * (run_bytes + gap) + shift


@given(
    num_runs=st.integers(0, 20),
    run_bytes=st.one_of(st.integers(0, 300), st.integers(4000, 70_000)),
    gaps=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    shifts=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    keep_in_cache=st.booleans(),
)
def test_each_run_arrives_and_nothing_else_changes(
    num_runs: int,
    run_bytes: int,
    gaps: tuple[int, int],
    shifts: tuple[int, int],
    keep_in_cache: bool,
) -> None:
    source_offset_N, source_bytes = slots(num_runs, run_bytes, gaps[0], shifts[0], 1)
    destination_offset_N, destination_bytes = slots(num_runs, run_bytes, gaps[1], shifts[1], 2)
    source = random_bytes(source_bytes)
    got = random_bytes(destination_bytes)
    expected = got.clone()
    runs = (source_offset_N, destination_offset_N, run_bytes)
    copy_runs(source, got, *runs, keep_in_cache=keep_in_cache)
    copy_runs_reference(source, expected, *runs)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("run_bytes", [2**19 + 1, 2**20, 2**21 + 63])
def test_large_runs_arrive(run_bytes: int) -> None:
    source_offset_N, source_bytes = slots(3, run_bytes, 5, 3, 1)
    destination_offset_N, destination_bytes = slots(3, run_bytes, 0, 1, 2)
    source, got = random_bytes(source_bytes), torch.zeros(destination_bytes, dtype=torch.uint8)
    expected = got.clone()
    copy_runs(source, got, source_offset_N, destination_offset_N, run_bytes)
    copy_runs_reference(source, expected, source_offset_N, destination_offset_N, run_bytes)
    assert torch.equal(got, expected)


def test_tensors_of_any_type_are_taken_by_their_bytes() -> None:
    source = torch.randn(4, 3, 5)
    got = torch.zeros(4, 3, 5, dtype=torch.bfloat16)
    copy_runs(source, got, np.array([60, 0]), np.array([0, 90]), 30)
    expected_bytes, source_bytes = got.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8)
    assert torch.equal(expected_bytes[:30], source_bytes[60:90])
    assert torch.equal(expected_bytes[90:], source_bytes[:30])
    assert not expected_bytes[30:90].any()


@pytest.mark.parametrize("has_compiler", [True, False])
def test_mapped_memory_is_taken_by_its_address(has_compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_compiler:
        monkeypatch.setattr(native, "library", lambda: None)
    mapped = mmap.mmap(-1, 3 * 4096)
    area = Area(np.frombuffer(mapped, dtype=np.uint8).ctypes.data, len(mapped))
    content = random_bytes(8192)
    offsets = np.array([0, 4096]), np.array([4097, 1])
    copy_runs(content, area, offsets[0], offsets[1], 4096)
    back = torch.zeros(8192, dtype=torch.uint8)
    copy_runs(area, back, offsets[1], offsets[0], 4096)
    assert torch.equal(back, content)
    assert mapped[0] == 0 and mapped[1:4097] == content[4096:].numpy().tobytes()


@pytest.mark.parametrize(
    ("source_offsets", "destination_offsets", "run_bytes", "complaint"),
    [
        ([0, 61], [0, 8], 4, "source runs of 4 bytes at 0 to 61 are not within 64"),
        ([0, -1], [0, 8], 4, "source runs of 4 bytes at -1"),
        ([0, 8], [0, 30], 4, "destination runs of 4 bytes at 0 to 30 are not within 32"),
        ([0, 8], [-8, 0], 4, "destination runs of 4 bytes at -8"),
        ([0, 8], [0, 2**62], 4, "destination"),
        ([0], [0, 4], 4, "two offsets, got 1 and 2"),
        ([0], [0], -1, "at least 0 bytes"),
    ],
)
def test_runs_outside_their_area_are_refused_before_anything_is_written(
    source_offsets: list[int], destination_offsets: list[int], run_bytes: int, complaint: str
) -> None:
    source, destination = random_bytes(64), torch.zeros(32, dtype=torch.uint8)
    offsets = np.array(source_offsets, dtype=np.int64), np.array(destination_offsets, dtype=np.int64)
    with pytest.raises(ValueError, match=complaint):
        copy_runs(source, destination, *offsets, run_bytes)
    assert not destination.any()


def test_other_memory_and_offsets_are_refused() -> None:
    source, offsets = random_bytes(64), np.array([0, 8])
    with pytest.raises(ValueError, match="contiguous CPU tensors"):
        copy_runs(source.view(8, 8).T, source, offsets, offsets, 4)
    with pytest.raises(ValueError, match="contiguous int64"):
        copy_runs(source, source.clone(), offsets.astype(np.int32), offsets, 4)
    with pytest.raises(ValueError, match="contiguous int64"):
        copy_runs(source, source.clone(), offsets, np.array([0, 1, 8, 1])[::2], 4)


def test_several_callers_copy_at_once() -> None:
    source = random_bytes(2**22)
    offsets = np.arange(4, dtype=np.int64) * 2**20
    wrong: list[Tensor] = []

    def copy() -> None:
        for _ in range(10):
            got = torch.zeros_like(source)
            copy_runs(source, got, offsets, offsets, 2**20)
            if not torch.equal(got, source):
                wrong.append(got)

    callers = [threading.Thread(target=copy) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
