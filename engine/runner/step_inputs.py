"""The inputs of one step, built from the scheduler's batch.

1. `StepBuilder` on rank 0 makes `StepArrays`; the other ranks get them as one msgpack message.
2. `ModelInput` has the same rows as tensors, for a forward pass. On a CPU they share memory with the arrays.
3. To a GPU all arrays go in one asynchronous copy: `StepUploads` places any step, `GraphInputs` writes
   steps to the addresses that CUDA graphs read.

Shapes: T tokens, B sequences, P pages of the longest sequence, R rows with wanted logits.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple, Self, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.adapters import AdapterConfig, AdapterFiles
from baton.engine.scheduler.sequence import Batch, Int64s, PageCopy, Sequence
from baton.kernels.ragged_attention import RaggedBatch
from baton.kernels.sample import SamplingTensors

Int32s: TypeAlias = NDArray[np.int32]
# Token ids, positions, slots, rows of logits, cumulative lengths, lengths of contexts: see `StepArrays`.
FlatArrays: TypeAlias = tuple[Int64s, Int64s, Int64s, Int64s, Int32s, Int32s]


NO_SLOTS: Final[Int32s] = np.zeros(0, np.int32)


class StepArrays(NamedTuple):
    """One step as plain arrays; ModelInput describes the rows."""

    token_ids: Int64s
    positions: Int64s
    slots: Int64s
    logit_rows: Int64s
    cu_seqlens: Int32s
    context_lens: Int32s
    page_table: Int32s  # [B, P]
    num_decodes: int
    max_seqlen_q: int
    copies_to_host: tuple[PageCopy, ...]
    copies_to_device: tuple[PageCopy, ...]
    step: int = 0  # the number of the step, see `mark_of`
    # Tokens that the last step sampled. A negative token id -1 - i of a decode is the i-th of them.
    num_last_tokens: int = 0
    num_layer_groups: int = 0  # groups of layers to report as they are written; 0: none
    adapter_slots: Int32s = NO_SLOTS  # the adapter of each token, see `AdapterRows`; empty: none has one
    # Slots that change before the step; None: the slot is free from now on. Rank 0 has changed its own.
    adapters: tuple[tuple[int, AdapterFiles | None], ...] = ()
    # In a pipeline, the parameters with which the last stage draws a token for each row; None: rank 0 draws.
    sampling: SamplingTensors | None = None

    @property
    def flat(self) -> tuple[Int64s | Int32s, ...]:
        """The arrays of one dimension, as `FlatArrays`."""
        return self[:6]


def encode(arrays: StepArrays) -> bytes:
    """A message for the other ranks; `decode` restores the arrays."""
    return _ENCODER.encode(arrays)


def decode(message: bytes) -> StepArrays:
    """The arrays of a message, writable."""
    arrays = StepArrays(*_DECODER.decode(message))
    num_seqs = len(arrays.context_lens)
    num_pages = len(arrays.page_table) // max(1, num_seqs)  # a step may have copies and no sequence
    return arrays._replace(
        page_table=arrays.page_table.reshape(num_seqs, num_pages),
        adapters=tuple((slot, _adapter_files(fields)) for slot, fields in arrays.adapters),
        sampling=_sampling(arrays.sampling),
    )


def _adapter_files(fields: Any) -> AdapterFiles | None:
    if fields is None:
        return None
    path, config, weights, digest = fields
    return AdapterFiles(path, AdapterConfig(*config), weights, digest)


def _sampling(fields: Any) -> SamplingTensors | None:
    if fields is None:
        return None
    values: dict[str, Any] = {
        name: value if isinstance(value, bool) else torch.from_numpy(value) for name, value in fields.items()
    }
    return SamplingTensors(**values)


FLOAT: Final = 64  # added to the code of an array of floats, which is the size of its elements


def _encode_array(array: Any) -> msgspec.msgpack.Ext:
    values = array.numpy() if isinstance(array, Tensor) else array
    return msgspec.msgpack.Ext(values.itemsize + FLOAT * (values.dtype.kind == "f"), values.tobytes())


def _decode_array(code: int, content: memoryview) -> NDArray[Any]:
    return np.frombuffer(bytearray(content), f"f{code - FLOAT}" if code > FLOAT else f"i{code}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_DECODER = msgspec.msgpack.Decoder(list, ext_hook=_decode_array)


def fill_in(token_ids_T: Tensor, last_tokens_R: Tensor) -> None:
    """Replace each -1 - i by the i-th of the last step's tokens, in place; never wait for a GPU.

    A sequence with logits that were not numbers has no token. It gets token 0; what it computes is dropped.
    """
    rows_T = torch.clamp(-1 - token_ids_T, min=0)
    last_T = last_tokens_R[rows_T].clamp_(min=0)
    torch.where(token_ids_T < 0, last_T, token_ids_T, out=token_ids_T)


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


class ModelInput(NamedTuple):
    """The tokens of one step and the slots of their keys and values.

    Sequences lie one after another, without padding; `attention` says where.
    """

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    slots_T: Tensor  # int64, page * page_size + offset
    logit_rows_R: Tensor  # int64, ascending
    attention: RaggedBatch

    @classmethod
    def of_tensors(
        cls, flat: Iterable[Tensor], page_table_BP: Tensor, num_decodes: int, max_seqlen_q: int
    ) -> Self:
        """flat: as `StepArrays.flat`."""
        token_ids_T, positions_T, slots_T, logit_rows_R, cu_seqlens_B1, context_lens_B = flat
        attention = RaggedBatch(
            cu_seqlens_B1=cu_seqlens_B1,
            context_lens_B=context_lens_B,
            page_table_BP=page_table_BP,
            num_decodes=num_decodes,
            max_seqlen_q=max_seqlen_q,
        )
        return cls(token_ids_T, positions_T, slots_T, logit_rows_R, attention)

    @classmethod
    def from_arrays(cls, arrays: StepArrays) -> Self:
        """Tensors on the CPU that share memory with the arrays."""
        flat, page_table_BP = map(torch.from_numpy, arrays.flat), torch.from_numpy(arrays.page_table)
        return cls.of_tensors(flat, page_table_BP, arrays.num_decodes, arrays.max_seqlen_q)


# Uploads to a GPU.
#
# The arrays of a step are packed into one pinned buffer of the host, and one asynchronous copy on the current
# stream brings them to one buffer on the device, of which the tensors of the step are views. Steps follow one
# another on that stream, so one device buffer serves all. Two host buffers take turns: the host never writes
# bytes that a copy still reads.

# Bytes; every array and every row of a page table starts at a multiple. Triton compiles a kernel once more
# for a pointer that is aligned to less.
ALIGNMENT: Final = 16
NUM_HOST_BUFFERS: Final = 2


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _row_entries(num_pages: int) -> int:
    """int32 entries from one row of a packed page table to the next."""
    return _aligned(4 * num_pages) // 4


class _UploadBuffers:
    """One buffer on the device, and the host buffers that take turns to fill it.

    Host buffers are pinned if the device is a GPU. Numbers of bytes are multiples of `ALIGNMENT`.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_cuda, num_words = device.type == "cuda", num_bytes // 8
        self.num_bytes = num_bytes
        # In words: on a CPU torch starts threads for copies of more than 32,768 elements.
        self._device_words = torch.zeros(num_words, dtype=torch.int64, device=device)
        self.device_bytes = self._device_words.view(torch.uint8)
        self._host_words = [
            torch.empty(num_words, dtype=torch.int64, pin_memory=is_cuda) for _ in range(NUM_HOST_BUFFERS)
        ]
        self.hosts: list[NDArray[np.uint8]] = [words.numpy().view(np.uint8) for words in self._host_words]
        self._copied = [torch.cuda.Event() if is_cuda else None for _ in self.hosts]
        self._turn = 0

    def take(self) -> int:
        """The index of a host buffer that may be written now: no copy reads it, as a rule at once."""
        self._turn = (self._turn + 1) % len(self.hosts)
        copied = self._copied[self._turn]
        if copied is not None and not copied.query():
            copied.synchronize()
        return self._turn

    def send(self, turn: int, num_bytes: int) -> None:
        """Copy the start of a host buffer to the start of the device buffer, asynchronously to a GPU."""
        num_words, copied = num_bytes // 8, self._copied[turn]
        self._device_words[:num_words].copy_(self._host_words[turn][:num_words], non_blocking=True)
        if copied is not None:
            copied.record()


class StepUploads:
    """Places steps of any kind on a device. The tensors of a step are valid until the next upload."""

    def __init__(self, max_num_tokens: int, largest_batch: int, max_pages: int, device: torch.device) -> None:
        """Room for steps of these sizes; a larger step, such as a padded static batch, makes more room."""
        rows = padding_step(max_num_tokens, max_num_tokens, num_decodes=largest_batch)
        table_bytes = 4 * (largest_batch + 1) * _row_entries(max_pages)
        self._device = device
        self._buffers = _UploadBuffers(_layout(rows)[-1] + table_bytes, device)

    def upload(self, arrays: StepArrays) -> ModelInput:
        """The step as tensors on the device; nothing is waited for."""
        *starts, table_start = _layout(arrays)
        num_seqs, width = arrays.page_table.shape
        row_entries = _row_entries(width)
        end = table_start + 4 * num_seqs * row_entries
        if end > self._buffers.num_bytes:
            self._buffers = _UploadBuffers(2 * end, self._device)
        turn = self._buffers.take()
        host, device = self._buffers.hosts[turn], self._buffers.device_bytes
        for array, start in zip(arrays.flat, starts, strict=True):
            host[start : start + array.nbytes].view(array.dtype)[:] = array
        host[table_start:end].view(np.int32).reshape(num_seqs, row_entries)[:, :width] = arrays.page_table
        self._buffers.send(turn, end)
        tensors = [
            device[start : start + array.nbytes].view(torch.int64 if array.itemsize == 8 else torch.int32)
            for array, start in zip(arrays.flat, starts, strict=True)
        ]
        page_table_BP = device[table_start:end].view(torch.int32).view(num_seqs, row_entries)[:, :width]
        return ModelInput.of_tensors(tensors, page_table_BP, arrays.num_decodes, arrays.max_seqlen_q)


def _layout(arrays: StepArrays) -> list[int]:
    """The first byte of each of the flat arrays, then of the page table."""
    starts = [0]
    for array in arrays.flat:
        starts.append(_aligned(starts[-1] + array.nbytes))
    return starts


MAX_DRAFT_ROWS: Final = 64  # of logits in a graph; a step with more drafts has no graph


class GraphShape(NamedTuple):
    """The numbers of rows that a CUDA graph computes; a step is padded up to them."""

    num_decodes: int
    num_prompts: int = 0  # sequences after the decodes; the last one is always padding
    num_tokens: int = 0  # of all prompts together

    @property
    def num_seqs(self) -> int:
        return self.num_decodes + self.num_prompts

    @property
    def num_rows(self) -> int:
        return self.num_decodes + self.num_tokens

    @property
    def num_logits(self) -> int:
        """Rows of logits: one for each sequence and, beside prompts' tokens, some for drafts.

        With prompts, fewer than `num_rows`: that many logit rows mean every row, in order.
        """
        return min(self.num_rows - 1, self.num_seqs + MAX_DRAFT_ROWS) if self.num_tokens else self.num_seqs


class GraphInputs:
    """The inputs of steps at addresses that never change, so that CUDA graphs can read them.

    1. Arrays have room for the largest shape, so that all graphs find them at the same places.
    2. Rows of decodes come first, then padding up to the shape's number of decodes, then the prompts' rows.
       Padding after them belongs to one more sequence. Padding has slot -1 and context length 0.
    3. Packed page tables are as wide as the longest sequence of the step needs, and graphs read one table of
       `max_pages` columns: a copy on the device spreads the rows.

    Until the first `write` all rows are padding.
    """

    def __init__(self, shapes: Iterable[GraphShape], max_pages: int, device: torch.device) -> None:
        self.max_rows = max(shape.num_rows for shape in shapes)
        self.max_seqs = max(shape.num_seqs for shape in shapes)
        self.max_logits = max(shape.num_logits for shape in shapes)
        self._max_pages = max_pages
        wide, most = 8 * self.max_rows, self.max_seqs
        sizes = (wide, wide, wide, 8 * self.max_logits, 4 * (most + 1), 4 * most)
        self._starts = list(accumulate(map(_aligned, sizes), initial=0))  # the last one: the page table
        self._buffers = _UploadBuffers(self._starts[-1] + 4 * most * _row_entries(max_pages), device)
        self._host_rows = [self._rows_of(host) for host in self._buffers.hosts]
        self._page_table_BP = torch.zeros((most, max_pages), dtype=torch.int32, device=device)
        self._arange_B1 = torch.arange(most + 1, device=device)
        self._arange_int32_B1 = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._spread_shape = (0, 0)
        self._spread = (self._page_table_BP, self._page_table_BP)  # target and source of the last spread
        self._part(2, self.max_rows, torch.int64).fill_(-1)  # slots

    def step(self, shape: GraphShape) -> ModelInput:
        """The static tensors of a step of this shape."""
        num_rows, num_seqs, wide, narrow = shape.num_rows, shape.num_seqs, torch.int64, torch.int32
        if shape.num_tokens:
            starts = self._part(3, shape.num_logits, wide), self._part(4, num_seqs + 1, narrow)
        else:
            starts = self._arange_B1[:num_seqs], self._arange_int32_B1[: num_seqs + 1]
        rows = (self._part(index, num_rows, wide) for index in range(3))
        flat = *rows, *starts, self._part(5, num_seqs, narrow)
        tables_BP, max_seqlen_q = self._page_table_BP[:num_seqs], shape.num_tokens or 1
        return ModelInput.of_tensors(flat, tables_BP, shape.num_decodes, max_seqlen_q)

    def write(self, arrays: StepArrays, shape: GraphShape, last_tokens_R: Tensor | None = None) -> None:
        """Write a step, padded to the shape, in one upload; wait for nothing.

        last_tokens_R: on the device, for token ids that refer to them.
        The step has no more decodes, tokens and logits than the shape, and fewer prompts: one is padding.
        """
        width = arrays.page_table.shape[1]
        if width > self._max_pages:
            raise ValueError(f"a page table of {width} pages does not fit in graphs of {self._max_pages}")
        turn, num_decodes = self._buffers.take(), arrays.num_decodes
        token_ids, positions, slots, logit_rows, cu_seqlens, context_lens = self._host_rows[turn]
        first, last = shape.num_decodes, shape.num_rows
        _spread(token_ids, arrays.token_ids, num_decodes, first, last, 0)
        _spread(positions, arrays.positions, num_decodes, first, last, 0)
        _spread(slots, arrays.slots, num_decodes, first, last, -1)
        _spread(context_lens, arrays.context_lens, num_decodes, first, shape.num_seqs, 0)
        if shape.num_tokens:
            _write_prompts(cu_seqlens, logit_rows, arrays, shape)
        self._write_page_table(turn, arrays, first)
        if last_tokens_R is not None:
            fill_in(self._part(0, num_decodes, torch.int64), last_tokens_R)

    def _write_page_table(self, turn: int, arrays: StepArrays, first_prompt: int) -> None:
        """Pack the tables and upload everything; the tables of prompts begin at row `first_prompt`."""
        num_decodes, (num_seqs, width) = arrays.num_decodes, arrays.page_table.shape
        num_rows = num_decodes if num_seqs == num_decodes else first_prompt + num_seqs - num_decodes
        row_entries, start = _row_entries(width), self._starts[-1]
        end = start + 4 * num_rows * row_entries
        table = self._buffers.hosts[turn][start:end].view(np.int32).reshape(num_rows, row_entries)
        table[:num_decodes, :width] = arrays.page_table[:num_decodes]
        table[first_prompt:, :width] = arrays.page_table[num_decodes:]
        self._buffers.send(turn, end)
        if self._spread_shape != (num_rows, width):
            packed = self._buffers.device_bytes[start:end].view(torch.int32).view(num_rows, row_entries)
            self._spread = self._page_table_BP[:num_rows, :width], packed[:, :width]
            self._spread_shape = num_rows, width
        target, source = self._spread
        target.copy_(source)

    def _part(self, index: int, length: int, dtype: torch.dtype) -> Tensor:
        """The first `length` elements of an array on the device."""
        start = self._starts[index]
        return self._buffers.device_bytes[start : start + length * dtype.itemsize].view(dtype)

    def _rows_of(self, host: NDArray[np.uint8]) -> FlatArrays:
        """The header of one host buffer, as arrays of the largest size."""
        parts = [host[start:end] for start, end in pairwise(self._starts)]
        token_ids, positions, slots, logit_rows = (part.view(np.int64) for part in parts[:4])
        cu_seqlens, context_lens = (part.view(np.int32) for part in parts[4:])
        return token_ids, positions, slots, logit_rows, cu_seqlens, context_lens


def _spread(
    target: Int64s | Int32s, source: Int64s | Int32s, split: int, start: int, end: int, padding: int
) -> None:
    """Write source[:split], padding, source[split:] from `start` on, and padding up to `end`."""
    if split == len(source):
        target[:split], target[split:end] = source, padding
        return
    stop = start + len(source) - split
    target[:split], target[split:start] = source[:split], padding
    target[start:stop], target[stop:end] = source[split:], padding


def _write_prompts(cu_seqlens: Int32s, logit_rows: Int64s, arrays: StepArrays, shape: GraphShape) -> None:
    """Write where the sequences begin, and which rows yield logits."""
    num_decodes, first = arrays.num_decodes, shape.num_decodes
    num_seqs = first + len(arrays.context_lens) - num_decodes
    cu_seqlens[: first + 1] = np.arange(first + 1)
    cu_seqlens[first + 1 : num_seqs + 1] = arrays.cu_seqlens[num_decodes + 1 :] + (first - num_decodes)
    cu_seqlens[num_seqs + 1 : shape.num_seqs + 1] = shape.num_rows
    num_logits, moved = len(arrays.logit_rows), arrays.logit_rows >= num_decodes
    logit_rows[:num_logits] = arrays.logit_rows + moved * (first - num_decodes)
    logit_rows[num_logits : shape.num_logits] = shape.num_rows - 1  # ascending, as the others


# Page tables as rows.

FIRST_WIDTH: Final = 16


@dataclass(slots=True)
class _Row:
    version: int  # of the sequence's page table
    num_pages: int  # valid entries


class PageTableRows:
    """The page tables of a step's sequences as rows of one array, so that a step writes only the changes.

    Of each row [0, num_pages) is valid; zeros or old entries follow.
    """

    def __init__(self, largest_batch: int, max_pages: int) -> None:
        self._table = np.zeros((largest_batch, min(FIRST_WIDTH, max_pages)), np.int32)
        self._max_pages = max_pages
        self._sequences: list[Sequence] = []  # of the last call, in the order of their rows
        self._rows: list[_Row] = []
        self._width = 0

    def gather(self, sequences: list[Sequence], changed: Ordered[int] | None = None) -> Int32s:
        """[num_sequences, pages of the longest one]: the present tables, until the next call.

        changed: the sequences are those of the last call, and only these rows may have changed. None: all
        may have.
        """
        if changed is None:
            self._arrange(sequences)
            changed = range(len(sequences))
        for index in changed:
            row, sequence = self._rows[index], sequences[index]
            if row.num_pages != len(sequence.page_table) or row.version != sequence.table_version:
                self._update(index, sequence)
        return self._table[: len(sequences), : self._width]

    def _arrange(self, sequences: list[Sequence]) -> None:
        """Move the rows of sequences that stay to their new places."""
        num_seqs = len(sequences)
        if num_seqs > len(self._table):
            raise ValueError(f"{num_seqs} sequences in a step planned for {len(self._table)}")
        if sequences != self._sequences:
            old, width = self._rows, self._width
            places = {sequence: index for index, sequence in enumerate(self._sequences)}  # by identity
            sources = [places.get(sequence, -1) for sequence in sequences]
            self._table[:num_seqs, :width] = self._table[sources, :width]
            pairs = zip(sources, sequences, strict=True)
            self._rows = [_Row(new.table_version, 0) if at < 0 else old[at] for at, new in pairs]
            self._sequences = sequences
        self._width = max((len(sequence.page_table) for sequence in sequences), default=0)
        self._widen()

    def _update(self, index: int, sequence: Sequence) -> None:
        row, num_pages = self._rows[index], len(sequence.page_table)
        if num_pages > self._width:
            self._width = num_pages
            self._widen()
        goes_on = row.version == sequence.table_version and row.num_pages <= num_pages
        first = row.num_pages if goes_on else 0
        if first + 1 == num_pages:  # as a rule, and a list is slower
            self._table[index, first] = sequence.page_table[first]
        else:
            self._table[index, first:num_pages] = sequence.page_table[first:]
        row.version, row.num_pages = sequence.table_version, num_pages

    def _widen(self) -> None:
        old = self._table
        if self._width <= old.shape[1]:
            return
        wider = min(self._max_pages, max(self._width, 2 * old.shape[1]))
        self._table = np.zeros((len(old), wider), np.int32)
        self._table[:, : old.shape[1]] = old


class StepBuilder:
    """Turns batches into arrays, which are valid until the next step is built."""

    def __init__(
        self, page_size: int, largest_batch: int, max_pages: int, *, shares_steps: bool = False
    ) -> None:
        """page_size: a power of two. shares_steps: other builders build the steps between two of this one."""
        self._page_size = page_size
        self._shares_steps = shares_steps
        self._versions: list[int] = []  # of the page tables in this builder's last step
        self._tables = PageTableRows(largest_batch, max_pages)
        self._num_pure_decodes = 0  # the last steps, one after another
        self._sequences: list[Sequence] = []  # of the last step, if that was one
        self._page_starts: list[int] = []  # rows of that step with the first token of a page
        self._slots = np.zeros(0, np.int64)
        self._context_lens = np.zeros(0, np.int32)
        self._arange = np.arange(largest_batch + 1)
        self._arange_int32 = self._arange.astype(np.int32)

    def build(
        self, batch: Batch, *, step: int = 0, num_last_tokens: int = 0, num_layer_groups: int = 0
    ) -> StepArrays:
        """The arrays of one step. The numbers: as in `StepArrays`."""
        is_decode = batch.is_pure_decode
        flat, page_table = self._decode_rows(batch) if is_decode else self._mixed_rows(batch)
        self._num_pure_decodes = self._num_pure_decodes + 1 if is_decode else 0
        arrays = StepArrays(
            *flat,
            page_table,
            num_decodes=batch.num_decodes,
            max_seqlen_q=min(1, len(batch.sequences)) if is_decode else max(batch.lengths, default=0),
            copies_to_host=batch.copies_to_host,
            copies_to_device=batch.copies_to_device,
            step=step,
            num_last_tokens=num_last_tokens,
            num_layer_groups=num_layer_groups,
        )
        return pad(arrays, batch.num_padded_tokens) if batch.num_padded_tokens else arrays

    def _decode_rows(self, batch: Batch) -> tuple[FlatArrays, Int32s]:
        """(flat arrays, page table)."""
        sequences, positions, num_seqs = batch.sequences, batch.starts, len(batch.sequences)
        # The same sequences as in the last step are each one token further.
        goes_on = bool(sequences and self._num_pure_decodes) and sequences == self._sequences
        if goes_on and self._shares_steps:
            versions = [sequence.table_version for sequence in sequences]
            goes_on = versions == self._versions and np.array_equal(positions, self._context_lens)
        if goes_on and sequences[0].token_ids[-1] < 0:  # all tokens are still to come, in this order
            token_ids = ~self._arange[:num_seqs]
        else:
            token_ids = np.array([sequence.token_ids[-1] for sequence in sequences], np.int64)
        page_starts: list[int] = (positions & (self._page_size - 1) == 0).nonzero()[0].tolist()
        if goes_on and self._num_pure_decodes > 1:
            # A decode's page table changes before the first token of a page, when a page is appended, and
            # when a commit replaces full pages, which may come after the next step is built.
            page_table = self._tables.gather(sequences, page_starts + self._page_starts)
            slots, context_lens = self._slots + 1, self._context_lens + 1
            for row in page_starts:
                slots[row] = sequences[row].page_table[positions[row] // self._page_size] * self._page_size
        else:
            page_table = self._tables.gather(sequences)
            slots = self._slots_of(page_table, self._arange[:num_seqs], positions)
            context_lens = (positions + 1).astype(np.int32)
        self._sequences, self._page_starts = sequences, page_starts
        self._slots, self._context_lens = slots, context_lens
        if self._shares_steps:
            self._versions = [sequence.table_version for sequence in sequences]
        cu_seqlens, logit_rows = self._arange_int32[: num_seqs + 1], self._arange[:num_seqs]
        return (token_ids, positions, slots, logit_rows, cu_seqlens, context_lens), page_table

    def _slots_of(self, page_table: Int32s, rows: Int64s, positions: Int64s) -> Int64s:
        """The slots of these positions of the rows' sequences."""
        pages = page_table[rows, positions // self._page_size].astype(np.int64)
        return pages * self._page_size + positions % self._page_size

    def _mixed_rows(self, batch: Batch) -> tuple[FlatArrays, Int32s]:
        num_seqs = len(batch.sequences)
        starts, lengths = batch.starts, np.array(batch.lengths, np.int64)
        cu_seqlens = np.zeros(num_seqs + 1, np.int32)
        np.cumsum(lengths, out=cu_seqlens[1:])
        owner = np.repeat(np.arange(num_seqs), lengths)  # row -> chunk
        positions = np.arange(cu_seqlens[-1]) + (starts - cu_seqlens[:-1])[owner]
        page_table = self._tables.gather(batch.sequences)
        slots = self._slots_of(page_table, owner, positions)
        context_lens, logit_rows = (starts + lengths).astype(np.int32), _logit_rows(batch, cu_seqlens)
        return (_token_ids(batch), positions, slots, logit_rows, cu_seqlens, context_lens), page_table


def padding_step(num_tokens: int, num_rows: int, *, num_decodes: int = 0, num_pages: int = 1) -> StepArrays:
    """A step of padding that stores nothing: `num_decodes` decodes, then one sequence of `num_tokens` tokens.

    Asks for the logits of up to `num_rows` rows. The page table has `num_pages` columns.
    """
    total, num_seqs = num_decodes + num_tokens, num_decodes + (num_tokens > 0)
    zeros, cu_seqlens = np.zeros(total, np.int64), np.arange(num_seqs + 1, dtype=np.int32)
    cu_seqlens[-1] = total
    return StepArrays(
        token_ids=zeros,
        positions=zeros.copy(),
        slots=zeros - 1,
        cu_seqlens=cu_seqlens,
        context_lens=np.zeros(num_seqs, np.int32),
        page_table=np.zeros((num_seqs, num_pages), np.int32),
        logit_rows=np.arange(min(num_rows, total)),
        num_decodes=num_decodes,
        max_seqlen_q=num_tokens or 1,
        copies_to_host=(),
        copies_to_device=(),
    )


def warmup_steps(max_num_tokens: int, largest_batch: int, max_pages: int) -> Iterator[StepArrays]:
    """Steps of padding that make a GPU compile every kernel that steps outside CUDA graphs can need.

    Kernels choose their compile-time constants by the numbers of tokens, of logits and of tokens of the
    longest chunk: the smallest, the largest and the powers of two between them meet every choice. Unless the
    number of decodes is a multiple of 4, the arrays of the other sequences begin at addresses of less
    alignment. Prompt logprobs ask for the logits of every token.
    """
    for num_decodes in powers_of_two(min(largest_batch, max_num_tokens - 1)):
        yield padding_step(1, num_decodes + 1, num_decodes=num_decodes, num_pages=max_pages)
    for num_tokens in powers_of_two(max_num_tokens):
        for num_decodes in (0, 1):
            num_rows = num_tokens + num_decodes
            yield padding_step(num_tokens, num_rows, num_decodes=num_decodes, num_pages=max_pages)


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4 and so on below the limit, then the limit."""
    return [1 << power for power in range((limit - 1).bit_length())] + [limit] if limit > 0 else []


def _token_ids(batch: Batch) -> Int64s:
    chunks, num_decodes = batch.chunks, batch.num_decodes
    token_ids = [chunk.sequence.token_ids[chunk.start] for chunk in chunks[:num_decodes]]
    for chunk in chunks[num_decodes:]:
        token_ids += chunk.sequence.token_ids[chunk.start : chunk.start + chunk.num_own_tokens]
        token_ids += chunk.drafts
    return np.array(token_ids, np.int64)


def _logit_rows(batch: Batch, cu_seqlens: Int32s) -> Int64s:
    rows: list[int] = []
    for chunk, first, end in zip(batch.chunks, cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False):
        if chunk.sequence.needs_prompt_logprobs:
            rows += range(first, end)
        elif chunk.samples:
            rows += range(end - 1 - len(chunk.drafts), end)
    return np.array(rows, np.int64)
