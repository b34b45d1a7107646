"""The inputs of one step: StepArrays, as every rank of a group gets them, and ModelInput, as a forward pass
reads them.

Rank 0 builds the arrays from the scheduler's batch; the other ranks get them as one msgpack message.

Shapes: T tokens, B sequences, P pages of the longest sequence, R rows with wanted logits.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.ragged_attention import RaggedBatch

Int64s: TypeAlias = NDArray[np.int64]
Int32s: TypeAlias = NDArray[np.int32]
PageCopies: TypeAlias = tuple[tuple[int, int], ...]  # (device_page, host_page) each


class StepArrays(NamedTuple):
    """One step as plain arrays; ModelInput describes the rows."""

    token_ids: Int64s
    positions: Int64s
    slots: Int64s
    cu_seqlens: Int32s
    context_lens: Int32s
    page_table: Int32s  # [B, P]
    logit_rows: Int64s
    num_decodes: int
    max_seqlen_q: int
    copies_to_host: PageCopies
    copies_to_device: PageCopies
    step: int = 0  # the number of the step, see `mark_of`
    num_layer_groups: int = 0  # groups of layers to report as they are written; 0: none


def encode(arrays: StepArrays) -> bytes:
    """A message for the other ranks; `decode` restores the arrays."""
    return _ENCODER.encode(arrays)


def decode(message: bytes) -> StepArrays:
    """The arrays of a message, writable."""
    arrays = StepArrays(*_DECODER.decode(message))
    num_seqs = len(arrays.context_lens)
    num_pages = len(arrays.page_table) // max(1, num_seqs)  # a step may have copies and no sequence
    return arrays._replace(page_table=arrays.page_table.reshape(num_seqs, num_pages))


_ENCODER = msgspec.msgpack.Encoder(
    enc_hook=lambda array: msgspec.msgpack.Ext(array.itemsize, array.tobytes())
)
_DECODER = msgspec.msgpack.Decoder(
    list, ext_hook=lambda itemsize, content: np.frombuffer(bytearray(content), f"i{itemsize}")
)


def padding_step(num_tokens: int, num_rows: int) -> StepArrays:
    """A step of `num_tokens` padding tokens that asks for the logits of up to `num_rows` rows."""
    nothing = np.zeros(0, np.int64)
    empty = StepArrays(
        token_ids=nothing,
        positions=nothing,
        slots=nothing,
        cu_seqlens=np.zeros(1, np.int32),
        context_lens=np.zeros(0, np.int32),
        page_table=np.zeros((0, 1), np.int32),
        logit_rows=np.arange(min(num_rows, num_tokens)),
        num_decodes=0,
        max_seqlen_q=0,
        copies_to_host=(),
        copies_to_device=(),
    )
    return pad(empty, num_tokens)


def pad(arrays: StepArrays, num_rows: int) -> StepArrays:
    """Add one sequence of `num_rows` tokens that are computed, not stored, and not attended to."""
    zeros = np.zeros(num_rows, np.int64)
    page_table = np.zeros((len(arrays.context_lens) + 1, max(1, arrays.page_table.shape[1])), np.int32)
    page_table[:-1, : arrays.page_table.shape[1]] = arrays.page_table
    return arrays._replace(
        token_ids=np.concatenate((arrays.token_ids, zeros)),
        positions=np.concatenate((arrays.positions, zeros)),
        slots=np.concatenate((arrays.slots, zeros - 1)),
        cu_seqlens=np.append(arrays.cu_seqlens, np.int32(arrays.cu_seqlens[-1] + num_rows)),
        context_lens=np.append(arrays.context_lens, np.int32(0)),
        page_table=page_table,
        max_seqlen_q=max(arrays.max_seqlen_q, num_rows),
    )


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """The tokens of one step and the slots of their keys and values.

    Sequences lie one after another, without padding; the first `num_decodes` have one token each.
    """

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    slots_T: Tensor  # int64, page * page_size + offset
    cu_seqlens_B1: Tensor  # int32, the first token of each sequence; the last entry is T
    context_lens_B: Tensor  # int32, tokens with KV after this step has stored its own
    page_table_BP: Tensor  # int32
    logit_rows_R: Tensor  # int64, ascending
    num_decodes: int
    max_seqlen_q: int

    @classmethod
    def from_arrays(cls, arrays: StepArrays, device: torch.device) -> "ModelInput":
        """On the CPU the tensors share memory with the arrays; to a GPU they are copied asynchronously."""

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
        """The part of the input that attention reads, prepared once for all layers."""
        return RaggedBatch(
            cu_seqlens_B1=self.cu_seqlens_B1,
            context_lens_B=self.context_lens_B,
            page_table_BP=self.page_table_BP,
            num_decodes=self.num_decodes,
            max_seqlen_q=self.max_seqlen_q,
        )
