"""Dummy weights: every slice has the same values as the whole tensor, on every machine."""

import pytest
import torch
from torch import Tensor

from baton.engine.models.loading.dummy_weights import DummyCheckpoint
from baton.kernels.native import TORCH_DTYPES

EMBEDDING, BIAS, NORM = "model.embed_tokens.weight", "model.layers.0.q_proj.bias", "model.norm.weight"
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
SHAPES = {EMBEDDING: (5000, 64), BIAS: (64,), NORM: (64,), UP: (96, 64), DOWN: (64, 96)}


def dummy(seed: int = 0, dtype: str = "float32") -> DummyCheckpoint:
    return DummyCheckpoint(SHAPES, dtype=TORCH_DTYPES[dtype], deviation=0.1, seed=seed)


def whole(checkpoint: DummyCheckpoint, name: str) -> Tensor:
    return checkpoint.slice(name, 0, 0, checkpoint.shape(name)[0])


@pytest.mark.parametrize("name", SHAPES)
def test_dummy_slices_are_those_of_the_whole(name: str) -> None:
    tensor = whole(dummy(3), name)
    assert tuple(tensor.shape) == SHAPES[name] and tensor.count_nonzero()
    for dim, size in enumerate(tensor.shape):
        parts = [dummy(3).slice(name, dim, start, start + size // 2) for start in (0, size // 2)]
        assert torch.equal(torch.cat(parts, dim), tensor)


def test_dummy_weights_are_nearly_normal_and_norms_are_ones() -> None:
    weight = whole(dummy(), EMBEDDING) / 0.1
    assert weight.mean().item() == pytest.approx(0.0, abs=0.01)
    assert weight.std().item() == pytest.approx(1.0, abs=0.01)
    assert (weight.abs() < 1).float().mean().item() == pytest.approx(0.683, abs=0.02)
    assert torch.equal(whole(dummy(dtype="bfloat16"), NORM), torch.ones(64, dtype=torch.bfloat16))


def test_dummy_values_never_change() -> None:
    # A published benchmark or a saved answer depends on them.
    assert whole(dummy(), EMBEDDING)[0, :3].tolist() == pytest.approx(
        [0.011235, -0.1850162, -0.133773], abs=1e-6
    )
