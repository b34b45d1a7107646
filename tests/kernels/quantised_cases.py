"""Weights of 8 and 4 bits with random codes, and their products.

Shapes: T tokens, N outputs, K inputs, G groups, X experts.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from baton.kernels.experts import (
    ExpertWeights,
    Mixture,
    Routing,
    experts_reference,
    experts_triton,
    stack_experts,
)
from baton.kernels.gated import SILU, gated_reference
from baton.kernels.linear import LinearWeight, linear_triton, new_arrivals, pack_quantised
from baton.kernels.quantised import (
    FP8,
    QuantisedMatrix,
    WeightFormat,
    linear_quantised_reference,
    round_groups,
)
from baton.kernels.triton.quantised_tile import lay_out_codes, round_inputs_triton
from tests.kernels.outcomes import DTYPES, Outcome, normal, short

FORMATS = [each for each in WeightFormat if each is not WeightFormat.PLAIN]


def random_matrix(
    weight_format: WeightFormat, num_outputs: int, num_inputs: int, group: int, seed: int = 0
) -> QuantisedMatrix:
    """Every code occurs, of FP8 denormals and the largest values, too; no value is a NaN."""
    source = torch.Generator().manual_seed(seed)
    shape, is_fp8 = (num_outputs, num_inputs), weight_format is WeightFormat.FP8
    bits = torch.randint(0, 256, shape, generator=source, dtype=torch.uint8)
    if is_fp8:
        codes = torch.where(bits & 127 == 127, 0, bits).view(FP8)
    elif weight_format is WeightFormat.MXFP4:
        codes = bits & 15
    else:
        codes = bits.view(torch.int8) if weight_format.num_bits == 8 else (bits & 15).to(torch.int8) - 8
    scales = torch.rand((num_outputs, num_inputs // group), generator=source) * (0.01 if is_fp8 else 0.1)
    zeros = None
    if weight_format is WeightFormat.INT4_ZEROS:
        zeros = torch.randint(-8, 8, scales.shape, generator=source).float()
    return QuantisedMatrix(weight_format, codes, scales, zeros)


def of_codes(matrix: QuantisedMatrix, dtype: torch.dtype, device: torch.device) -> LinearWeight:
    """The weight as the Triton kernel reads it, for inputs of `dtype`."""
    codes, vectors = (each.to(device) for each in lay_out_codes(matrix))
    return LinearWeight(
        codes,
        *matrix.shape,
        dtype,
        is_packed=False,
        arrivals=new_arrivals(device),
        group=matrix.group,
        format=matrix.format,
        vectors=vectors,
    )


def on_device(matrix: QuantisedMatrix, device: torch.device) -> QuantisedMatrix:
    zeros = None if matrix.zeros_NG is None else matrix.zeros_NG.to(device)
    codes, scales = matrix.codes_NK.to(device), matrix.scales_NG.to(device)
    return replace(matrix, codes_NK=codes, scales_NG=scales, zeros_NG=zeros)


def product_outcome(
    weight_format: WeightFormat,
    num_tokens: int,
    groups: tuple[int, int],
    num_splits: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Outcome:
    """70 outputs; `groups` in each split."""
    group, num_groups = groups
    num_inputs = group * num_groups * num_splits
    matrix = random_matrix(weight_format, 70, num_inputs, group)
    x = 0.01 * normal(num_tokens, num_inputs, dtype=dtype, device=device)
    bias, weight = normal(70, dtype=torch.float32, device=device), of_codes(matrix, dtype, device)
    kernel = linear_triton(x, weight, bias, num_splits=num_splits, out_dtype=torch.float32)
    reference = linear_quantised_reference(
        x, on_device(matrix, device), bias, num_splits=num_splits, out_dtype=torch.float32
    )
    return Outcome(kernel, reference)


def packed_product_outcome(weight_format: WeightFormat, group: int, device: torch.device) -> Outcome:
    """A weight with groups of 128 inputs, packed for inputs in fp32, which have groups of `group`."""
    matrix = on_device(random_matrix(weight_format, 70, 384, 128), device)
    weight = pack_quantised(matrix, torch.float32)
    assert weight.group == group
    x = 0.01 * normal(5, 384, dtype=torch.float32, device=device)
    reference = linear_quantised_reference(x, matrix, None, num_splits=1, out_dtype=torch.float32)
    return Outcome(linear_triton(x, weight), reference)


def gated_product_outcome(weight_format: WeightFormat, dtype: torch.dtype, device: torch.device) -> Outcome:
    matrix = random_matrix(weight_format, 36, 64, 32)
    x = 0.01 * normal(3, 64, dtype=dtype, device=device)
    kernel = linear_triton(x, of_codes(matrix, dtype, device), gate=SILU)
    reference = linear_quantised_reference(x, on_device(matrix, device), None, num_splits=1, out_dtype=dtype)
    return Outcome(kernel, gated_reference(reference, SILU))


def experts_of_codes_outcome(
    weight_format: WeightFormat, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> Outcome:
    """Five experts of 32 inputs, 48 inner values and 24 outputs; `down` in two splits. Two for a token."""

    def weights(seed: int, num_outputs: int, num_inputs: int, group: int) -> tuple[ExpertWeights, ...]:
        matrices = [
            random_matrix(weight_format, num_outputs, num_inputs, group, 5 * seed + expert)
            for expert in range(5)
        ]
        matrices = [replace(each, scales_NG=0.1 * each.scales_NG) for each in matrices]
        unpacked = [
            LinearWeight(
                each.codes_NK, num_outputs, num_inputs, dtype, is_packed=False, group=group, matrix=each
            )
            for each in (on_device(matrix, device) for matrix in matrices)
        ]
        stacked = stack_experts([of_codes(each, dtype, device) for each in matrices], None)
        return stacked, ExpertWeights(tuple(unpacked), None)

    gate_up, down, rest = weights(0, 96, 32, 32), weights(1, 24, 24, 24), weights(2, 24, 24, 24)
    kernel, reference = (
        Mixture(
            gate_up[index],
            (down[index], rest[index]),
            Routing(top_k=2, normalises=True),
            activation=SILU,
            out_dtype=dtype,
        )
        for index in range(2)
    )
    x = normal(num_tokens, 32, dtype=dtype, device=device)
    logits = normal(num_tokens, 5, dtype=torch.float32, device=device)
    return Outcome(experts_triton(x, logits, kernel), experts_reference(x, logits, reference))


def rounded_inputs_outcome(
    num_tokens: int, group: int, num_groups: int, dtype: torch.dtype, device: torch.device
) -> Outcome:
    """The codes and scales of inputs; some groups are zeros, and others not finite."""
    x = normal(num_tokens, group * num_groups + 3, dtype=dtype, device=device)[:, : group * num_groups]
    x[0, :group] = 0
    x[-1, -1], x[num_tokens // 2, 0] = float("nan"), float("-inf")
    codes, scales = round_inputs_triton(x, group)
    expected_scales, expected_codes = round_groups(x.float().unflatten(1, (-1, group)))
    kernel = torch.cat((codes.float(), scales), dim=1)
    return Outcome(kernel, torch.cat((expected_codes.flatten(1).float(), expected_scales), dim=1), exact=True)


def quantised_cases() -> Iterator[tuple[str, Callable[[torch.device], Outcome]]]:
    for weight_format, dtype in product(FORMATS, (torch.float32, torch.bfloat16)):
        name = f"{weight_format.name.lower()}-{short(dtype)}"
        yield f"linear-{name}", partial(product_outcome, weight_format, 5, (24, 3), 2, dtype)
    for weight_format, group in (
        (WeightFormat.INT8, 32),
        (WeightFormat.FP8, 32),
        (WeightFormat.INT4_ZEROS, 64),
        (WeightFormat.INT8_ROUNDED, 128),
    ):
        name = f"packed-{weight_format.name.lower()}"
        yield name, partial(packed_product_outcome, weight_format, group)
    for weight_format in (WeightFormat.INT8_ROUNDED, WeightFormat.INT4_ZEROS):
        name = weight_format.name.lower()
        yield (
            f"linear-two-parts-{name}",
            partial(product_outcome, weight_format, 70, (128, 9), 1, torch.float16),
        )
        yield f"gated-{name}", partial(gated_product_outcome, weight_format, torch.float16)
    for weight_format, num_tokens in ((WeightFormat.INT8_ROUNDED, 9), (WeightFormat.MXFP4, 1)):
        name = f"experts-{weight_format.name.lower()}"
        yield name, partial(experts_of_codes_outcome, weight_format, num_tokens, torch.float32)
    for dtype in DTYPES:
        for group, num_groups in ((24, 3), (128, 9)):
            name = f"round_inputs-{num_groups}x{group}-{short(dtype)}"
            yield name, partial(rounded_inputs_outcome, 4, group, num_groups, dtype)
