import math

from hypothesis import given
from hypothesis import strategies as st

from baton.messages.status import OverloadLevel
from baton.router.queue.overload import CLIMB_S, DESCEND_S, HIGH, LOW, OverloadController, PressureReading

TICK_S = 0.5
CALM = PressureReading(has_waiting=False, has_objectives=False, lateness=0.0, pages=0.0, itl=0.0)


def reading(
    lateness: float = 0.0, pages: float = 0.0, itl: float = 0.0, *, waits: bool = True
) -> PressureReading:
    return PressureReading(waits, True, lateness, pages, itl)


def levels(
    overload_controller: OverloadController, read: PressureReading, seconds: float, since_s: float = 0.0
) -> list[OverloadLevel]:
    """Each that it came to."""
    found = []
    for tick in range(math.ceil(seconds / TICK_S)):
        if overload_controller.update(read, since_s + tick * TICK_S):
            found.append(overload_controller.level)
    return found


def test_every_rung_is_climbed_one_after_the_other() -> None:
    overload_controller = OverloadController(0.0)
    assert levels(overload_controller, reading(lateness=1.0), 10) == list(OverloadLevel)[1:]
    assert overload_controller.escalations == dict.fromkeys(list(OverloadLevel)[1:], 1)
    assert [move.level for move in overload_controller.changes] == list(OverloadLevel)[1:]


def test_it_is_climbed_down_by_itself() -> None:
    overload_controller = OverloadController(0.0)
    levels(overload_controller, reading(lateness=1.0), 10)
    found = levels(overload_controller, CALM._replace(has_objectives=True), 10, since_s=10)
    assert found == [*reversed(list(OverloadLevel)[1:-1]), OverloadLevel.CALM]
    assert DESCEND_S * len(found) < 10


def test_a_short_peak_moves_nothing_but_the_queue() -> None:
    overload_controller = OverloadController(0.0)
    assert levels(overload_controller, reading(lateness=1.0), CLIMB_S) == [OverloadLevel.QUEUE]
    assert levels(overload_controller, reading(lateness=0.5), 5, since_s=CLIMB_S) == []


def test_between_the_marks_it_stays() -> None:
    overload_controller = OverloadController(0.0)
    levels(overload_controller, reading(pages=1.0), 3)
    level = overload_controller.level
    assert level > OverloadLevel.QUEUE
    assert levels(overload_controller, reading(pages=(HIGH + LOW) / 2), 60, since_s=3) == []
    assert overload_controller.level is level


def test_only_lateness_is_a_reason_to_shed() -> None:
    for read in (reading(pages=1.0), reading(itl=2.0)):
        overload_controller = OverloadController(0.0)
        levels(overload_controller, read, 60)
        assert overload_controller.level is OverloadLevel.CLIP


def test_where_nothing_was_promised_all_that_is_done_is_waiting() -> None:
    overload_controller = OverloadController(0.0)
    levels(overload_controller, reading(lateness=1.0, pages=1.0)._replace(has_objectives=False), 60)
    assert overload_controller.level is OverloadLevel.QUEUE


def test_slow_tokens_are_a_reason_where_nobody_waits() -> None:
    overload_controller = OverloadController(0.0)
    levels(overload_controller, reading(itl=2.0, waits=False), 60)
    assert overload_controller.level is OverloadLevel.CLIP


def test_clock_that_goes_back_holds_the_ladder_still() -> None:
    overload_controller = OverloadController(100.0)
    levels(overload_controller, reading(lateness=1.0), 5, since_s=100)
    level = overload_controller.level
    assert not overload_controller.update(reading(lateness=1.0), 10.0)
    assert overload_controller.level is level
    assert overload_controller.update(reading(lateness=1.0), 10.0 + CLIMB_S)


@given(pressures=st.lists(st.floats(0, 2), max_size=200))
def test_it_moves_by_one_rung_and_not_twice_within_its_time(pressures: list[float]) -> None:
    """But down from the highest, which only lateness leads to."""
    overload_controller, moved_s = OverloadController(0.0), -math.inf
    for tick, pressure in enumerate(pressures):
        before = overload_controller.level
        if overload_controller.update(reading(lateness=pressure), tick * TICK_S):
            climbed = overload_controller.level > before
            assert abs(overload_controller.level - before) == 1
            if before > OverloadLevel.QUEUE or (climbed and overload_controller.level > OverloadLevel.QUEUE):
                quick = before is OverloadLevel.SHED and not climbed
                assert quick or tick * TICK_S - moved_s >= min(CLIMB_S, DESCEND_S)
            moved_s = tick * TICK_S
