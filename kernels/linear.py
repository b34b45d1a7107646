"""y = x @ weight^T + bias, and rows of a table by token id. Both read weights laid out for their device.

On CUDA the library's own kernel multiplies. On a CPU the C kernel packs the weight into panels and sums every
output in one fixed order, so a token's values do not depend on how many tokens share the step.

Shapes: T tokens, N outputs, K inputs.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels import native
from baton.kernels.huge_pages import HugeArena

PANEL: Final = 32  # as in csrc/linear.c


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight ready to multiply: `data` is [N, K] as loaded, or the C kernel's packed units."""

    data: Tensor
    num_outputs: int
    num_inputs: int
    dtype: torch.dtype
    is_packed: bool


def pack_linear(weight_NK: Tensor, memory: HugeArena | None = None) -> LinearWeight:
    """Lay the weight out for its device. A packed weight is a copy: the original may be freed.

    In huge pages, from `memory`, one to eight rows are multiplied a fifth faster than in small ones.
    """
    num_outputs, num_inputs = weight_NK.shape
    plain = LinearWeight(weight_NK, num_outputs, num_inputs, weight_NK.dtype, is_packed=False)
    if weight_NK.device.type != "cpu" or not native.handles(weight_NK.dtype):
        return plain
    unit_elements = 4 // weight_NK.element_size()
    if num_inputs % unit_elements:
        return plain
    weight_NK = weight_NK.contiguous()
    num_units = num_inputs // unit_elements
    packed = (memory or HugeArena()).empty(-(-num_outputs // PANEL) * PANEL * num_units, torch.int32)
    pack = native.function("baton_pack_linear", "pnpnn")
    pack(weight_NK.data_ptr(), num_units, packed.data_ptr(), num_outputs, num_units)
    return LinearWeight(packed, num_outputs, num_inputs, weight_NK.dtype, is_packed=True)


def linear(
    x_TK: Tensor,
    weight: LinearWeight,
    bias_N: Tensor | None = None,
    *,
    num_splits: int = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ weight^T + bias -> [T, N] in `out_dtype` (default: the dtype of x), summed in fp32.

    bias_N is fp32. num_splits (1 or 2) cuts K into equal parts that are summed apart and then added:
    the order in which that many tensor-parallel ranks would sum.
    """
    if x_TK.shape[-1] != weight.num_inputs or x_TK.dtype != weight.dtype:
        raise ValueError(
            f"linear: the weight takes {weight.num_inputs} inputs of {weight.dtype}, "
            f"got {list(x_TK.shape)} {x_TK.dtype}"
        )
    out_dtype = out_dtype or x_TK.dtype
    if not weight.is_packed:
        return linear_reference(x_TK, weight.data, bias_N, out_dtype=out_dtype)
    if x_TK.stride(-1) != 1:
        x_TK = x_TK.contiguous()
    num_tokens = x_TK.shape[0]
    out_TN = torch.empty((num_tokens, weight.num_outputs), dtype=out_dtype)
    native.function("baton_linear", "pnpppnnnniii")(
        x_TK.data_ptr(),
        x_TK.stride(0) * x_TK.element_size(),
        weight.data.data_ptr(),
        None if bias_N is None else bias_N.data_ptr(),
        out_TN.data_ptr(),
        weight.num_outputs * out_TN.element_size(),
        num_tokens,
        weight.num_outputs,
        weight.num_inputs,
        num_splits,
        native.DTYPE_CODES[x_TK.dtype],
        native.DTYPE_CODES[out_dtype],
    )
    return out_TN


def linear_reference(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`linear` by the library's multiplication, in the dtype of x."""
    bias = None if bias_N is None else bias_N.to(x_TK.dtype)
    return functional.linear(x_TK, weight_NK, bias).to(out_dtype or x_TK.dtype)


# Rows of a table by token id.
#
# torch's own lookup wakes its thread pool, which then spins beside ours for the rest of the step. With two
# cores, the lookup took up to 10 ms of a prefill step, instead of 0.1 ms.
#
# Shapes: T tokens, V rows, E hidden.


def embedding(token_ids_T: Tensor, table_VE: Tensor) -> Tensor:
    """A new [T, E]: row `token_ids_T[t]` of the table for each t.

    token_ids_T: int64, each in [0, V). The caller guarantees that; the native lookup checks nothing.
    """
    if token_ids_T.dtype != torch.int64 or token_ids_T.dim() != 1 or table_VE.dim() != 2:
        raise ValueError(
            f"embedding takes int64 ids [T] and a table [V, E], "
            f"got {token_ids_T.dtype} {list(token_ids_T.shape)} and {list(table_VE.shape)}"
        )
    if table_VE.is_cuda or native.library() is None or not _are_contiguous(token_ids_T, table_VE):
        return embedding_reference(token_ids_T, table_VE)
    num_tokens, width = len(token_ids_T), table_VE.shape[1]
    out_TE = torch.empty((num_tokens, width), dtype=table_VE.dtype)
    native.function("baton_embedding", "pppnn")(
        token_ids_T.data_ptr(),
        table_VE.data_ptr(),
        out_TE.data_ptr(),
        num_tokens,
        width * table_VE.element_size(),
    )
    return out_TE


def embedding_reference(token_ids_T: Tensor, table_VE: Tensor) -> Tensor:
    """`embedding` in plain torch."""
    return functional.embedding(token_ids_T, table_VE)


def _are_contiguous(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)
