"""A mixture of experts on the CPU. Shapes: T tokens, X experts, E hidden, F width of an expert."""

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.experts import (
    ExpertsArguments,
    ExpertWeights,
    LinearHeads,
    Mixture,
    Routing,
    experts_reference,
    route_reference,
)
from baton.kernels.gated import SILU, Activation, clamped_swiglu
from baton.kernels.linear import LinearWeight, pack_linear, pack_quantised
from baton.kernels.quantised import Method, quantise
from tests.kernels.cases import mixture_of_rank
from tests.kernels.outcomes import normal

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-6}
NUM_EXPERTS, HIDDEN, WIDTH = 7, 40, 40


def mixture(
    dtype: torch.dtype,
    pack: Any = pack_linear,
    *,
    num_parts: int = 2,
    has_bias: bool = False,
    num_experts: int = NUM_EXPERTS,
    activation: Activation = SILU,
    **routing: Any,
) -> Mixture:
    """Random experts; `pack` makes the weight of one projection of one expert."""

    def weights(num_outputs: int, inputs: list[Tensor], bias: bool) -> ExpertWeights:
        bias_XN = normal(num_experts, num_outputs, dtype=torch.float32, device=CPU) if bias else None
        return ExpertWeights(tuple(map(pack, inputs)), bias_XN)

    scale = HIDDEN**-0.5
    gate_up = [_gate_up(dtype, expert) for expert in range(num_experts)]
    down = [scale * normal(HIDDEN + i, WIDTH, dtype=dtype, device=CPU)[i:] for i in range(num_experts)]
    parts = zip(*(each.chunk(num_parts, dim=1) for each in down), strict=True)
    return Mixture(
        weights(2 * WIDTH, gate_up, has_bias),
        [weights(HIDDEN, list(part), has_bias and not index) for index, part in enumerate(parts)],
        Routing(**{"top_k": 3, "normalises": True, **routing}),
        activation=activation,
        out_dtype=dtype,
    )


def inputs(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x, and logits of the experts and of a shared one; the first tokens all want expert 2."""
    logits = normal(num_tokens, NUM_EXPERTS + 1, dtype=torch.float32, device=CPU)
    logits[: num_tokens // 2, 2] += 10
    return normal(num_tokens, HIDDEN, dtype=dtype, device=CPU), logits


OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_parts": 1, "normalises": False},
    {"has_bias": True, "activation": clamped_swiglu(1.7, 1.0)},
    {"top_k": NUM_EXPERTS},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_native_kernel_agrees_with_the_reference(dtype: torch.dtype, options: dict[str, Any]) -> None:
    for num_tokens in (0, 1, 5, 300, 1100):
        made, (x, logits) = mixture(dtype, **options), inputs(num_tokens, dtype)
        tolerance = TOLERANCES[dtype]
        for shared in (None, normal(num_tokens, HIDDEN, dtype=dtype, device=CPU)):
            expected = experts_reference(x, logits, made, shared)
            torch.testing.assert_close(made(x, logits, shared), expected, atol=tolerance, rtol=tolerance)


BIAS = torch.tensor([0.0, 0.3, -0.2, 0.1, 0.5, 0.0, -0.4, 0.2])
ROUTINGS: list[dict[str, Any]] = [
    {"num_groups": 4, "num_chosen_groups": 2, "normalises": False, "scale": 3.0},
    {"num_groups": 8, "num_chosen_groups": 3},
    {"uses_sigmoid": True, "normalises": False},
    {"uses_sigmoid": True, "bias_X": BIAS, "scale": 0.5},
    {"uses_sigmoid": True, "num_groups": 2, "num_chosen_groups": 1, "scale": 2.5, "bias_X": BIAS},
    {"uses_sigmoid": True, "num_groups": 4, "num_chosen_groups": 2, "bias_X": 2 * BIAS, "normalises": False},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_experts_of_groups_agree_with_the_reference_in_any_batch(
    dtype: torch.dtype, routing: dict[str, Any]
) -> None:
    made, tolerance = mixture(dtype, num_experts=8, **routing), TOLERANCES[dtype]
    x, logits = inputs(40, dtype)  # as many logits
    out = made(x, logits)
    torch.testing.assert_close(out, experts_reference(x, logits, made), atol=tolerance, rtol=tolerance)
    assert torch.equal(torch.cat([made(x[i : i + 1], logits[i : i + 1]) for i in range(40)]), out)


def test_token_goes_to_the_best_experts_of_the_best_groups() -> None:
    """By hand: the bias moves the choice and not the weights; two good experts beat one that is better."""
    scores = torch.tensor([[0.1, 0.9, 0.6, 0.6, 0.2, 0.3, 0.5, 0.4]])
    logits = torch.logit(scores)
    plain = Routing(top_k=2, normalises=False, uses_sigmoid=True, num_groups=4, num_chosen_groups=1)
    assert chosen(logits, plain) == {2: 0.6, 3: 0.6}
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.2, 0.3])
    assert chosen(logits, replace(plain, bias_X=bias)) == {6: 0.5, 7: 0.4}
    assert chosen(logits, replace(plain, bias_X=bias, normalises=True, scale=9.0)) == {6: 5.0, 7: 4.0}
    assert chosen(logits, replace(plain, num_groups=1)) == {1: 0.9, 2: 0.6}
    shares = scores / scores.sum()
    by_best = Routing(top_k=2, normalises=False, num_groups=4, num_chosen_groups=1, scale=float(scores.sum()))
    assert chosen(shares.log(), by_best) == {1: 0.9, 0: 0.1}


def chosen(logits: Tensor, routing: Routing) -> dict[int, float]:
    weights, experts = route_reference(logits, routing)
    return dict(zip(experts[0].tolist(), (round(w, 5) for w in weights[0].tolist()), strict=True))


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float16), ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 300])
def test_each_head_is_multiplied_by_its_own_weight(dtype: torch.dtype, num_tokens: int) -> None:
    num_heads, num_inputs, num_outputs = 5, 24, 18
    weight = normal(num_heads, num_outputs, num_inputs, dtype=dtype, device=CPU)
    wide = normal(num_tokens, num_heads, num_inputs + 6, dtype=dtype, device=CPU)
    x = wide[..., :num_inputs]
    heads = LinearHeads(ExpertWeights(tuple(map(pack_linear, weight)), None))
    out, expected = heads(x), torch.einsum("thk,hnk->thn", x.double(), weight.double())
    tolerance = 2**-7 if dtype is torch.float16 else TOLERANCES[dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    for token in range(0, num_tokens, 37):
        assert torch.equal(heads(x[token : token + 1])[0], out[token]) or dtype is torch.float16


@pytest.mark.parametrize("method", ["int8", "fp8", "int4"])
def test_quantised_experts_agree_with_the_reference(method: Method) -> None:
    def pack(weight: Tensor) -> LinearWeight:
        rounded = quantise(weight, method)
        assert rounded is not None
        return pack_quantised(rounded, weight.dtype)

    made, (x, logits) = mixture(torch.float32, pack, num_parts=1), inputs(9, torch.float32)
    torch.testing.assert_close(made(x, logits), experts_reference(x, logits, made), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    made, (x, logits) = mixture(dtype), inputs(1100, dtype)
    shared = normal(1100, HIDDEN, dtype=dtype, device=CPU)
    whole = made(x, logits, shared)
    for first, stop in ((0, 1), (3, 5), (100, 500), (1020, 1030), (1099, 1100)):
        part = made(x[first:stop].contiguous(), logits[first:stop].contiguous(), shared[first:stop])
        assert torch.equal(part, whole[first:stop])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_equal_the_sum_of_two_ranks(dtype: torch.dtype) -> None:
    made, (x, logits) = mixture(dtype), inputs(20, dtype)
    sums = []
    for rank in range(2):
        halves = [pack_linear(_gate_up(dtype, expert)[_half(rank)]) for expert in range(NUM_EXPERTS)]
        gate_up = ExpertWeights(tuple(halves), None)
        alone = Mixture(gate_up, [made.down[rank]], made.routing, activation=SILU, out_dtype=torch.float32)
        sums.append(alone(x, logits, None if rank else x))
    assert torch.equal((sums[0] + sums[1]).to(dtype), made(x, logits, x))


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float16), ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_two_ranks_with_whole_experts_add_the_numbers_of_one(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    made, (x, logits) = mixture(dtype, **options), inputs(1100, dtype)
    ranks = [mixture_of_rank(made, 0, 4), mixture_of_rank(made, 4, 7)]  # half of seven experts: four
    for shared in (None, normal(1100, HIDDEN, dtype=dtype, device=CPU)):
        sums = [rank(x, logits, None if index else shared) for index, rank in enumerate(ranks)]
        together = (sums[0] + sums[1]).sum(0).to(dtype)
        assert sums[0].shape == (len(made.down), 1100, HIDDEN)
        assert torch.equal(together, made(x, logits, shared))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rank_agrees_with_the_reference_also_without_rows(dtype: torch.dtype) -> None:
    made, (x, logits) = mixture(dtype, has_bias=True), inputs(5, dtype)
    rank, tolerance = mixture_of_rank(made, 4, 7), TOLERANCES[dtype]
    expected = experts_reference(x, logits, rank, x)
    torch.testing.assert_close(rank(x, logits, x), expected, atol=tolerance, rtol=tolerance)
    logits[:, :3] += 100  # each token goes to the other rank
    assert not rank(x, logits).any()


def _half(rank: int) -> list[int]:
    half = range(rank * WIDTH // 2, (rank + 1) * WIDTH // 2)
    return [*half, *(WIDTH + row for row in half)]


def _gate_up(dtype: torch.dtype, expert: int) -> Tensor:
    weight: Tensor = HIDDEN**-0.5 * normal(2 * WIDTH, HIDDEN + expert, dtype=dtype, device=CPU)
    return weight[:, expert:]


def test_of_equal_logits_the_first_expert_is_chosen() -> None:
    made, x = mixture(torch.float32, top_k=1), normal(2, HIDDEN, dtype=torch.float32, device=CPU)
    flat, first = torch.zeros(2, NUM_EXPERTS), torch.zeros(2, NUM_EXPERTS)
    first[:, 0] = 1
    assert torch.equal(made(x, flat), made(x, first))


def test_logits_that_are_nan_reach_no_other_token() -> None:
    made, (x, logits) = mixture(torch.float32), inputs(3, torch.float32)
    expected = made(x, logits)
    logits[1] = float("nan")
    out = made(x, logits)
    assert out[1].isnan().all() and torch.equal(out[::2], expected[::2])


def test_wrong_shapes_are_refused() -> None:
    made, (x, logits) = mixture(torch.float32), inputs(4, torch.float32)
    with pytest.raises(ValueError, match="must be contiguous"):
        made(x[::2], logits[::2])
    with pytest.raises(ValueError, match=r"x \[4, 40\], logits \[3, 8\]"):
        made(x, logits[:3])
    with pytest.raises(ValueError, match="8 logits a token are needed, got"):
        made(x, logits[:, :7].contiguous(), x)


def test_struct_is_as_long_here_as_in_c() -> None:
    arguments, sizes = ExpertsArguments(), torch.zeros(2, dtype=torch.int64)
    native.function("baton_experts_sizes", "pnp")(ctypes.addressof(arguments), 0, sizes.data_ptr())
    assert int(sizes[0]) == ctypes.sizeof(ExpertsArguments)


def test_weights_that_no_kernel_takes_run_in_plain_torch() -> None:
    made, (x, logits) = mixture(torch.float16), inputs(3, torch.float16)
    assert isinstance(made.gate_up.weights[0], LinearWeight) and not made.gate_up.weights[0].is_packed
    assert made(x, logits).dtype == torch.float16
