"""Adapters in a layer: the outputs that they change."""

import numpy as np
import torch

from baton.engine.models.adapters import Adapters, AdapterTensors
from baton.engine.models.layers import ColumnParallelLinear
from baton.engine.models.loading.checkpoint import Shape
from baton.engine.models.loading.dummy_weights import DummyCheckpoint
from baton.engine.models.loading.weights import Parameters
from baton.engine.models.parallel import TensorParallel


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
