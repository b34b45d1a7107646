"""Each rank's part of a layer: two ranks compute the same bits as one."""

from pathlib import Path

import pytest
import torch

from baton.engine.models.decoder import ColumnParallelLinear, RowParallelLinear
from baton.engine.models.parallel import TensorParallel
from baton.errors import ConfigError
from tests.tensor_parallel_peer import DTYPES, JOBS, Pair, values
from tests.tiny_models import dummy_parameters

dtypes = pytest.mark.parametrize("dtype", DTYPES)


@dtypes
@pytest.mark.parametrize("job", ["embedding", "head", "columns", "rows"])
def test_two_ranks_give_the_bits_of_one(pair: Pair, tiny_model: Path, job: str, dtype: str) -> None:
    together, alone = pair.run(job, tiny_model, dtype), JOBS[job](TensorParallel(), tiny_model, dtype)
    assert together.dtype == alone.dtype and torch.equal(together, alone)


@dtypes
def test_projections_of_one_input_lie_side_by_side(tiny_model: Path, dtype: str) -> None:
    parameters = dummy_parameters(tiny_model, TensorParallel(), dtype).scope("model.layers.1.self_attn")
    x, sizes = values(0, 3, 32, dtype=dtype), {"q_proj": 64, "k_proj": 32, "v_proj": 32}
    fused = ColumnParallelLinear(parameters, sizes, 32, bias=True)(x)
    apart = [ColumnParallelLinear(parameters, {name: n}, 32, bias=True)(x) for name, n in sizes.items()]
    assert torch.equal(fused, torch.cat(apart, dim=1)) and fused.shape == (3, 64 + 32 + 32)


@dtypes
def test_row_parallel_layer_is_the_product(tiny_model: Path, dtype: str) -> None:
    parameters = dummy_parameters(tiny_model, TensorParallel(), dtype).scope("model.layers.1.mlp")
    x = values(0, 3, 48, dtype=dtype)
    weight, bias = parameters.whole("down_proj.weight", (32, 48)), parameters.whole("down_proj.bias", (32,))
    expected = x.double() @ weight.double().T + bias.double()
    out = RowParallelLinear(parameters, "down_proj", 32, 48, bias=True)(x)
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=1e-5)


def test_heads_that_cannot_be_split_are_refused_by_name(tiny_model: Path) -> None:
    parameters = dummy_parameters(tiny_model, TensorParallel(0, 5)).scope("model.layers.0.self_attn")
    with pytest.raises(ConfigError, match=r"q_proj.weight: 64 cannot be split over 5"):
        ColumnParallelLinear(parameters, {"q_proj": 64}, 32)
