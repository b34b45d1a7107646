"""The inputs of one step, built from the scheduler's batch.

`StepBuilder` on rank 0 makes `StepArrays`; the other ranks get them as one msgpack message. `ModelInput` has
the same rows as tensors, for a forward pass.

Shapes: T tokens, B sequences, P pages of the longest sequence, R rows with wanted logits.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.scheduler.sequence import Batch, PageCopy, Sequence
from baton.kernels.ragged_attention import RaggedBatch

Int64s: TypeAlias = NDArray[np.int64]
Int32s: TypeAlias = NDArray[np.int32]


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
    copies_to_host: tuple[PageCopy, ...]
    copies_to_device: tuple[PageCopy, ...]
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


FIRST_WIDTH: Final = 16


@dataclass(slots=True)
class _Row:
    index: int
    version: int  # of the sequence's page table
    num_pages: int  # valid entries


class PageTableRows:
    """The page tables of running sequences as rows of one array, so that a step copies only the changes.

    Of each row [0, num_pages) is valid; zeros or old entries follow.
    """

    def __init__(self, max_num_seqs: int, max_pages: int) -> None:
        self._table = np.zeros((max_num_seqs, min(FIRST_WIDTH, max_pages)), np.int32)
        self._max_pages = max_pages
        self._rows: dict[Sequence, _Row] = {}  # by identity: a key may be used again
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._gathered: list[Sequence] = []  # by the last call
        self._gathered_rows: Int64s = np.array([], np.int64)
        self._width = 0

    def gather(self, sequences: list[Sequence], changed: Ordered[int] | None = None) -> Int32s:
        """[num_sequences, pages of the longest one]: a copy of the present tables.

        changed: indices into `sequences`. If the last call had the same sequences, only these tables may have
        changed since. None: any may have.
        """
        if changed is not None and sequences == self._gathered:
            updated = [sequences[index] for index in changed]
            self._width = max([self._width, *(len(each.page_table) for each in updated)])
            self._widen(self._width)
            for each in updated:
                self._update(each, sequences)
            return self._table[self._gathered_rows, : self._width]
        if len(self._free) + len(self._rows) < len(sequences):
            raise ValueError(f"{len(sequences)} sequences in a step planned for {len(self._table)}")
        self._width = max((len(sequence.page_table) for sequence in sequences), default=0)
        self._widen(self._width)
        rows = [self._update(sequence, sequences) for sequence in sequences]
        self._gathered, self._gathered_rows = sequences, np.array(rows, np.int64)
        return self._table[self._gathered_rows, : self._width]

    def _update(self, sequence: Sequence, batch: Ordered[Sequence]) -> int:
        row, num_pages = self._rows.get(sequence), len(sequence.page_table)
        if row is None:
            row = self._rows[sequence] = _Row(self._take_row(batch), sequence.table_version, 0)
        elif row.version != sequence.table_version or row.num_pages > num_pages:
            row.version, row.num_pages = sequence.table_version, 0
        if row.num_pages < num_pages:
            self._table[row.index, row.num_pages : num_pages] = sequence.page_table[row.num_pages :]
            row.num_pages = num_pages
        return row.index

    def _take_row(self, batch: Ordered[Sequence]) -> int:
        if not self._free:
            leavers = self._rows.keys() - set(batch)
            self._free += [self._rows.pop(sequence).index for sequence in leavers]
        return self._free.pop()

    def _widen(self, width: int) -> None:
        old = self._table
        if width <= old.shape[1]:
            return
        wider = min(self._max_pages, max(width, 2 * old.shape[1]))
        self._table = np.zeros((len(old), wider), np.int32)
        self._table[:, : old.shape[1]] = old


class StepBuilder:
    """Turns batches into arrays."""

    def __init__(self, page_size: int, max_num_seqs: int, max_pages: int) -> None:
        self._page_size = page_size
        self._tables = PageTableRows(max_num_seqs, max_pages)
        self._was_pure_decode = False  # the last step

    def build(self, batch: Batch) -> StepArrays:
        """The arrays of one step; the caller numbers the step."""
        arrays = self._build_decode(batch) if batch.is_pure_decode else self._build_mixed(batch)
        self._was_pure_decode = batch.is_pure_decode
        return pad(arrays, batch.num_padded_tokens) if batch.num_padded_tokens else arrays

    def _build_decode(self, batch: Batch) -> StepArrays:
        sequences = [chunk.sequence for chunk in batch.chunks]
        rows = np.arange(len(sequences) + 1)
        positions = np.array([chunk.start for chunk in batch.chunks], np.int64)
        index, offset = np.divmod(positions, self._page_size)
        # A decode's page table changes only before the first token of a page: a page is appended, and the
        # last commit may have replaced the full page before it.
        changed = np.flatnonzero(offset == 0).tolist() if self._was_pure_decode else None
        page_table = self._tables.gather(sequences, changed)
        return StepArrays(
            token_ids=np.array([sequence.token_ids[-1] for sequence in sequences], np.int64),
            positions=positions,
            slots=page_table[rows[:-1], index].astype(np.int64) * self._page_size + offset,
            cu_seqlens=rows.astype(np.int32),
            context_lens=(positions + 1).astype(np.int32),
            page_table=page_table,
            logit_rows=rows[:-1],
            num_decodes=batch.num_decodes,
            max_seqlen_q=min(1, len(sequences)),
            copies_to_host=batch.copies_to_host,
            copies_to_device=batch.copies_to_device,
        )

    def _build_mixed(self, batch: Batch) -> StepArrays:
        chunks = batch.chunks
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        lengths = np.array([chunk.num_tokens for chunk in chunks], np.int64)
        cu_seqlens = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(lengths, out=cu_seqlens[1:])
        owner = np.repeat(np.arange(len(chunks)), lengths)  # row -> chunk
        positions = np.arange(cu_seqlens[-1]) + (starts - cu_seqlens[:-1])[owner]
        page_table = self._tables.gather([chunk.sequence for chunk in chunks])
        pages = page_table[owner, positions // self._page_size].astype(np.int64)
        return StepArrays(
            token_ids=_token_ids(batch),
            positions=positions,
            slots=pages * self._page_size + positions % self._page_size,
            cu_seqlens=cu_seqlens,
            context_lens=(starts + lengths).astype(np.int32),
            page_table=page_table,
            logit_rows=_logit_rows(batch, cu_seqlens),
            num_decodes=batch.num_decodes,
            max_seqlen_q=int(lengths.max(initial=0)),
            copies_to_host=batch.copies_to_host,
            copies_to_device=batch.copies_to_device,
        )


def padding_step(num_tokens: int, num_rows: int) -> StepArrays:
    """A step of `num_tokens` padding tokens that asks for the logits of up to `num_rows` rows."""
    batch = Batch(chunks=(), num_decodes=0, num_padded_tokens=num_tokens)
    arrays = StepBuilder(page_size=1, max_num_seqs=1, max_pages=1).build(batch)
    return arrays._replace(logit_rows=np.arange(min(num_rows, num_tokens)))


def _token_ids(batch: Batch) -> Int64s:
    chunks, num_decodes = batch.chunks, batch.num_decodes
    token_ids = [chunk.sequence.token_ids[chunk.start] for chunk in chunks[:num_decodes]]
    for chunk in chunks[num_decodes:]:
        token_ids += chunk.sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens]
    return np.array(token_ids, np.int64)


def _logit_rows(batch: Batch, cu_seqlens: Int32s) -> Int64s:
    rows: list[int] = []
    for chunk, first, end in zip(batch.chunks, cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False):
        if chunk.sequence.needs_prompt_logprobs:
            rows += range(first, end)
        elif chunk.samples:
            rows.append(end - 1)
    return np.array(rows, np.int64)
