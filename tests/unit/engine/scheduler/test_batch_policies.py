from typing import Literal

import pytest

from baton.config.engine import SchedulerConfig
from baton.request import SamplingParams
from tests.scheduling import Harness, Settings


def make(policy: Literal["static", "dynamic"], *, num_pages: int = 200, delay_ms: float = 0.0) -> Harness:
    config = SchedulerConfig(
        policy=policy, max_num_seqs=3, max_num_batched_tokens=60, max_queue_delay_ms=delay_ms
    )
    return Harness(Settings(num_pages=num_pages, page_size=4, scheduler=config))


def add(harness: Harness, name: str, num_prompt_tokens: int, max_tokens: int) -> None:
    token_ids = [(ord(name) + position) % 50 for position in range(num_prompt_tokens)]
    harness.add(name, token_ids, SamplingParams(max_tokens=max_tokens))


def test_static_batch_pads_prompts_to_the_longest() -> None:
    harness = make("static")
    for name, num_tokens in (("a", 3), ("b", 20), ("c", 5)):
        add(harness, name, num_tokens, 2)
    plan, batch, _ = harness.step()
    assert dict(plan.scheduled) == {("a", 0): 3, ("b", 0): 20, ("c", 0): 5}
    assert batch.num_padded_tokens == 3 * 20 - 28
    harness.run()


def test_static_batch_cuts_long_prompts_into_equal_columns() -> None:
    harness = make("static")
    for name, num_tokens in (("a", 30), ("b", 50), ("c", 5)):
        add(harness, name, num_tokens, 3)
    steps = [harness.step() for _ in range(4)]
    assert [list(plan.scheduled.values()) for plan, _, _ in steps] == [[20, 20, 5], [10, 20], [10], [1, 1, 1]]
    assert [batch.num_padded_tokens for _, batch, _ in steps] == [15, 30, 20, 0]
    harness.run()


def test_static_rows_that_finished_are_computed_as_padding_until_the_slowest_has() -> None:
    harness = make("static")
    for name, max_tokens in (("a", 2), ("b", 5), ("c", 3), ("d", 2)):
        add(harness, name, 4, max_tokens)
    steps = [harness.step() for _ in range(6)]
    assert [batch.num_padded_tokens for _, batch, _ in steps] == [0, 0, 1, 2, 2, 0]
    assert [sorted(key[0] for key in plan.scheduled) for plan, _, _ in steps] == [
        ["a", "b", "c"],
        ["a", "b", "c"],
        ["b", "c"],
        ["b"],
        ["b"],
        ["d"],
    ]
    harness.run()


def test_dynamic_batch_gathers_in_its_window_and_pads_nothing() -> None:
    harness = make("dynamic", delay_ms=100.0)
    add(harness, "a", 4, 4)
    plan, _, _ = harness.step()
    assert not plan.scheduled and plan.wait_s == pytest.approx(0.1)
    harness.clock.advance(0.05)
    add(harness, "b", 10, 2)
    harness.clock.advance(0.05)
    plan, _, _ = harness.step()
    assert set(plan.admitted) == {("a", 0), ("b", 0)} and plan.num_padded_tokens == 0
    harness.run()


def test_dynamic_batch_lets_nobody_join() -> None:
    harness = make("dynamic")
    add(harness, "a", 4, 4)
    harness.step()
    add(harness, "b", 4, 1)
    plans = [harness.step()[0] for _ in range(4)]
    assert [[key[0] for key in plan.scheduled] for plan in plans] == [["a"], ["a"], ["a"], ["b"]]


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_batch_takes_only_members_whose_longest_answers_fit(policy: Literal["static", "dynamic"]) -> None:
    harness = make(policy, num_pages=10)
    for name in "abc":
        add(harness, name, 4, 12)  # 4 pages each in the end
    plan, _, _ = harness.step()
    assert [key[0] for key in plan.admitted] == ["a"]
    harness.run()
    assert all(sequence.num_preemptions == 0 for sequence in harness.finished)
