"""The thread pool of the C kernels: every part of a loop runs once, with any number of callers."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.linear import LinearWeight, linear, pack_linear

NUM_CALLS = 300


@pytest.fixture(params=[1, 2, 5])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = native.num_threads()
    count: int = request.param
    native.set_num_threads(count)
    yield count
    native.set_num_threads(before)


def case(seed: int) -> tuple[Tensor, LinearWeight, Tensor]:
    """Whole numbers have exact sums, so a part that is left out or run twice changes the result."""
    generator = torch.Generator().manual_seed(seed)
    x_TK = torch.randint(-4, 5, (37, 128), generator=generator).float()
    weight_NK = torch.randint(-4, 5, (1000, 128), generator=generator).float()
    return x_TK, pack_linear(weight_NK), x_TK @ weight_NK.T


def test_every_part_runs_once(num_threads: int) -> None:
    assert native.num_threads() == num_threads
    for seed in range(20):
        x_TK, weight, expected = case(seed)
        assert torch.equal(linear(x_TK, weight), expected)


def test_callers_in_several_threads_do_not_disturb_each_other(num_threads: int) -> None:
    wrong: list[int] = []

    def call(seed: int) -> None:
        x_TK, weight, expected = case(seed)
        wrong.extend(1 for _ in range(NUM_CALLS) if not torch.equal(linear(x_TK, weight), expected))

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
