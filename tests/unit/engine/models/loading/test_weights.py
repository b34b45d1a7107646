"""Parameters of one rank."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.models.loading.checkpoint import SafetensorsCheckpoint, Shape
from baton.engine.models.loading.dummy_weights import DummyCheckpoint
from baton.engine.models.loading.weights import Parameters
from baton.engine.models.parallel import TensorParallel
from baton.errors import ModelError
from baton.kernels.native import TORCH_DTYPES

CPU = torch.device("cpu")
EMBEDDING, UP = "embed_tokens.weight", "layers.0.mlp.up_proj.weight"
SHAPES: dict[str, Shape] = {EMBEDDING: (5000, 64), UP: (96, 64)}


def parameters(rank: int = 0, size: int = 1, dtype: str = "float32") -> Parameters:
    checkpoint = DummyCheckpoint(SHAPES, dtype=TORCH_DTYPES[dtype], deviation=0.1, seed=0)
    return Parameters(checkpoint, TensorParallel(rank, size), TORCH_DTYPES[dtype], CPU)


def test_rows_of_all_ranks_tile_a_table_and_end_in_zeros() -> None:
    table = parameters().whole(EMBEDDING, (5000, 64))
    for size in (1, 2, 3, 4, 64):
        parts = [parameters(rank, size).rows(EMBEDDING, (5000, 64)) for rank in range(size)]
        assert len({len(part) for part in parts}) == 1
        tiled = torch.cat(parts)
        assert torch.equal(tiled[:5000], table) and not tiled[5000:].any()


def test_scope_prefixes_names_and_keeps_the_dtype() -> None:
    found = parameters(dtype="bfloat16")
    scoped = found.scope("layers.0").scope("mlp")
    expected = found.whole(UP, (96, 64))
    assert expected.dtype == torch.bfloat16
    assert torch.equal(scoped.whole("up_proj.weight", (96, 64)), expected)


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
