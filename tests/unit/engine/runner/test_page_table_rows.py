from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.runner.step_inputs import FIRST_WIDTH, PageTableRows
from baton.engine.scheduler.sequence import Sequence
from tests.batches import make_sequence

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


def test_the_copy_is_not_changed_by_later_steps() -> None:
    rows, sequence = PageTableRows(2, 4), make_sequence("s", [1])
    sequence.page_table += [5, 6]
    first = rows.gather([sequence])
    sequence.page_table[:] = [8, 9]
    sequence.table_version += 1
    rows.gather([sequence])
    assert first.tolist() == [[5, 6]]


def test_more_sequences_than_a_step_may_have_are_refused() -> None:
    rows = PageTableRows(2, 4)
    rows.gather([make_sequence(name, [1]) for name in "ab"])
    with pytest.raises(ValueError, match="3 sequences in a step planned for 2"):
        rows.gather([make_sequence(name, [1]) for name in "cde"])
