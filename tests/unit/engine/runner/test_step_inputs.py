"""The arrays of a step against a builder that looks at one token at a time."""

from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.runner.step_inputs import (
    ALIGNMENT,
    FIRST_WIDTH,
    ModelInput,
    PageTableRows,
    StepArrays,
    StepBuilder,
    StepUploads,
    decode,
    encode,
)
from baton.engine.scheduler.sequence import Batch, PageCopy, ScheduledChunk, Sequence
from tests.batches import make_batch, make_sequence, rest_of

MAX_TOKENS, MAX_SEQUENCES = 60, 6
copies = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=3).map(tuple)


@dataclass(frozen=True)
class Life:
    """A sequence as hypothesis draws it, and the chunks that it is computed in."""

    prompt_length: int
    chunk_sizes: tuple[int, ...]
    prompt_logprobs: int | None
    finds_known_pages: bool


lives = st.lists(
    st.builds(
        Life,
        st.integers(1, MAX_TOKENS // 2),
        st.lists(st.sampled_from((1, 2, 7, 13)), min_size=1, max_size=6).map(tuple),
        st.sampled_from((None, None, 0)),
        st.booleans(),
    ),
    max_size=MAX_SEQUENCES,
)


class Ledger:
    """Pages that never repeat, so that every slot names its sequence."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.next_page = 5000

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        while len(sequence.page_table) * self.page_size < num_tokens:
            sequence.page_table.append(self._take())

    def commit(self, chunk: ScheduledChunk) -> None:
        """Replace full pages of the chunk, as the prefix cache does where it knows other pages."""
        sequence, last = chunk.sequence, chunk.start + chunk.num_tokens
        for index in range(chunk.start // self.page_size, last // self.page_size):
            sequence.page_table[index] = self._take()
            sequence.table_version += MAX_SEQUENCES

    def _take(self) -> int:
        self.next_page -= 7
        return self.next_page


def brute_force(batch: Batch, page_size: int) -> StepArrays:
    token_ids, positions, slots, logit_rows = [], [], [], []
    cu_seqlens, context_lens = [0], []
    for chunk in batch.chunks:
        sequence = chunk.sequence
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            token_ids.append(sequence.token_ids[position])
            positions.append(position)
            slots.append(sequence.page_table[position // page_size] * page_size + position % page_size)
            is_last = position == sequence.num_tokens - 1
            if is_last or chunk.sequence.needs_prompt_logprobs:
                logit_rows.append(len(token_ids) - 1)
        cu_seqlens.append(len(token_ids))
        context_lens.append(chunk.start + chunk.num_tokens)
    num_pages = max((len(chunk.sequence.page_table) for chunk in batch.chunks), default=0)
    rows = [chunk.sequence.page_table + [0] * num_pages for chunk in batch.chunks]
    return StepArrays(
        token_ids=np.array(token_ids, np.int64),
        positions=np.array(positions, np.int64),
        slots=np.array(slots, np.int64),
        cu_seqlens=np.array(cu_seqlens, np.int32),
        context_lens=np.array(context_lens, np.int32),
        page_table=np.array([row[:num_pages] for row in rows], np.int32).reshape(len(rows), num_pages),
        logit_rows=np.array(logit_rows, np.int64),
        num_decodes=batch.num_decodes,
        max_seqlen_q=max((chunk.num_tokens for chunk in batch.chunks), default=0),
        copies_to_host=batch.copies_to_host,
        copies_to_device=batch.copies_to_device,
    )


def assert_equal(got: StepArrays, expected: StepArrays, batch: Batch) -> None:
    for name, value in got._asdict().items():
        other = getattr(expected, name)
        if name == "page_table":  # past a sequence's own pages lies anything
            assert value.shape == other.shape
            for row, chunk in enumerate(batch.chunks):
                num_pages = len(chunk.sequence.page_table)
                assert value[row, :num_pages].tolist() == other[row, :num_pages].tolist()
        elif isinstance(value, np.ndarray):
            assert value.dtype == other.dtype and value.tolist() == other.tolist(), name
            assert value.flags.c_contiguous and value.flags.writeable
        else:
            assert value == other, name


def assert_identical(got: StepArrays, expected: StepArrays) -> None:
    for name, value in got._asdict().items():
        other = getattr(expected, name)
        if isinstance(value, np.ndarray):
            assert value.dtype == other.dtype and value.shape == other.shape
            assert value.tolist() == other.tolist(), name
            assert value.flags.writeable  # torch shares the memory, and warns of what it could not write
        elif name.startswith("copies"):
            assert [*map(tuple, value)] == [*map(tuple, other)]
        else:
            assert value == other, name


def tensors_of(step: ModelInput) -> list[torch.Tensor]:
    *rows, batch = step
    return [*rows, batch.cu_seqlens_B1, batch.context_lens_B, batch.page_table_BP]


def assert_uploaded(got: ModelInput, arrays: StepArrays) -> None:
    for tensor, other in zip(tensors_of(ModelInput.from_arrays(arrays)), tensors_of(got), strict=True):
        assert other.dtype == tensor.dtype and torch.equal(other, tensor)
        assert other.data_ptr() % ALIGNMENT == 0
    assert got.attention.num_decodes == arrays.num_decodes
    assert got.attention.max_seqlen_q == arrays.max_seqlen_q
    assert all(row.data_ptr() % ALIGNMENT == 0 for row in got.attention.page_table_BP)


@given(
    lives=lives,
    page_size=st.sampled_from((1, 4, 16)),
    to_host=copies,
    to_device=copies,
)
def test_random_steps_agree_with_one_token_at_a_time(
    lives: list[Life], page_size: int, to_host: tuple[PageCopy, ...], to_device: tuple[PageCopy, ...]
) -> None:
    ledger, builder = Ledger(page_size), StepBuilder(page_size, MAX_SEQUENCES, MAX_TOKENS)
    uploads = StepUploads(MAX_TOKENS, MAX_SEQUENCES, MAX_TOKENS, torch.device("cpu"))
    sequences = [
        make_sequence(
            str(i), range(100 * i, 100 * i + life.prompt_length), prompt_logprobs=life.prompt_logprobs
        )
        for i, life in enumerate(lives)
    ]
    for sequence, version in zip(sequences, range(MAX_SEQUENCES), strict=False):
        sequence.table_version = version  # of one scheduler, no two the same
    life_of = dict(zip(sequences, lives, strict=True))
    for turn in range(12):
        chunks = []
        for sequence, life in life_of.items():
            size = life.chunk_sizes[turn % len(life.chunk_sizes)]
            size = min(size, sequence.num_uncomputed_tokens)
            ledger.grow(sequence, sequence.num_computed_tokens + size)
            chunks.append(ScheduledChunk(sequence, sequence.num_computed_tokens, size))
        chunks.sort(key=lambda chunk: chunk.num_tokens > 1)
        is_pure_decode = all(chunk.num_tokens == 1 and chunk.samples for chunk in chunks)
        copies = {"copies_to_host": to_host, "copies_to_device": to_device}
        batch = make_batch(*chunks, is_pure_decode=is_pure_decode, **copies)
        built = builder.build(batch)
        assert_equal(built, brute_force(batch, page_size), batch)
        assert_identical(decode(encode(built)), built)
        assert_uploaded(uploads.upload(built), built)
        for chunk in chunks:
            if chunk.samples:
                chunk.sequence.token_ids.append(turn)
            chunk.sequence.num_computed_tokens += chunk.num_tokens
            if life_of[chunk.sequence].finds_known_pages:
                ledger.commit(chunk)


@given(num_padded=st.integers(1, 9), prompt_length=st.integers(1, 9))
def test_padding_is_one_more_sequence_without_slots(num_padded: int, prompt_length: int) -> None:
    sequence = make_sequence("s", range(prompt_length))
    Ledger(4).grow(sequence, prompt_length)
    chunk = ScheduledChunk(sequence, 0, prompt_length)
    plain = StepBuilder(4, 2, 8).build(make_batch(chunk))
    padded = StepBuilder(4, 2, 8).build(make_batch(chunk, num_padded_tokens=num_padded))
    assert padded.token_ids.tolist() == [*plain.token_ids.tolist(), *[0] * num_padded]
    assert padded.positions.tolist() == [*plain.positions.tolist(), *[0] * num_padded]
    assert padded.slots.tolist() == [*plain.slots.tolist(), *[-1] * num_padded]
    assert padded.cu_seqlens.tolist() == [0, prompt_length, prompt_length + num_padded]
    assert padded.context_lens.tolist() == [prompt_length, 0]
    assert padded.page_table.shape == (2, plain.page_table.shape[1])
    assert padded.logit_rows.tolist() == plain.logit_rows.tolist()
    assert padded.num_decodes == plain.num_decodes
    assert padded.max_seqlen_q == max(prompt_length, num_padded)
    assert_identical(decode(encode(padded)), padded)


def test_copies_travel_without_sequences() -> None:
    batch = make_batch(copies_to_host=((1, 2), (3, 4)), copies_to_device=((5, 6),))
    built = StepBuilder(16, 4, 8).build(batch)
    assert built.token_ids.shape == (0,) and built.page_table.shape == (0, 0)
    assert_identical(decode(encode(built)), built)


def test_cpu_tensors_share_memory_with_the_arrays() -> None:
    decode, prefill = make_sequence("d", [1, 2, 3]), make_sequence("p", range(9))
    decode.page_table, prefill.page_table = [5], [1, 2, 3]
    arrays = StepBuilder(4, 4, 8).build(make_batch(rest_of(decode, 2), rest_of(prefill)))
    step = ModelInput.from_arrays(arrays)
    for tensor, array in zip(tensors_of(step), (*arrays.flat, arrays.page_table), strict=True):
        assert np.shares_memory(tensor.numpy(), array) and tensor.tolist() == array.tolist()
    assert (step.attention.num_decodes, step.attention.max_seqlen_q) == (1, 9)


# Page tables as rows.

MAX_PAGES = 3 * FIRST_WIDTH
CHANGES = ("grow", "grow much", "shrink", "replace", "leave")
turns = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(CHANGES)), max_size=40)


def check(rows: PageTableRows, sequences: list[Sequence]) -> None:
    table = rows.gather(sequences)
    width = max((len(sequence.page_table) for sequence in sequences), default=0)
    assert table.shape == (len(sequences), width) and table.dtype == np.int32
    for row, sequence in zip(table.tolist(), sequences, strict=True):
        assert row[: len(sequence.page_table)] == sequence.page_table


@given(turns=turns, num_spare=st.integers(0, 2))
def test_rows_follow_the_tables_of_changing_sequences(turns: list[tuple[int, str]], num_spare: int) -> None:
    """A table is appended to, or its version grows; sequences come and go, and keys are used again."""
    rows, versions, pages = PageTableRows(6 + num_spare, MAX_PAGES), count(), count(7, 11)
    sequences = [make_sequence(str(index), [1]) for index in range(6)]
    for sequence in sequences:
        sequence.table_version = next(versions)
    for index, change in turns:
        sequence = sequences[index]
        table = sequence.page_table
        if change == "leave":
            sequences[index] = make_sequence(str(index), [1])
            sequences[index].page_table.append(next(pages))
        elif change in ("grow", "grow much"):
            num_new = 1 if change == "grow" else FIRST_WIDTH
            table += [next(pages) for _ in range(min(num_new, MAX_PAGES - len(table)))]
        elif change == "shrink":
            del table[len(table) // 2 :]
        elif table:
            table[-1] = next(pages)
        if not change.startswith("grow"):
            sequences[index].table_version = next(versions)
        check(rows, sequences[index:] if change == "grow" else sequences)


def test_only_the_rows_that_may_have_changed_are_read() -> None:
    rows, sequences = PageTableRows(2, 4), [make_sequence(name, [1]) for name in "ab"]
    for number, sequence in enumerate(sequences):
        sequence.page_table, sequence.table_version = [5 + number], number
    rows.gather(sequences)
    for sequence in sequences:
        sequence.page_table[0] = 9
        sequence.table_version += 2
    assert rows.gather(sequences, [1]).tolist() == [[5], [9]]


def test_more_sequences_than_a_step_may_have_are_refused() -> None:
    rows = PageTableRows(2, 4)
    rows.gather([make_sequence(name, [1]) for name in "ab"])
    with pytest.raises(ValueError, match="3 sequences in a step planned for 2"):
        rows.gather([make_sequence(name, [1]) for name in "cde"])
