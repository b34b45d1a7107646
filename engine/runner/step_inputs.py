"""Builds the arrays of a step from the scheduler's batch, keeping the page tables of running sequences."""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from baton.engine.runner.model_input import Int32s, Int64s, StepArrays, pad
from baton.engine.scheduler.plan import Batch, ScheduledChunk
from baton.engine.scheduler.sequence import Sequence

FIRST_WIDTH: Final = 16


@dataclass(slots=True)
class _Row:
    index: int
    version: int  # of the sequence's page table
    num_pages: int  # valid entries


class PageTableRows:
    """The page tables of running sequences as rows of one array, so that a step copies only what changed.

    Of each row [0, num_pages) is valid; zeros or old entries follow.
    """

    def __init__(self, max_num_seqs: int, max_pages: int) -> None:
        self._table = np.zeros((max_num_seqs, min(FIRST_WIDTH, max_pages)), np.int32)
        self._max_pages = max_pages
        self._rows: dict[Sequence, _Row] = {}  # by identity: a key may be used again
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def gather(self, sequences: Ordered[Sequence]) -> NDArray[np.int32]:
        """[num_sequences, pages of the longest one]: a copy of the present tables."""
        if len(self._free) + len(self._rows) < len(sequences):
            raise ValueError(f"{len(sequences)} sequences in a step planned for {len(self._table)}")
        width = max((len(sequence.page_table) for sequence in sequences), default=0)
        self._widen(width)
        rows = [self._update(sequence, sequences) for sequence in sequences]
        return self._table[rows, :width]

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

    def build(self, batch: Batch) -> StepArrays:
        """The arrays of one step; the caller numbers the step."""
        chunks = batch.chunks
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        lengths = np.array([chunk.num_tokens for chunk in chunks], np.int64)
        cu_seqlens = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(lengths, out=cu_seqlens[1:])
        owner = np.repeat(np.arange(len(chunks)), lengths)  # row -> chunk
        positions = np.arange(cu_seqlens[-1]) + (starts - cu_seqlens[:-1])[owner]
        page_table = self._tables.gather([chunk.sequence for chunk in chunks])
        pages = page_table[owner, positions // self._page_size].astype(np.int64)
        arrays = StepArrays(
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
        return pad(arrays, batch.num_padded_tokens) if batch.num_padded_tokens else arrays


def wants_prompt_logits(chunk: ScheduledChunk) -> bool:
    """Whether the logits of every position of the chunk are wanted, not only of the last one."""
    return chunk.sequence.needs_prompt_logprobs


def _token_ids(batch: Batch) -> Int64s:
    chunks, num_decodes = batch.chunks, batch.num_decodes
    token_ids = [chunk.sequence.token_ids[chunk.start] for chunk in chunks[:num_decodes]]
    for chunk in chunks[num_decodes:]:
        token_ids += chunk.sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens]
    return np.array(token_ids, np.int64)


def _logit_rows(batch: Batch, cu_seqlens: Int32s) -> Int64s:
    rows: list[int] = []
    for chunk, first, end in zip(batch.chunks, cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False):
        if wants_prompt_logits(chunk):
            rows += range(first, end)
        elif chunk.samples:
            rows.append(end - 1)
    return np.array(rows, np.int64)
