"""Small awkward inputs on which a Triton kernel must agree with its plain reference.

`interpreted/` runs them on the CPU under Triton's interpreter, `cuda/` on a GPU; neither knows more than
`CASES` and `check`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from baton.kernels.experts import (
    ExpertWeights,
    LinearHeads,
    Mixture,
    Routing,
    experts_reference,
    experts_triton,
    route_reference,
    route_triton,
)
from baton.kernels.gated import GELU_TANH, SILU, Activation, clamped_swiglu, gated_reference, gated_triton
from baton.kernels.kv_rows import SCALE_BYTES, decode_rows, encode_rows
from baton.kernels.linear import LinearWeight
from baton.kernels.pages import (
    copy_pages_reference,
    copy_pages_triton,
    decode_pages_triton,
    encode_pages_triton,
)
from baton.kernels.rms_norm import (
    rms_norm_reference,
    rms_norm_triton,
)
from baton.kernels.store_kv import rope_and_store_triton, rope_reference, store_kv_reference
from tests.kernels.attention_cases import attention_cases
from tests.kernels.outcomes import DTYPES, Outcome, normal, short
from tests.kernels.quantised_cases import quantised_cases
from tests.kernels.sampling_cases import sampling_cases

# Rounding to bf16 truncates under the interpreter, hence two units in the last place.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[[torch.device], Outcome]


def check(case: Case, device: torch.device) -> None:
    outcome = case.run(device)
    assert outcome.kernel.shape == outcome.reference.shape
    assert outcome.kernel.dtype == outcome.reference.dtype
    tolerance = 0 if outcome.exact else TOLERANCES[outcome.kernel.dtype]
    torch.testing.assert_close(
        outcome.kernel, outcome.reference, rtol=tolerance, atol=tolerance, equal_nan=True
    )


def rms_norm_outcome(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Outcome:
    wide = normal(*shape[:-1], shape[-1] + 5, dtype=dtype, device=device)
    x, weight = wide[..., : shape[-1]], normal(shape[-1], dtype=dtype, device=device)
    return Outcome(rms_norm_triton(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


def add_rms_norm_outcome(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Outcome:
    x, weight = normal(*shape, dtype=dtype, device=device), normal(shape[-1], dtype=dtype, device=device)
    residual = normal(*shape, dtype=dtype, device=device)
    updated = residual.clone()
    kernel = rms_norm_triton(x, weight, 1e-5, updated)
    reference = rms_norm_reference(x, weight, 1e-5, residual)
    return Outcome(torch.stack((kernel, updated)), torch.stack((reference, residual)))


def gated_outcome(
    shape: tuple[int, int], activation: Activation, dtype: torch.dtype, device: torch.device
) -> Outcome:
    gate_up = normal(shape[0], shape[1] + 3, dtype=dtype, device=device)[:, : shape[1]]
    return Outcome(gated_triton(gate_up, activation), gated_reference(gate_up, activation))


def random_mixture(
    num_experts: int, dtype: torch.dtype, device: torch.device, *, is_biased: bool = False
) -> Mixture:
    """Experts of 24 inputs, 18 inner values and 24 outputs; `down` in two parts. Two of them for a token."""

    def weights(num_outputs: int, num_inputs: int, bias: bool) -> ExpertWeights:
        shape = (num_experts, num_outputs, num_inputs)
        bias_XN = normal(*shape[:2], dtype=torch.float32, device=device) if bias else None
        stacked = 0.2 * normal(*shape, dtype=dtype, device=device)
        return ExpertWeights((), bias_XN, LinearWeight(stacked, *shape[1:], dtype, is_packed=False))

    return Mixture(
        weights(36, 24, is_biased),
        [weights(24, 9, is_biased and not part) for part in range(2)],
        Routing(top_k=2, normalises=not is_biased),
        activation=clamped_swiglu(1.7, 1.0) if is_biased else SILU,
        out_dtype=dtype,
    )


def mixture_of_rank(made: Mixture, first: int, stop: int) -> Mixture:
    """The mixture of a rank that has the experts [first, stop) of `made`, and leaves parts to the caller."""

    def share(weights: ExpertWeights) -> ExpertWeights:
        bias_XN = None if weights.bias_XN is None else weights.bias_XN[first:stop].contiguous()
        stacked = weights.stacked
        if stacked is not None:
            assert stacked.vectors is None, "a plain weight"
            stacked = replace(stacked, data=stacked.data[first:stop].contiguous())
        return ExpertWeights(weights.weights[first:stop], bias_XN, stacked)

    return Mixture(
        share(made.gate_up),
        [share(down) for down in made.down],
        made.routing,
        activation=made.activation,
        out_dtype=torch.float32,
        num_experts=made.num_experts,
        first_expert=first,
        keeps_splits=True,
    )


def experts_outcome(
    num_tokens: int, is_biased: bool, of_rank: bool, dtype: torch.dtype, device: torch.device
) -> Outcome:
    mixture = random_mixture(5, dtype, device, is_biased=is_biased)
    if of_rank:
        mixture = mixture_of_rank(mixture, 3, 5)
    x, shared = (normal(num_tokens, 24 + i, dtype=dtype, device=device)[:, i:] for i in range(2))
    logits = normal(num_tokens, 6, dtype=torch.float32, device=device)
    arguments = (x, logits, mixture, None if is_biased else shared.contiguous())
    return Outcome(experts_triton(*arguments).to(dtype), experts_reference(*arguments).to(dtype))


def heads_outcome(num_tokens: int, dtype: torch.dtype, device: torch.device) -> Outcome:
    """Products of four heads with weights of their own; other inputs lie between those of two heads."""
    weight = 0.2 * normal(4, 18, 24, dtype=dtype, device=device)
    stacked = LinearWeight(weight, 18, 24, dtype, is_packed=False)
    x = normal(num_tokens, 4, 30, dtype=dtype, device=device)[..., :24]
    reference = torch.einsum("thk,hnk->thn", x.float(), weight.float()).to(dtype)
    return Outcome(LinearHeads(ExpertWeights((), None, stacked))(x), reference)


def route_outcome(routing: Routing, num_experts: int, dtype: torch.dtype, device: torch.device) -> Outcome:
    """The weight of each expert for each token, 0 of those that are not chosen."""
    bias = None if routing.bias_X is None else routing.bias_X.to(device)
    logits = normal(50, num_experts, dtype=dtype, device=device)
    dense = []
    for route in (route_triton, route_reference):
        weights, chosen = route(logits, replace(routing, bias_X=bias))
        dense.append(torch.zeros_like(logits).scatter(1, chosen, weights))
    return Outcome(kernel=dense[0], reference=dense[1])


def rope_and_store_outcome(
    slots: tuple[int, ...],
    page_size: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Outcome:
    """Rotated queries, and the pages with the rotated keys and the values; other heads lie between them."""
    num_heads, num_kv_heads, head_dim = shape
    qkv = normal(len(slots), num_heads + 3 * num_kv_heads, head_dim, dtype=dtype, device=device)
    table = normal(11, head_dim, dtype=torch.float32, device=device)
    positions = torch.tensor([0, 10, 3, 3, 7][: len(slots)], dtype=torch.int64, device=device)
    slots_T = torch.tensor(slots, dtype=torch.int64, device=device)
    pool = normal(5, 3, 2, num_kv_heads, page_size, head_dim, dtype=dtype, device=device)
    results = []
    for run in (rope_and_store_triton, _rope_and_store_reference):
        heads, pages = qkv.clone(), pool.clone()
        query, key = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
        run(query, key, heads[:, -num_kv_heads:], table, positions, pages[:, 1], slots_T)
        results.append(torch.cat((query.flatten(), pages.flatten())))
    return Outcome(kernel=results[0], reference=results[1])


def coded_pages_outcome(
    num_rows: int, head_dim: int, codes: torch.dtype, dtype: torch.dtype, device: torch.device
) -> Outcome:
    """The codes of pages' rows; some rows are zeros, large or small."""
    pages = normal(5, num_rows, head_dim, dtype=dtype, device=device)
    pages[0, 0], pages[3, -1], pages[1] = 0.0, pages[3, -1] * 1e3, pages[1] * 1e-3
    pages[0, -1] *= 1e-36  # bf16 has few bits for a scale of such rows
    ids = torch.tensor([3, 0, 1], dtype=torch.int64, device=device)
    expected = encode_rows(pages[ids], codes)
    packed = torch.zeros_like(expected)
    encode_pages_triton(pages, ids, codes, packed)
    return Outcome(packed, expected, exact=True)


def decoded_pages_outcome(
    num_rows: int, head_dim: int, codes: torch.dtype, dtype: torch.dtype, device: torch.device
) -> Outcome:
    """Pages whose rows are written from codes, among others that stay."""
    rows = normal(3, num_rows, head_dim, dtype=torch.float32, device=device)
    packed = encode_rows(rows, codes)
    kernel = normal(5, num_rows, head_dim, dtype=dtype, device=device)
    reference, ids = kernel.clone(), torch.tensor([3, 0, 1], dtype=torch.int64, device=device)
    reference[ids] = decode_rows(packed.view(codes), dtype)
    decode_pages_triton(kernel, ids, codes, packed)
    return Outcome(kernel, reference, exact=dtype is torch.float32 or device.type == "cuda")


def rows_of_codes_outcome(
    slots: tuple[int, ...],
    page_size: int,
    shape: tuple[int, int, int],
    codes: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> Outcome:
    """The bytes of pages of codes. Nothing is rotated: so no rounding differs before rows are encoded."""
    num_heads, num_kv_heads, head_dim = shape
    qkv = normal(len(slots), num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device)
    query, key, value = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    key[0, 0] *= 300
    value[0, 0] = 0
    key[1, 0, 1], value[1, 0, -1] = float("nan"), float("inf")
    table = torch.cat((torch.ones(3, head_dim // 2), torch.zeros(3, head_dim // 2)), dim=1).to(device)
    positions = torch.tensor([0, 2, 1, 1, 2][: len(slots)], dtype=torch.int64, device=device)
    slots_T = torch.tensor(slots, dtype=torch.int64, device=device)
    results = []
    for run in (rope_and_store_triton, _rope_and_store_reference):
        layers = (5, 3, 2, num_kv_heads, page_size, head_dim + SCALE_BYTES)
        pages = torch.zeros(layers, dtype=torch.uint8, device=device)
        run(query, key, value, table, positions, pages.view(codes)[:, 1], slots_T)
        scales = pages[..., -SCALE_BYTES:]
        is_nan = scales.contiguous().view(torch.bfloat16).isnan()
        scales.copy_(torch.where(is_nan, 255, scales))  # a NaN has many codes
        results.append(pages)
    return Outcome(kernel=results[0], reference=results[1], exact=True)


def _rope_and_store_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    positions: Tensor,
    pages: Tensor,
    slots: Tensor,
) -> None:
    rope_reference(query, key, table, positions)
    store_kv_reference(key, value, pages, slots)


def pages_outcome(
    page_ids: tuple[int, ...], page_elements: int, dtype: torch.dtype, device: torch.device
) -> Outcome:
    """Gather from one layer of a pool, scatter into another."""
    pool = torch.arange(5 * 3 * page_elements, device=device).view(5, 3, page_elements).to(dtype)
    ids = torch.tensor(page_ids, dtype=torch.int64, device=device)
    reference_pool = pool.clone()
    kernel, reference = (torch.zeros(len(page_ids), page_elements, dtype=dtype, device=device) for _ in "kr")
    for copy, pages, staging in (
        (copy_pages_triton, pool, kernel),
        (copy_pages_reference, reference_pool, reference),
    ):
        copy(pages[:, 1], ids, staging, None)
        copy(staging, None, pages[:, 2], ids)
    return Outcome(
        torch.cat((kernel.flatten(), pool.flatten())),
        torch.cat((reference.flatten(), reference_pool.flatten())),
        exact=True,
    )


def copied_pages_outcome(
    page_ids: tuple[int, ...], page_elements: int, dtype: torch.dtype, device: torch.device
) -> Outcome:
    """From one layer of a pool into another of a larger one, in the opposite order."""
    source = torch.arange(5 * 3 * page_elements, device=device).view(5, 3, page_elements).to(dtype)
    ids = torch.tensor(page_ids, dtype=torch.int64, device=device)
    kernel, reference = (torch.zeros(7, 2, page_elements, dtype=dtype, device=device) for _ in "kr")
    copy_pages_triton(source[:, 1], ids, kernel[:, 1], 6 - ids)
    copy_pages_reference(source[:, 1], ids, reference[:, 1], 6 - ids)
    return Outcome(kernel, reference, exact=True)


def row_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for shape in ((3, 40), (1, 1), (0, 8), (2, 3, 24), (5, 7, 1), (2, 1100)):
            yield Case(f"rms_norm-{shape}-{short(dtype)}", partial(rms_norm_outcome, shape, dtype))
            yield Case(f"add_rms_norm-{shape}-{short(dtype)}", partial(add_rms_norm_outcome, shape, dtype))
        for wide in ((3, 2), (0, 8), (2, 38), (1, 4100)):
            yield Case(f"gated-{wide}-{short(dtype)}", partial(gated_outcome, wide, SILU, dtype))
        for label, activation in (("gelu", GELU_TANH), ("swiglu", clamped_swiglu(1.7, 1.0))):
            yield Case(f"{label}-{short(dtype)}", partial(gated_outcome, (2, 38), activation, dtype))
        for num_tokens, is_biased, of_rank in (
            (0, False, False),
            (1, True, False),
            (70, False, False),
            (70, True, True),
        ):
            name = f"experts-{num_tokens}{'-rank' if of_rank else ''}-{short(dtype)}"
            yield Case(name, partial(experts_outcome, num_tokens, is_biased, of_rank, dtype))
        for num_tokens in (0, 1, 70):
            yield Case(f"heads-{num_tokens}-{short(dtype)}", partial(heads_outcome, num_tokens, dtype))
    groups = Routing(top_k=3, normalises=False, num_groups=5, num_chosen_groups=2, scale=2.5)
    for label, routing in (
        ("softmax", groups),
        ("sigmoid", replace(groups, uses_sigmoid=True, normalises=True)),
        ("biased", replace(groups, uses_sigmoid=True, bias_X=torch.linspace(-1, 1, 20))),
    ):
        yield Case(f"route-groups-{label}", partial(route_outcome, routing, 20, torch.float32))


def page_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for page_size, slots, shape in (
            (1, (4, -1, 0), (7, 1, 20)),
            (4, (19, 2, -1), (4, 2, 20)),
            (16, (), (2, 2, 8)),
            (16, (-1,), (1, 1, 2)),
            (64, (64, 319, 0, 1, 2), (8, 2, 16)),
        ):
            name = f"rope_and_store-page{page_size}-{shape}-{short(dtype)}"
            yield Case(name, partial(rope_and_store_outcome, slots, page_size, shape, dtype))
        for codes in (torch.int8, torch.float8_e4m3fn):
            for slots, shape in (((19, 2, -1), (4, 2, 20)), ((1, 3, 0), (1, 1, 16))):
                name = f"store-{short(codes)}-{shape}-{short(dtype)}"
                yield Case(name, partial(rows_of_codes_outcome, slots, 4, shape, codes, dtype))
            for verb, outcome in (("encode", coded_pages_outcome), ("decode", decoded_pages_outcome)):
                for num_rows, head_dim in ((1, 2), (6, 16), (37, 40)):
                    name = f"{verb}_pages-{num_rows}x{head_dim}-{short(codes)}-{short(dtype)}"
                    yield Case(name, partial(outcome, num_rows, head_dim, codes, dtype))
    for dtype in (*DTYPES, torch.int64, torch.uint8):
        for page_ids, page_elements in (((4, 0, 2), 24), ((1,), 1), ((3, 1), 33), ((), 8), ((2,), 4101)):
            name = f"pages-{len(page_ids)}x{page_elements}-{short(dtype)}"
            yield Case(name, partial(pages_outcome, page_ids, page_elements, dtype))
            yield Case(f"copy_{name}", partial(copied_pages_outcome, page_ids, page_elements, dtype))


CASES = [
    *row_cases(),
    *page_cases(),
    *(Case(name, run) for name, run in attention_cases()),
    *(Case(name, run) for name, run in quantised_cases()),
    *(Case(name, run) for name, run in sampling_cases()),
]
