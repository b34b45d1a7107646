"""Each rank's part of a layer: two ranks compute the same bits as one."""

from pathlib import Path

import numpy as np
import pytest
import torch

from baton.engine.models.adapters import Adapters, AdapterTensors
from baton.engine.models.layers import ColumnParallelLinear
from baton.engine.models.loading.checkpoint import Shape
from baton.engine.models.loading.dummy_weights import DummyCheckpoint
from baton.engine.models.loading.weights import Parameters
from baton.engine.models.parallel import TensorParallel
from baton.engine.runner.replica_rank import ReplicaRank
from baton.errors import ConfigError
from baton.kernels.linear import linear
from baton.kernels.quantised import WeightFormat
from tests.kernels.quantised_cases import random_matrix
from tests.tensor_parallel_peer import DTYPES, JOBS, Pair
from tests.tiny_models import dummy_parameters

dtypes = pytest.mark.parametrize("dtype", DTYPES)


@dtypes
@pytest.mark.parametrize("job", ["embedding", "head", "columns", "rows"])
def test_two_ranks_give_the_bits_of_one(pair: Pair, tiny_model: Path, job: str, dtype: str) -> None:
    together, alone = pair.run(job, tiny_model, dtype), JOBS[job](ReplicaRank(), tiny_model, dtype)
    assert together.dtype == alone.dtype and torch.equal(together, alone)


def test_heads_that_cannot_be_split_are_refused_by_name(tiny_model: Path) -> None:
    parameters = dummy_parameters(tiny_model, TensorParallel(0, 5)).scope("model.layers.0.self_attn")
    with pytest.raises(ConfigError, match=r"q_proj.weight: 64 cannot be split over 5"):
        ColumnParallelLinear(parameters, {"q_proj": 64}, 32)


@torch.inference_mode()
def test_adapter_changes_the_outputs_of_its_projection_behind_one_that_takes_none() -> None:
    cpu, dtype = torch.device("cpu"), torch.float32
    shapes: dict[str, Shape] = {"g_proj.weight": (7, 32), "q_proj.weight": (16, 32)}
    adapters = Adapters(cpu, {"q_proj": (16, 32)})
    checkpoint = DummyCheckpoint(shapes, dtype=dtype, deviation=0.2, seed=1)
    parameters = Parameters(checkpoint, TensorParallel(), dtype, cpu, adapters=adapters)
    layer = ColumnParallelLinear(parameters, {"g_proj": 7, "q_proj": 16}, 32)
    a, b, x = torch.randn(4, 32), torch.randn(16, 4), torch.randn(2, 32)
    adapters.put(0, AdapterTensors(rank=4, scale=1.0, pairs={"q_proj": (a, b)}))
    plain = layer(x)
    with adapters.step(np.zeros(2, np.int32), np.arange(2)):
        changed = layer(x)
    assert torch.equal(changed[:, :7], plain[:, :7])
    torch.testing.assert_close(changed[:, 7:], plain[:, 7:] + x @ a.T @ b.T)


def test_experts_in_different_formats_are_dequantised(tiny_model: Path) -> None:
    """A checkpoint may give zeros for some experts only."""
    parameters = dummy_parameters(tiny_model, TensorParallel(0, 1))
    formats = (WeightFormat.INT4, WeightFormat.INT4_ZEROS)
    matrices = [random_matrix(each, 5, 32, 16) for each in formats]
    packed = parameters.pack_experts(matrices).weights
    assert [weight.format for weight in packed] == 2 * [WeightFormat.PLAIN]
    x = torch.eye(32)
    for weight, matrix in zip(packed, matrices, strict=True):
        torch.testing.assert_close(linear(x, weight), matrix.dequantised().T)
