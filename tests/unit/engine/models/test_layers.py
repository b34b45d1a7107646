"""Each rank's part of a layer: two ranks compute the very bits of one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.models.layers import ColumnParallelLinear, Parameters, RowParallelLinear
from baton.engine.models.parallel import TensorParallel
from baton.engine.models.weights import TORCH_DTYPES, open_checkpoint
from baton.errors import ConfigError, ModelError
from tests.tensor_parallel_peer import DTYPES, JOBS, Pair, values
from tests.tiny_models import VOCAB_SIZE, dummy_parameters

dtypes = pytest.mark.parametrize("dtype", DTYPES)


@dtypes
@pytest.mark.parametrize("job", ["embedding", "head", "columns", "rows"])
def test_two_ranks_give_the_bits_of_one(pair: Pair, tiny_model: Path, job: str, dtype: str) -> None:
    together, alone = pair.run(job, tiny_model, dtype), JOBS[job](TensorParallel(), tiny_model, dtype)
    assert together.dtype == alone.dtype and torch.equal(together, alone)


@dtypes
def test_projections_of_one_input_lie_side_by_side(tiny_model: Path, dtype: str) -> None:
    parameters, x = dummy_parameters(tiny_model, TensorParallel(), dtype), values(0, 3, 32, dtype=dtype)
    names = tuple(f"model.layers.1.self_attn.{name}_proj" for name in "qkv")
    fused = ColumnParallelLinear(parameters, names)(x)
    apart = [ColumnParallelLinear(parameters, (name,))(x) for name in names]
    assert torch.equal(fused, torch.cat(apart, dim=1)) and fused.shape == (3, 64 + 32 + 32)


@dtypes
def test_a_row_parallel_layer_is_the_product(tiny_model: Path, dtype: str) -> None:
    parameters, x = dummy_parameters(tiny_model, TensorParallel(), dtype), values(0, 3, 48, dtype=dtype)
    name = "model.layers.1.mlp.down_proj"
    weight, bias = (parameters.checkpoint.tensor(f"{name}.{kind}").to(x.dtype) for kind in ("weight", "bias"))
    expected = x.double() @ weight.double().T + bias.double()
    out = RowParallelLinear(parameters, name)(x)
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=1e-5)


def test_the_ranks_rows_of_a_table_tile_it_and_end_in_zeros(tiny_model: Path) -> None:
    name = "lm_head.weight"
    whole = dummy_parameters(tiny_model, TensorParallel()).whole(name)
    for size in (1, 2, 3, 4, 64):
        parts = [dummy_parameters(tiny_model, TensorParallel(rank, size)).rows(name) for rank in range(size)]
        assert len({len(part) for part in parts}) == 1
        table = torch.cat(parts)
        assert torch.equal(table[:VOCAB_SIZE], whole) and not table[VOCAB_SIZE:].any()


def test_parameters_are_copies_in_the_dtype_of_the_model(tiny_model: Path) -> None:
    parameters = dummy_parameters(tiny_model, TensorParallel(), "bfloat16")
    weight = parameters.whole("model.norm.weight")
    assert weight.dtype == torch.bfloat16
    assert parameters.has("model.norm.weight") and not parameters.has("model.norm.bias")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(float("nan"), "float32"), (float("inf"), "float32"), (float("-inf"), "bfloat16"), (7e4, "float16")],
)
def test_a_tensor_that_is_not_finite_in_the_dtype_of_the_model_is_named(
    tmp_path: Path, value: float, dtype: str
) -> None:
    weight = torch.ones(4, 6)
    weight[3, 1] = value
    save_file({"w": weight}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    parameters = Parameters(checkpoint, TensorParallel(0, 2), TORCH_DTYPES[dtype], torch.device("cpu"))
    assert parameters.rows("w").shape == (2, 6)  # the other rank's part is the other rank's to refuse
    for read in (parameters.whole, lambda name: parameters.shard(name, 1)):
        with pytest.raises(ModelError, match=f"tensor 'w' has a NaN or an infinity in torch.{dtype}"):
            read("w")


def test_heads_that_cannot_be_split_are_refused_by_name(tiny_model: Path) -> None:
    parameters = dummy_parameters(tiny_model, TensorParallel(0, 5))
    with pytest.raises(ConfigError, match=r"q_proj.weight: 64 cannot be split over 5"):
        ColumnParallelLinear(parameters, ("model.layers.0.self_attn.q_proj",))
