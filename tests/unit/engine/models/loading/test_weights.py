"""Parameters of one rank, dummy weights, and progress reports."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from baton.engine.models.loading.checkpoint import SafetensorsCheckpoint
from baton.engine.models.loading.dummy_weights import DummyCheckpoint
from baton.engine.models.loading.weights import Parameters
from baton.engine.models.parallel import TensorParallel
from baton.errors import ModelError
from baton.kernels.native import TORCH_DTYPES

CPU = torch.device("cpu")
EMBEDDING, BIAS, NORM = "model.embed_tokens.weight", "model.layers.0.q_proj.bias", "model.norm.weight"
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
SHAPES = {EMBEDDING: (5000, 64), BIAS: (64,), NORM: (64,), UP: (96, 64), DOWN: (64, 96)}


def dummy(seed: int = 0, dtype: str = "float32") -> DummyCheckpoint:
    return DummyCheckpoint(SHAPES, dtype=TORCH_DTYPES[dtype], deviation=0.1, seed=seed)


def whole(checkpoint: DummyCheckpoint, name: str) -> Tensor:
    return checkpoint.slice(name, 0, 0, checkpoint.shape(name)[0])


def parameters(rank: int = 0, size: int = 1, dtype: str = "float32") -> Parameters:
    return Parameters(dummy(dtype=dtype), TensorParallel(rank, size), TORCH_DTYPES[dtype], CPU)


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


def test_rows_of_all_ranks_tile_a_table_and_end_in_zeros() -> None:
    table = parameters().whole(EMBEDDING, (5000, 64))
    for size in (1, 2, 3, 4, 64):
        parts = [parameters(rank, size).rows(EMBEDDING, (5000, 64)) for rank in range(size)]
        assert len({len(part) for part in parts}) == 1
        tiled = torch.cat(parts)
        assert torch.equal(tiled[:5000], table) and not tiled[5000:].any()


def test_scope_prefixes_names_and_keeps_the_dtype() -> None:
    scoped = parameters(dtype="bfloat16").scope("model").scope("layers.0.mlp")
    assert torch.equal(scoped.whole("up_proj.weight", (96, 64)), whole(dummy(dtype="bfloat16"), UP))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(float("nan"), "float32"), (float("inf"), "float32"), (float("-inf"), "bfloat16"), (7e4, "float16")],
)
def test_tensor_that_is_not_finite_in_the_models_dtype_is_named(
    tmp_path: Path, value: float, dtype: str
) -> None:
    weight = torch.ones(4, 6)
    weight[3, 1] = value
    save_file({"w": weight}, tmp_path / "model.safetensors")
    rank_0 = Parameters(SafetensorsCheckpoint(tmp_path), TensorParallel(0, 2), TORCH_DTYPES[dtype], CPU)
    assert rank_0.rows("w", (4, 6)).shape == (2, 6)  # the bad value is in the other rank's part
    with pytest.raises(ModelError, match=f"tensor 'w' has a NaN or an infinity in torch.{dtype}"):
        rank_0.whole("w", (4, 6))
    with pytest.raises(ModelError, match=f"tensor 'w' has a NaN or an infinity in torch.{dtype}"):
        rank_0.shard("w", (4, 6), 1)
