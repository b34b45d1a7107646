"""The low-rank updates of rows with several adapters, against plain multiplications in fp64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.kernels.lora import NO_ADAPTER, AdapterRows, LowRankWeights
from baton.kernels.native import HugeArena
from tests.fake_cuda import DEVICE, FakeCuda

NUM_INPUTS, NUM_OUTPUTS = 70, 83  # no multiple of a vector or a panel
RANKS = {0: 1, 1: 6, 3: 16}  # slot 2 has no weights for this projection
SLOTS = np.array([0, 1, NO_ADAPTER, 3, 1, 2, 3], np.int32)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def made(dtype: torch.dtype, device: torch.device) -> tuple[LowRankWeights, dict[int, Tensor], Tensor]:
    """Return the weights, B @ A of each slot in fp64, and inputs."""
    random = torch.Generator().manual_seed(0)
    weights = LowRankWeights(NUM_OUTPUTS, NUM_INPUTS, dtype, device)
    products = {}
    for slot, rank in RANKS.items():
        a_RK, b_NR = (
            torch.randn(shape, generator=random) for shape in ((rank, NUM_INPUTS), (NUM_OUTPUTS, rank))
        )
        weights.put(slot, a_RK.to(device), b_NR.to(device), HugeArena())
        products[slot] = b_NR.double() @ a_RK.double()
    x_TK = torch.randn((len(SLOTS), NUM_INPUTS), generator=random).to(dtype)
    return weights, products, x_TK.to(device)


def update(weights: LowRankWeights, x_TK: Tensor, slots_T: np.ndarray, num_splits: int = 1) -> Tensor:
    """Return ones with the updates added, in columns that are a part of wider rows."""
    rows = AdapterRows(slots_T, max(RANKS.values()), x_TK.device)
    y_TN = torch.ones((len(x_TK), NUM_OUTPUTS + 9), device=x_TK.device)
    hidden_TR = weights.shrink(x_TK, rows, num_splits=num_splits)
    weights.expand(hidden_TR, rows, y_TN[:, 4 : 4 + NUM_OUTPUTS])
    assert bool((y_TN[:, :4] == 1).all()) and bool((y_TN[:, 4 + NUM_OUTPUTS :] == 1).all())
    return y_TN[:, 4 : 4 + NUM_OUTPUTS]


def test_rows_of_adapters_go_to_a_gpu_without_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    with cuda:
        groups = AdapterRows(SLOTS, max(RANKS.values()), DEVICE).groups
    assert [call.name for call in cuda.calls if "load" in call.name] == ["upload"] * 4
    assert {slot: row_I.tolist() for slot, row_I in groups} == {0: [0], 1: [1, 4], 2: [5], 3: [3, 6]}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)  # float16 has no C kernel
@pytest.mark.parametrize("num_splits", [1, 2])
def test_rows_get_the_updates_of_their_adapters(dtype: torch.dtype, device: str, num_splits: int) -> None:
    weights, products, x_TK = made(dtype, torch.device(device))
    got_TN = update(weights, x_TK, SLOTS, num_splits)
    for slot, x_K, got_N in zip(SLOTS.tolist(), x_TK.cpu().double(), got_TN.cpu().double(), strict=True):
        expected_N = products[slot] @ x_K if slot in products else torch.zeros(NUM_OUTPUTS).double()
        scale = max(1.0, float(expected_N.abs().max()))
        assert float((got_N - 1 - expected_N).abs().max()) < TOLERANCE[dtype] * scale, slot
    weights.remove(1)
    assert bool((update(weights, x_TK, SLOTS)[SLOTS == 1] == 1).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_row_has_the_same_bits_alone(dtype: torch.dtype, device: str) -> None:
    weights, _, x_TK = made(dtype, torch.device(device))
    together_TN = update(weights, x_TK, SLOTS)
    for row in range(len(SLOTS)):
        alone_TN = update(weights, x_TK[row : row + 1], SLOTS[row : row + 1].copy())
        assert torch.equal(alone_TN[0], together_TN[row])
