"""What a forward pass reads: the tokens of one step and where their keys and values lie.

Shapes: T tokens, B sequences, P pages of the longest sequence, R rows whose logits are wanted.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.runner.step_inputs import StepArrays
from baton.kernels.ragged_attention import RaggedBatch


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """Sequences lie one after another, without padding; the first `num_decodes` have one token each."""

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    slots_T: Tensor  # int64, page * page_size + offset
    cu_seqlens_B1: Tensor  # int32, where each sequence's tokens start; the last entry is T
    context_lens_B: Tensor  # int32, tokens with KV once this step has stored its own
    page_table_BP: Tensor  # int32
    logit_rows_R: Tensor  # int64, ascending
    num_decodes: int
    max_seqlen_q: int

    @classmethod
    def from_arrays(cls, arrays: StepArrays, device: torch.device) -> "ModelInput":
        """On the CPU the tensors share memory with the arrays; a GPU gets them without waiting."""

        def place(array: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
            tensor = torch.from_numpy(array)
            return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

        return cls(
            token_ids_T=place(arrays.token_ids),
            positions_T=place(arrays.positions),
            slots_T=place(arrays.slots),
            cu_seqlens_B1=place(arrays.cu_seqlens),
            context_lens_B=place(arrays.context_lens),
            page_table_BP=place(arrays.page_table),
            logit_rows_R=place(arrays.logit_rows),
            num_decodes=arrays.num_decodes,
            max_seqlen_q=arrays.max_seqlen_q,
        )

    @cached_property
    def attention(self) -> RaggedBatch:
        """The part of the input that attention needs, prepared once for all layers."""
        return RaggedBatch(
            cu_seqlens_B1=self.cu_seqlens_B1,
            context_lens_B=self.context_lens_B,
            page_table_BP=self.page_table_BP,
            num_decodes=self.num_decodes,
            max_seqlen_q=self.max_seqlen_q,
        )
