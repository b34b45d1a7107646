"""Every step compiles nothing that the steps of the start have not compiled, as the launchers choose it."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.bench.gpu.tiles import Recorder
from baton.engine.runner.step_inputs import StepArrays, StepUploads, padding_step, warmup_steps
from baton.kernels import linear, paged_attention, prefill_attention, ragged_attention
from baton.kernels.quantised import WeightFormat
from baton.kernels.triton import quantised_tile
from baton.kernels.triton.kernel import HAS_TRITON, Launch

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")

MAX_NUM_TOKENS, MAX_NUM_SEQS, MAX_PAGES = 700, 300, 600
HEAD_DIM, PAGE_SIZE = 128, 16
CPU: Final = torch.device("cpu")
INT8_ROUNDED: Final = WeightFormat.INT8_ROUNDED
KERNELS: Final = (
    (paged_attention, "paged_attention_kernel"),
    (prefill_attention, "prefill_attention_kernel"),
    (linear, "linear_kernel"),
    (quantised_tile, "round_inputs_kernel"),
)
# Outputs and inputs of an 8B model's products. The head yields logits.
PRODUCTS: Final = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
HEAD: Final = (128256, 4096)


def variants(steps: Iterable[StepArrays], num_heads: int, num_kv_heads: int) -> set[tuple[object, ...]]:
    """Return what Triton compiles for the attention and the products of these steps.

    An item has the kernel, its constants and the alignments of its arguments.
    """
    uploads = StepUploads(MAX_NUM_TOKENS, MAX_NUM_SEQS, MAX_PAGES, CPU)
    pages = torch.empty(2, 2, 2, num_kv_heads, PAGE_SIZE, HEAD_DIM, dtype=torch.float16)[:, 0]
    num_rows = MAX_NUM_TOKENS + MAX_NUM_SEQS
    query = torch.empty(num_rows, num_heads + 2 * num_kv_heads, HEAD_DIM, dtype=torch.float16)[:, :num_heads]
    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patched:
        for module, name in KERNELS:
            patched.setattr(module, name, Recorder(getattr(module, name), launches))
        patched.setattr(ragged_attention, "runs_triton", lambda tensor: True)
        for arrays in steps:
            num_tokens, num_logits = len(arrays.token_ids), len(arrays.logit_rows)
            for num_rows, shapes in ((num_tokens, PRODUCTS), (num_logits, (*PRODUCTS[1:], HEAD))):
                for shape in shapes:
                    multiply(num_rows, shape)
            step = uploads.upload(arrays)
            rows = query[: len(arrays.token_ids)]
            ragged_attention.ragged_attention(rows, pages, step.attention, scale=0.1)
    return {variant_of(launch) for launch in launches}


def multiply(num_rows: int, shape: tuple[int, int]) -> None:
    """Launch the product of as many rows, whose contents do not matter, with a weight of this shape."""
    num_outputs, num_inputs = shape
    x = torch.empty((num_rows, num_inputs), dtype=torch.float16, device="meta")
    arrivals = linear.new_arrivals(x.device)
    weight = linear.LinearWeight(x, num_outputs, num_inputs, x.dtype, is_packed=False, arrivals=arrivals)
    linear.linear_triton(x, weight, num_splits=2)
    codes = replace(weight, data=x.to(torch.int8), vectors=x.float(), group=128, format=INT8_ROUNDED)
    linear.linear_triton(x, codes, num_splits=2)


def variant_of(launch: Launch) -> tuple[object, ...]:
    params = launch.kernel.jitted.params
    specialised = [
        specialisation(argument)
        for param, argument in zip(params, launch.arguments, strict=False)
        if not param.do_not_specialize
    ]
    return launch.kernel, *specialised, *launch.options.items()


def specialisation(argument: object) -> object:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return (argument == 1, argument % 16 == 0) if isinstance(argument, int) else type(argument)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (4, 4), (16, 1), (28, 4), (6, 3)])
def test_no_step_meets_a_kernel_that_the_start_has_not_compiled(num_heads: int, num_kv_heads: int) -> None:
    warm = variants(warmup_steps(MAX_NUM_TOKENS, MAX_NUM_SEQS, MAX_PAGES), num_heads, num_kv_heads)
    assert len(warm) > 8

    @given(
        num_decodes=st.integers(0, MAX_NUM_SEQS),
        num_tokens=st.integers(1, MAX_NUM_TOKENS),
        num_pages=st.integers(1, MAX_PAGES),
        num_rows=st.integers(1, MAX_NUM_TOKENS + MAX_NUM_SEQS),
    )
    def check(num_decodes: int, num_tokens: int, num_pages: int, num_rows: int) -> None:
        step = padding_step(num_tokens, num_rows, num_decodes=num_decodes, num_pages=num_pages)
        assert variants([step], num_heads, num_kv_heads) <= warm

    check()


def test_steps_of_the_start_are_padding_within_the_limits() -> None:
    for max_num_tokens, largest_batch, max_pages in ((700, 300, 600), (1, 1, 1), (64, 64, 1), (3, 9, 5)):
        steps = list(warmup_steps(max_num_tokens, largest_batch, max_pages))
        assert max(step.max_seqlen_q for step in steps) == max_num_tokens
        assert max(step.page_table.shape[1] for step in steps) == max_pages
        for step in steps:
            assert (step.slots == -1).all() and not step.context_lens.any()
            assert step.num_decodes <= largest_batch
