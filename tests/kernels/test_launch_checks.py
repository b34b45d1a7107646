"""A launcher refuses arguments with the expected and the given shape."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from baton.kernels.experts import stack_experts
from baton.kernels.gated import gated_triton
from baton.kernels.linear import linear_triton, pack_linear
from baton.kernels.paged_attention import decode_programs, paged_attention_decode_triton
from baton.kernels.pages import copy_pages_triton
from baton.kernels.prefill_attention import prefill_attention_triton
from baton.kernels.rms_norm import rms_norm_triton
from baton.kernels.sample import sample_triton
from baton.kernels.store_kv import rope_and_store_triton
from baton.kernels.triton.attention_tile import num_splits
from baton.kernels.triton.kernel import HAS_TRITON
from baton.kernels.triton.quantised_tile import round_inputs_triton
from tests.kernels.sampling_cases import Filters, sampling_tensors

f = torch.empty
i32 = partial(torch.zeros, dtype=torch.int32)
i64 = partial(torch.zeros, dtype=torch.int64)
pages = f(4, 2, 2, 16, 8)


def rotate(**others: torch.Tensor) -> None:
    """Three tokens, four query heads and two kv heads of 8, but for the tensors that are given."""
    fitting = {"query": f(3, 4, 8), "key": f(3, 2, 8), "value": f(3, 2, 8), "table": f(9, 8)}
    rope_and_store_triton(
        *{**fitting, "positions": i64(3), "pages": pages, "slots": i64(3), **others}.values()
    )


decode = partial(paged_attention_decode_triton, scale=1.0)
prefill = partial(prefill_attention_triton, scale=1.0, max_seqlen_q=2)
sampling = sampling_tensors(2, Filters())

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "rms_norm_weight": (lambda: rms_norm_triton(f(2, 8), f(7), 1e-5), r"weight must be \[8\], got \(7,\)"),
    "rms_norm_strided": (lambda: rms_norm_triton(f(8, 2).t(), f(8), 1e-5), "adjacent E"),
    "rms_norm_dtype": (lambda: rms_norm_triton(f(2, 8), f(8).half(), 1e-5), "must share a dtype"),
    "add_rms_norm": (lambda: rms_norm_triton(f(2, 8), f(8), 1e-5, f(3, 8)), r"residual must be \(2, 8\)"),
    "linear_packed": (lambda: linear_triton(f(2, 8), pack_linear(f(3, 8))), "not packed for it"),
    "gated": (lambda: gated_triton(f(2, 7)), r"\[T, 2 \* F\].* got \(2, 7\)"),
    "rope_odd": (lambda: rotate(query=f(3, 4, 7), key=f(3, 2, 7), table=f(9, 7)), "D even"),
    "rope_key": (lambda: rotate(key=f(2, 2, 8)), r"key must be \[3, K, 8\]"),
    "rope_table": (lambda: rotate(table=f(9, 4)), r"cos_sin must be contiguous float32 \[M, 8\]"),
    "rope_positions": (lambda: rotate(positions=i64(2)), r"positions must be"),
    "store_slots": (lambda: rotate(slots=i32(3)), "slots must be"),
    "store_heads": (lambda: rotate(key=f(3, 1, 8), value=f(3, 1, 8)), r"\[P, L, 1, S, R\]"),
    "store_value": (lambda: rotate(value=f(3, 2, 7)), "V even"),
    "store_rows": (lambda: rotate(pages=pages.to(torch.int8)), "do not take heads of torch.float32 and 8"),
    "round_inputs": (lambda: round_inputs_triton(f(2, 60), 24), r"\[2, 60\] has no groups of 24"),
    "stack_experts": (
        lambda: stack_experts([pack_linear(f(3, 8)), replace(pack_linear(f(3, 8)), group=8)], None),
        "laid out in several ways",
    ),
    "decode_heads": (lambda: decode(f(3, 5, 8), pages, i32(3, 4), i32(3)), "5 query heads of 8 cannot"),
    "decode_rows": (
        lambda: decode(f(3, 4, 8), pages.half(), i32(3, 4), i32(3)),
        "torch.float16 .* do not take heads of torch.float32",
    ),
    "decode_page_size": (lambda: decode(f(3, 4, 8), f(4, 2, 2, 12, 8), i32(3, 4), i32(3)), "power of two"),
    "decode_table": (lambda: decode(f(3, 4, 8), pages, i64(3, 4), i32(3)), "page_table must be int32"),
    "decode_batch": (lambda: decode(f(2, 4, 8), pages, i32(3, 4), i32(3)), "query has 2 sequences"),
    "decode_window": (lambda: decode(f(3, 4, 8), pages, i32(3, 4), i32(3), window=0), "window must be"),
    "decode_value": (
        lambda: decode(f(3, 4, 8), pages, i32(3, 4), i32(3), value_dim=4),
        "do not have values of 4 and keys of 8",
    ),
    "prefill_codes": (
        lambda: prefill(f(3, 4, 8), pages[:, :1].to(torch.int8), i32(3, 4), i32(4), i32(3), value_dim=4),
        "pages of one plane hold no codes",
    ),
    "prefill_bounds": (lambda: prefill(f(3, 4, 8), pages, i32(3, 4), i32(3), i32(3)), r"int32 \(4,\)"),
    "copy_dtype": (lambda: copy_pages_triton(f(4, 8), i64(2), f(2, 8).half(), None), "must be alike"),
    "copy_rows": (lambda: copy_pages_triton(f(4, 8), i64(2), f(3, 8), None), "2 pages cannot go to 3"),
    "copy_strided": (lambda: copy_pages_triton(f(8, 4).t(), i64(2), f(2, 8), None), "must be adjacent"),
    "copy_ids": (lambda: copy_pages_triton(f(4, 8), i32(2), f(4, 8), i64(2)), "page ids must be"),
    "copy_counts": (lambda: copy_pages_triton(f(4, 8), i64(2), f(4, 8), i64(3)), "2 pages cannot go to 3"),
    "copy_size": (lambda: copy_pages_triton(f(4, 8), i64(2), f(4, 7), i64(2)), "pages must be alike"),
    "sample_dtype": (lambda: sample_triton(f(2, 9).half(), sampling), "logits must be float32"),
    "sample_rows": (lambda: sample_triton(f(3, 9), sampling), r"temperature_B must be contiguous"),
    "sample_field": (
        lambda: sample_triton(f(2, 9), replace(sampling, seed_B=i32(2))),
        "seed_B must be contiguous torch.int64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_launcher_refuses(name: str) -> None:
    launch, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        launch()


@pytest.mark.parametrize(
    ("num_keys", "expected"),
    [
        (0, 0),
        (1, 1),
        (256, 1),
        (257, 2),
        (4096, 16),
        (4097, 17),
        (4608, 17),
        (4609, 18),
        (12_288, 32),
        (131_072, 81),
    ],
)
def test_splits_grow_longer_with_the_context(num_keys: int, expected: int) -> None:
    assert num_splits(num_keys) == expected


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("context_len", [128, 1000, 8000, 131_072])
def test_no_batch_size_leaves_the_chip_idle(context_len: int) -> None:
    """Sixteen programs in turn on each of 132 multiprocessors, where the context has so many splits."""
    before = None
    for num_sequences in range(1, 257):
        num_heads = 8 * num_sequences
        num_live = num_heads * min(decode_programs(num_heads, num_splits(131_072)), num_splits(context_len))
        assert num_live >= min(16 * 132, num_heads * num_splits(context_len))
        assert before is None or num_live > 0.45 * before, f"{num_live} programs after {before}"
        before = num_live
