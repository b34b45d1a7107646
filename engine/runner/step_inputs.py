"""One step as plain arrays: what rank 0 plans and every tensor-parallel rank computes.

Rank 0 builds the arrays from the scheduler's batch; the others get them as one msgpack message.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.engine.scheduler.plan import Batch, PageCopy, ScheduledChunk
from baton.engine.scheduler.sequence import Sequence

# The page tables of running sequences as rows of one array, so that a step copies only what changed.

FIRST_WIDTH: Final = 16


@dataclass(slots=True)
class _Row:
    index: int
    version: int  # of the sequence's page table
    num_pages: int  # filled in so far


class PageTableRows:
    """Row `index` is [0, num_pages) valid, zeros or leftovers beyond."""

    def __init__(self, max_num_seqs: int, max_pages: int) -> None:
        self._table = np.zeros((max_num_seqs, min(FIRST_WIDTH, max_pages)), np.int32)
        self._max_pages = max_pages
        self._rows: dict[Sequence, _Row] = {}  # by identity: a key may be used again
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def gather(self, sequences: Ordered[Sequence]) -> NDArray[np.int32]:
        """[num_sequences, pages of the longest one]: the tables as they are now, a copy."""
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


Int64s: TypeAlias = NDArray[np.int64]
Int32s: TypeAlias = NDArray[np.int32]


class StepArrays(NamedTuple):
    """See ModelInput for the meaning and the order of the rows."""

    token_ids: Int64s
    positions: Int64s
    slots: Int64s
    cu_seqlens: Int32s
    context_lens: Int32s
    page_table: Int32s  # [num_sequences, pages of the longest one]
    logit_rows: Int64s
    num_decodes: int
    max_seqlen_q: int
    copies_to_host: tuple[PageCopy, ...]
    copies_to_device: tuple[PageCopy, ...]
    step: int = 0  # its number, see engine/cache/step_marks.py
    num_layer_groups: int = 0  # in how many the layers are told of as they are written; 0: not at all


class _Message(msgspec.Struct, array_like=True):
    arrays: dict[str, bytes]
    num_decodes: int
    max_seqlen_q: int
    copies_to_host: tuple[PageCopy, ...]
    copies_to_device: tuple[PageCopy, ...]
    step: int
    num_layer_groups: int


class StepBuilder:
    """Turns batches into arrays, keeping the page tables of running sequences from step to step."""

    def __init__(self, page_size: int, max_num_seqs: int, max_pages: int) -> None:
        self._page_size = page_size
        self._tables = PageTableRows(max_num_seqs, max_pages)

    def build(self, batch: Batch) -> StepArrays:
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
        return _pad(arrays, batch.num_padded_tokens) if batch.num_padded_tokens else arrays


def wants_prompt_logits(chunk: ScheduledChunk) -> bool:
    """Whether the logits of every position of the chunk are wanted, not only of the one that samples."""
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


def encode(arrays: StepArrays) -> bytes:
    """A message for the ranks that follow; `decode` restores it."""
    fields = {
        name: value.tobytes() for name, value in arrays._asdict().items() if isinstance(value, np.ndarray)
    }
    message = _Message(
        fields,
        arrays.num_decodes,
        arrays.max_seqlen_q,
        arrays.copies_to_host,
        arrays.copies_to_device,
        arrays.step,
        arrays.num_layer_groups,
    )
    return msgspec.msgpack.encode(message)


def decode(message: bytes) -> StepArrays:
    received = msgspec.msgpack.decode(message, type=_Message)

    def int64s(name: str) -> Int64s:
        return np.frombuffer(bytearray(received.arrays[name]), np.int64)

    def int32s(name: str) -> Int32s:
        return np.frombuffer(bytearray(received.arrays[name]), np.int32)

    context_lens, page_table = int32s("context_lens"), int32s("page_table")
    num_pages = len(page_table) // max(1, len(context_lens))  # a step may have copies and no sequence
    return StepArrays(
        token_ids=int64s("token_ids"),
        positions=int64s("positions"),
        slots=int64s("slots"),
        cu_seqlens=int32s("cu_seqlens"),
        context_lens=context_lens,
        page_table=page_table.reshape(len(context_lens), num_pages),
        logit_rows=int64s("logit_rows"),
        num_decodes=received.num_decodes,
        max_seqlen_q=received.max_seqlen_q,
        copies_to_host=received.copies_to_host,
        copies_to_device=received.copies_to_device,
        step=received.step,
        num_layer_groups=received.num_layer_groups,
    )


def padding_step(num_tokens: int, num_rows: int) -> StepArrays:
    """A step of nothing but padding, `num_tokens` long, that asks for the logits of up to `num_rows` rows."""
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
    return _pad(empty, num_tokens)


def _pad(arrays: StepArrays, num_rows: int) -> StepArrays:
    """Add one sequence of `num_rows` tokens that are computed, stored nowhere and looked at by nobody."""
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
