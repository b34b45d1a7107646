import gc
from collections.abc import Iterator

import pytest

from baton.rpc.process import LOOKS_PER_FULL, freeze_gc

THRESHOLDS = (601, 11, 7)  # not Python's own


@pytest.fixture(autouse=True)
def own_thresholds() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    yield
    gc.set_threshold(*thresholds)


class Ring:
    def __init__(self) -> None:
        self.ring = self


def num_rings() -> int:
    return sum(type(each) is Ring for each in gc.get_objects())  # who is asked for `__class__` may warn


def test_full_looks_are_rare_and_looks_at_the_young_as_often_as_ever() -> None:
    with freeze_gc():
        assert gc.get_threshold() == (*THRESHOLDS[:2], LOOKS_PER_FULL)


def test_what_is_there_is_looked_at_no_more_and_what_comes_later_is() -> None:
    kept = Ring()
    assert num_rings() == 1
    with freeze_gc():
        assert gc.get_freeze_count() > 0 and not num_rings()
        assert kept.ring is kept
        Ring()
        assert num_rings() == 1
        gc.collect()
        assert num_rings() == 0


def test_garbage_is_not_kept_by_it() -> None:
    Ring()
    with freeze_gc():
        pass
    assert num_rings() == 0


def test_all_is_as_it_was_afterwards() -> None:
    kept = Ring()
    with freeze_gc():
        pass
    assert gc.get_threshold() == THRESHOLDS
    assert gc.get_freeze_count() == 0 and num_rings() == 1
    assert kept.ring is kept


def test_all_is_as_it_was_after_an_error_too() -> None:
    with pytest.raises(ZeroDivisionError, match="a bug"), freeze_gc():
        raise ZeroDivisionError("a bug")
    assert gc.get_threshold() == THRESHOLDS
    assert gc.get_freeze_count() == 0
