import pytest

from baton.engine.scheduler.sequence import SequenceStatus
from baton.engine.scheduler.step_planner import CHUNK_DIVISOR, PressureMode
from baton.request import SamplingParams
from tests.accounts import AccountHarness, scheduling_key

BUDGET = 64
LONG = SamplingParams(max_tokens=60)


def harness_of(num_pages: int = 40, num_host_pages: int = 0) -> AccountHarness:
    return AccountHarness.of(num_pages, num_host_pages=num_host_pages, prefix_caching=False)


def test_small_chunks_give_prompts_a_part_of_a_step_while_others_decode() -> None:
    harness = harness_of(num_pages=100)
    harness.add("old", [1, 2, 3], LONG)
    harness.step()
    harness.scheduler.pressure_mode = PressureMode(small_chunks=True)
    harness.add("new", range(3, 103), LONG)
    chunks = []
    while harness.live["new", 0].num_uncomputed_tokens > 1:
        plan, _, _ = harness.step()
        chunks.append(plan.scheduled["new", 0])
    assert chunks == [BUDGET // CHUNK_DIVISOR] * 6 + [4]
    harness.run()


@pytest.mark.parametrize("num_host_pages", [40, 0])
def test_longest_of_the_lowest_class_gives_its_pages_and_comes_back(num_host_pages: int) -> None:
    harness = harness_of(num_host_pages=num_host_pages)
    for name, num_tokens in (("short", 8), ("long", 40)):
        harness.add(name, range(num_tokens), LONG, tenant="low", scheduling_key=scheduling_key(rank=1))
    harness.add("high", range(40), LONG, tenant="high")
    while harness.pool.num_available >= 4:
        harness.step()
    harness.scheduler.pressure_mode = PressureMode(makes_room=True)
    plan, _, _ = harness.step()
    assert plan.preempted == (("long", 0),)
    long = harness.live["long", 0]
    while ("high", 0) in harness.live:
        assert not long.is_running
        harness.step()
    harness.run()
    assert long.num_generated_tokens == 60


def test_lower_class_is_not_admitted_if_few_pages_are_left() -> None:
    """Ten of 100 pages are kept free for the better class; the prompt would leave seven."""
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
