import math

from hypothesis import given
from hypothesis import strategies as st

from baton.pressure import Rung
from baton.router.ladder import CLIMB_S, DESCEND_S, HIGH, LOW, Ladder, Reading

TICK_S = 0.5
CALM = Reading(has_waiting=False, has_objectives=False, lateness=0.0, pages=0.0, itl=0.0)


def reading(lateness: float = 0.0, pages: float = 0.0, itl: float = 0.0, *, waits: bool = True) -> Reading:
    return Reading(waits, True, lateness, pages, itl)


def rungs(ladder: Ladder, read: Reading, seconds: float, since_s: float = 0.0) -> list[Rung]:
    """Each that it came to."""
    found = []
    for tick in range(math.ceil(seconds / TICK_S)):
        if ladder.update(read, since_s + tick * TICK_S):
            found.append(ladder.rung)
    return found


def test_every_rung_is_climbed_one_after_the_other() -> None:
    ladder = Ladder(0.0)
    assert rungs(ladder, reading(lateness=1.0), 10) == list(Rung)[1:]
    assert ladder.climbs == dict.fromkeys(list(Rung)[1:], 1)
    assert [move.rung for move in ladder.moves] == list(Rung)[1:]


def test_it_is_climbed_down_by_itself() -> None:
    ladder = Ladder(0.0)
    rungs(ladder, reading(lateness=1.0), 10)
    found = rungs(ladder, CALM._replace(has_objectives=True), 10, since_s=10)
    assert found == [*reversed(list(Rung)[1:-1]), Rung.CALM]
    assert DESCEND_S * len(found) < 10


def test_a_short_peak_moves_nothing_but_the_queue() -> None:
    ladder = Ladder(0.0)
    assert rungs(ladder, reading(lateness=1.0), CLIMB_S) == [Rung.QUEUE]
    assert rungs(ladder, reading(lateness=0.5), 5, since_s=CLIMB_S) == []


def test_between_the_marks_it_stays() -> None:
    ladder = Ladder(0.0)
    rungs(ladder, reading(pages=1.0), 3)
    rung = ladder.rung
    assert rung > Rung.QUEUE
    assert rungs(ladder, reading(pages=(HIGH + LOW) / 2), 60, since_s=3) == []
    assert ladder.rung is rung


def test_only_lateness_is_a_reason_to_shed() -> None:
    for read in (reading(pages=1.0), reading(itl=2.0)):
        ladder = Ladder(0.0)
        rungs(ladder, read, 60)
        assert ladder.rung is Rung.CLIP


def test_where_nothing_was_promised_all_that_is_done_is_waiting() -> None:
    ladder = Ladder(0.0)
    rungs(ladder, reading(lateness=1.0, pages=1.0)._replace(has_objectives=False), 60)
    assert ladder.rung is Rung.QUEUE


def test_slow_tokens_are_a_reason_where_nobody_waits() -> None:
    ladder = Ladder(0.0)
    rungs(ladder, reading(itl=2.0, waits=False), 60)
    assert ladder.rung is Rung.CLIP


def test_clock_that_goes_back_holds_the_ladder_still() -> None:
    ladder = Ladder(100.0)
    rungs(ladder, reading(lateness=1.0), 5, since_s=100)
    rung = ladder.rung
    assert not ladder.update(reading(lateness=1.0), 10.0)
    assert ladder.rung is rung
    assert ladder.update(reading(lateness=1.0), 10.0 + CLIMB_S)


@given(pressures=st.lists(st.floats(0, 2), max_size=200))
def test_it_moves_by_one_rung_and_not_twice_within_its_time(pressures: list[float]) -> None:
    """But down from the highest, which only lateness leads to."""
    ladder, moved_s = Ladder(0.0), -math.inf
    for tick, pressure in enumerate(pressures):
        before = ladder.rung
        if ladder.update(reading(lateness=pressure), tick * TICK_S):
            climbed = ladder.rung > before
            assert abs(ladder.rung - before) == 1
            if before > Rung.QUEUE or (climbed and ladder.rung > Rung.QUEUE):
                quick = before is Rung.SHED and not climbed
                assert quick or tick * TICK_S - moved_s >= min(CLIMB_S, DESCEND_S)
            moved_s = tick * TICK_S
