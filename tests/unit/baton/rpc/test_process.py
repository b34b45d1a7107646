import gc
from collections.abc import Iterator

import pytest

from baton.rpc.process import LOOKS_PER_FULL, freeze_gc, frozen_imports

THRESHOLDS = (601, 11, 7)  # not Python's own


pytestmark = pytest.mark.usefixtures("real_freeze_gc")


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
    return sum(type(each) is Ring for each in gc.get_objects())


def test_full_collections_are_rare_and_young_ones_as_frequent_as_before() -> None:
    with freeze_gc():
        assert gc.get_threshold() == (*THRESHOLDS[:2], LOOKS_PER_FULL)


def test_present_objects_are_frozen_and_later_ones_are_collected() -> None:
    kept = Ring()
    assert num_rings() == 1
    with freeze_gc():
        assert gc.get_freeze_count() > 0 and not num_rings()
        assert kept.ring is kept
        Ring()
        assert num_rings() == 1
        gc.collect()
        assert num_rings() == 0


def test_settings_are_restored_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError, match="a bug"), freeze_gc():
        raise ZeroDivisionError("a bug")
    assert gc.get_threshold() == THRESHOLDS
    assert gc.get_freeze_count() == 0


def test_imports_are_not_collected_and_later_objects_are() -> None:
    with pytest.raises(ImportError), frozen_imports():
        assert not gc.isenabled()
        raise ImportError("no such library")
    assert gc.isenabled() and gc.get_freeze_count() > 0
