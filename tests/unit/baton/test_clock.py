import pytest

from baton.clock import Clock, ManualClock, SystemClock


def test_the_system_clock_never_goes_back() -> None:
    clock: Clock = SystemClock()
    first = clock.now_s()
    assert clock.now_s() >= first


def test_the_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(5.0)
    assert clock.now_s() == clock.now_s() == 5.0
    clock.advance(0.25)
    assert clock.now_s() == 5.25


def test_the_manual_clock_refuses_to_go_back() -> None:
    with pytest.raises(ValueError, match="advance"):
        ManualClock().advance(-1.0)
