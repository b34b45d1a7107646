import pytest

from baton.config.engine import SchedulerConfig
from baton.engine.scheduler.plan import PreemptMode
from baton.engine.scheduler.sequence import SequenceStatus
from baton.engine.scheduler.step_planner import CHUNK_SHARE, PressureMode, pressure_mode_at
from baton.messages.status import OverloadLevel
from baton.request import SamplingParams
from tests.accounts import AccountHarness, scheduling_key
from tests.scheduling import Settings

BUDGET = 64
LONG = SamplingParams(max_tokens=60)


def harness_of(num_pages: int = 40, num_host_pages: int = 0) -> AccountHarness:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=BUDGET)
    settings = Settings(
        num_pages=num_pages,
        page_size=4,
        num_host_pages=num_host_pages,
        prefix_caching=False,
        scheduler=config,
    )
    return AccountHarness(settings)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (OverloadLevel.LOCAL_PREFILL, PressureMode()),
        (OverloadLevel.SMALL_CHUNKS, PressureMode(small_chunks=True)),
        (OverloadLevel.MAKE_ROOM, PressureMode(small_chunks=True, makes_room=True)),
        (OverloadLevel.SHED, PressureMode(small_chunks=True, makes_room=True)),
    ],
)
def test_each_rung_keeps_what_those_below_it_do(level: OverloadLevel, expected: PressureMode) -> None:
    assert pressure_mode_at(level) == expected


def test_prompts_get_a_part_of_a_step_while_others_decode() -> None:
    harness = harness_of(num_pages=100)
    harness.add("old", [1, 2, 3], LONG)
    harness.step()
    harness.scheduler.pressure_mode = PressureMode(small_chunks=True)
    harness.add("new", range(3, 103), LONG)
    chunks = []
    while harness.live["new", 0].num_uncomputed_tokens > 1:
        plan, _, _ = harness.step()
        chunks.append(plan.scheduled["new", 0])
    assert chunks == [BUDGET // CHUNK_SHARE] * 6 + [4]
    harness.run()


def test_prompts_have_the_whole_step_where_nothing_decodes() -> None:
    harness = harness_of()
    harness.scheduler.pressure_mode = PressureMode(small_chunks=True, makes_room=True)
    harness.add("new", range(100), LONG)
    assert dict(harness.plan().scheduled) == {("new", 0): BUDGET}


def test_the_longest_of_the_lowest_class_is_swapped_out_while_pages_are_few_and_comes_back() -> None:
    harness = harness_of(num_host_pages=40)
    for name, num_tokens in (("short", 8), ("long", 40)):
        harness.add(name, range(num_tokens), LONG, tenant="low", scheduling_key=scheduling_key(rank=1))
    harness.add("high", range(40), LONG, tenant="high")
    while harness.pool.num_available >= 4:
        harness.step()
    harness.scheduler.pressure_mode = PressureMode(makes_room=True)
    plan, _, _ = harness.step()
    assert plan.preempted == {("long", 0): PreemptMode.SWAP}
    long = harness.live["long", 0]
    while ("high", 0) in harness.live:
        assert long.status is SequenceStatus.SWAPPED
        harness.step()
    harness.run()
    assert long.num_generated_tokens == 60


def test_room_is_made_without_a_host_tier_by_computing_again() -> None:
    """The default: nothing is swapped, and the better class has the pages all the same."""
    harness = harness_of()
    for name, num_tokens in (("short", 8), ("long", 40)):
        harness.add(name, range(num_tokens), LONG, tenant="low", scheduling_key=scheduling_key(rank=1))
    harness.add("high", range(40), LONG, tenant="high")
    while harness.pool.num_available >= 4:
        harness.step()
    harness.scheduler.pressure_mode = PressureMode(makes_room=True)
    plan, _, _ = harness.step()
    assert plan.preempted == {("long", 0): PreemptMode.RECOMPUTE}
    long = harness.live["long", 0]
    harness.run()
    assert long.num_generated_tokens == 60


def test_none_of_a_lower_class_comes_in_that_would_leave_few_pages() -> None:
    """Of 100 pages ten are kept free for the better class, of which seven would be left."""
    for makes_room, status in ((False, SequenceStatus.RUNNING), (True, SequenceStatus.WAITING)):
        harness = harness_of(num_pages=100)
        harness.add("high", range(50), LONG, tenant="high")
        harness.step()
        harness.scheduler.pressure_mode = PressureMode(makes_room=makes_room)
        prompt = [number % 50 for number in range(320)]
        (low,) = harness.add(
            "low", prompt, SamplingParams(max_tokens=1), tenant="low", scheduling_key=scheduling_key(rank=1)
        )
        harness.step()
        assert low.status is status
        harness.scheduler.pressure_mode = PressureMode()
        harness.run()


def test_nothing_is_swapped_out_where_one_class_runs() -> None:
    harness = harness_of()
    for tenant in "ab":
        harness.add(tenant, range(70), SamplingParams(max_tokens=8), tenant=tenant)
    while harness.pool.num_available >= 4:
        harness.step()
    harness.scheduler.pressure_mode = PressureMode(makes_room=True)
    assert not harness.step()[0].preempted
    harness.run()
