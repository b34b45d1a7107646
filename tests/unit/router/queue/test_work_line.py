from bisect import insort
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.queue.tenant_queues import Order, WorkLine


class PlainLine:
    """A sorted list, added up every time."""

    def __init__(self) -> None:
        self.entries: list[tuple[Order, float]] = []

    def work_before(self, order: Order) -> float:
        return sum(work for other, work in self.entries if other < order)


def check(line: WorkLine[Order], plain: PlainLine) -> None:
    line.check_integrity()
    assert list(line) == [order for order, _ in plain.entries]
    assert line.num == len(plain.entries)
    assert line.work == pytest.approx(sum(work for _, work in plain.entries))


@settings(max_examples=150, deadline=None)
@given(block_size=st.integers(1, 5), data=st.data())
def test_line_equals_a_sorted_list_with_sums(block_size: int, data: st.DataObject) -> None:
    line: WorkLine[Order] = WorkLine(block_size)
    plain = PlainLine()
    for number in range(data.draw(st.integers(0, 60))):
        if plain.entries and data.draw(st.integers(0, 2)) == 0:
            entry = data.draw(st.sampled_from(plain.entries))
            line.remove(entry[0])
            plain.entries.remove(entry)
        else:
            order = (data.draw(st.integers(-1, 1)), float(data.draw(st.integers(0, 4))), number)
            work = float(data.draw(st.integers(1, 9)))
            line.add(order, order, work)
            insort(plain.entries, (order, work))
        check(line, plain)
        place = (data.draw(st.integers(-2, 2)), data.draw(st.floats(-1, 5)), data.draw(st.integers(0, 60)))
        assert line.work_before(place) == pytest.approx(plain.work_before(place))
        assert not plain.entries or line.first() == plain.entries[0][0]


def test_missing_item_is_not_removed() -> None:
    line: WorkLine[str] = WorkLine()
    line.add((0, 1.0, 1), "a", 1.0)
    with pytest.raises(AssertionError):
        line.remove((0, 1.0, 0))


@pytest.mark.parametrize("is_backwards", [False, True])
def test_removals_leave_few_blocks(is_backwards: bool) -> None:
    """The rest of a long line costs as much as a short line."""
    line: WorkLine[int] = WorkLine(8)
    numbers: Any = range(2000)
    for number in numbers:
        line.add((0, float(number % 50), number), number, 1.0)
    gone = [number for number in numbers if number % 100]
    for number in reversed(gone) if is_backwards else gone:
        line.remove((0, float(number % 50), number))
    line.check_integrity()
    assert line.num == 20 and len(line._blocks) <= 20 // 2 + 1
