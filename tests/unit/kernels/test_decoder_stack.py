"""Arguments that the native decoder refuses before it reads an address. tests/parity compares its bits."""

import ctypes
from typing import Any

import pytest
import torch

from baton.kernels import decoder_stack, native
from baton.kernels.decoder_stack import DecoderStack, StackLayer, StackShape, can_stack
from baton.kernels.linear import pack_linear
from baton.kernels.ragged_attention import AttentionArguments, RaggedBatch

SHAPE = StackShape(
    hidden=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate=24, eps=1e-5, num_splits=2
)


def layer(dtype: torch.dtype = torch.float32, head_dim: int = 16) -> StackLayer:
    def weight(num_outputs: int, num_inputs: int) -> Any:
        return pack_linear(torch.ones(num_outputs, num_inputs, dtype=dtype)), None

    norm = torch.ones(32, dtype=dtype)
    return StackLayer(
        input_norm_E=norm,
        post_norm_E=norm,
        query_norm_D=None,
        key_norm_D=None,
        qkv=weight(4 * head_dim, 32),
        out=weight(32, 2 * head_dim),
        gate_up=weight(48, 32),
        down=weight(32, 24),
        window=None,
    )


def arguments(**changes: torch.Tensor) -> dict[str, Any]:
    """One token of one sequence; `changes` replace tensors by name."""
    int32 = torch.int32
    batch = RaggedBatch(
        cu_seqlens_B1=torch.tensor([0, 1], dtype=int32),
        context_lens_B=torch.tensor([1], dtype=int32),
        page_table_BP=torch.tensor([[0]], dtype=int32),
        num_decodes=1,
        max_seqlen_q=1,
    )
    zero = torch.zeros(1, dtype=torch.int64)
    usual = {"residual_TE": torch.ones(1, 32), "rows_R": zero, "positions_T": zero, "slots_T": zero}
    return {**usual, "kv_pool": torch.zeros(2, 1, 2, 1, 4, 16), "batch": batch, **changes}


@pytest.fixture
def stack() -> DecoderStack:
    return DecoderStack([layer()], torch.ones(32), torch.ones(8, 16), SHAPE)


def test_stack_runs(stack: DecoderStack) -> None:
    assert stack.run(**arguments()).shape == (1, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"residual_TE": torch.ones(1, 31)}, r"residual must be contiguous \[T, 32\]"),
        ({"residual_TE": torch.ones(1, 32).bfloat16()}, "expected torch.float32, got torch.bfloat16"),
        ({"kv_pool": torch.zeros(2, 2, 2, 1, 4, 16)}, "pages must be contiguous"),
        ({"kv_pool": torch.zeros(2, 2, 2, 1, 4, 16)[:, :1]}, "pages must be contiguous"),
        ({"kv_pool": torch.zeros(2, 1, 2, 1, 4, 16).bfloat16()}, "kv_pages torch.bfloat16"),
        ({"kv_pool": torch.zeros(2, 1, 2, 1, 4, 16, dtype=torch.int8)}, "kv_pages torch.int8"),
        ({"positions_T": torch.zeros(1, dtype=torch.int32)}, "must be contiguous int64"),
        ({"slots_T": torch.zeros(2, dtype=torch.int64)}, "1 tokens, 1 positions, 2 slots"),
    ],
)
def test_wrong_shapes_are_refused(
    stack: DecoderStack, changes: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stack.run(**arguments(**changes))


def test_weights_and_heads_that_are_too_much_for_the_native_call() -> None:
    assert can_stack([layer()], SHAPE) and can_stack([layer(torch.bfloat16)], SHAPE)
    assert not can_stack([layer(torch.float16)], SHAPE)
    wide = StackShape(
        hidden=32, num_heads=2, num_kv_heads=1, head_dim=578, intermediate=24, eps=1e-5, num_splits=2
    )
    assert not can_stack([layer(head_dim=578)], wide)


def test_structs_are_as_long_here_as_in_c() -> None:
    sizes = torch.zeros(4, dtype=torch.int64)
    native.function("baton_struct_sizes", "p")(sizes.data_ptr())
    structs = (AttentionArguments, decoder_stack._Layer, decoder_stack._Decoder, decoder_stack._Step)
    assert sizes.tolist() == [ctypes.sizeof(struct) for struct in structs]
