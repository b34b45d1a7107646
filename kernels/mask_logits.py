"""Bans tokens by bit masks. Shapes: R rows of the logits, N masked rows, V vocabulary, W words of a mask."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from baton.kernels import native

WORD_BITS: Final = 32


def num_mask_words(vocab_size: int) -> int:
    """The words of a mask."""
    return -(-vocab_size // WORD_BITS)


def mask_logits(logits_RV: Tensor, rows_N: Tensor, masks_NW: Tensor) -> None:
    """Set logits to -inf, in place, where a mask has no bit.

    logits_RV: fp32, rows may be strided. rows_N: int64, the row of each mask; distinct, which the caller
    guarantees. masks_NW: int32; token v has bit v % 32 of word v // 32. On a GPU nothing waits for it.
    """
    _check(logits_RV, rows_N, masks_NW)
    if logits_RV.device.type == "cpu" and native.handles(logits_RV.dtype):
        native.function("baton_mask_logits", "pnppnnn")(
            logits_RV.data_ptr(),
            logits_RV.stride(0),
            rows_N.data_ptr(),
            masks_NW.data_ptr(),
            len(rows_N),
            masks_NW.shape[1],
            logits_RV.shape[1],
        )
    else:
        mask_logits_reference(logits_RV, rows_N, masks_NW)


def mask_logits_reference(logits_RV: Tensor, rows_N: Tensor, masks_NW: Tensor) -> None:
    """`mask_logits` in plain torch."""
    bits_B = torch.arange(WORD_BITS, device=masks_NW.device, dtype=torch.int32)
    allowed_NV = ((masks_NW[:, :, None] >> bits_B) & 1).flatten(1)[:, : logits_RV.shape[1]]
    logits_RV[rows_N] = logits_RV[rows_N].masked_fill_(allowed_NV == 0, float("-inf"))


def _check(logits_RV: Tensor, rows_N: Tensor, masks_NW: Tensor) -> None:
    expected = (len(rows_N), num_mask_words(logits_RV.shape[1]))
    if tuple(masks_NW.shape) != expected or not masks_NW.is_contiguous() or masks_NW.dtype != torch.int32:
        raise ValueError(f"masks must be int32 and contiguous {expected}, got {tuple(masks_NW.shape)}")
    if logits_RV.dtype != torch.float32 or logits_RV.stride(1) != 1:
        raise ValueError(f"logits must be float32 with adjacent columns, got {logits_RV.dtype}")
