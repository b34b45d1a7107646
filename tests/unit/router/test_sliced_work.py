"""Work in slices: one a turn, in turns, and no work stops another."""

from collections.abc import Iterator

import pytest

from baton.router.sliced_work import SlicedWork
from tests.unit.router.router_cluster import Turns


def steps(name: str, done: list[str], num: int, fails_at: int = -1) -> Iterator[None]:
    for number in range(num):
        if number == fails_at:
            raise KeyError(name)
        done.append(f"{name}{number}")
        yield


def test_without_a_host_all_work_is_done_at_once() -> None:
    done: list[str] = []
    SlicedWork().add(steps("a", done, 3))
    assert done == ["a0", "a1", "a2"]


def test_each_turn_does_one_slice_and_work_takes_turns() -> None:
    turns, done = Turns(), list[str]()
    slices = SlicedWork(turns.call_soon)
    slices.add(steps("a", done, 3))
    slices.add(steps("b", done, 2))
    assert done == ["a0", "b0"] and len(turns.calls) == 1
    turns.next()
    assert done == ["a0", "b0", "a1"] and len(turns.calls) == 1
    turns.all()
    assert done == ["a0", "b0", "a1", "b1", "a2"]


def test_failed_work_is_dropped_and_other_work_goes_on() -> None:
    turns, done = Turns(), list[str]()
    slices = SlicedWork(turns.call_soon)
    slices.add(steps("a", done, 3, fails_at=1))
    slices.add(steps("b", done, 2))
    with pytest.raises(KeyError):
        turns.next()
    turns.all()
    assert done == ["a0", "b0", "b1"]
