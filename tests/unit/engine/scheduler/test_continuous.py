"""Continuous batching: the order in which sequences get the tokens of a step."""

from typing import Any

import pytest

from baton.request import HEALTH_PRIORITY, SamplingParams
from tests.scheduling import Harness

BUDGET = 64


def make(num_pages: int = 1_000, *, max_num_seqs: int = 16, **config: Any) -> Harness:
    return Harness.of(num_pages, max_num_seqs=max_num_seqs, **config)


def prompt(num_tokens: int, first: int = 0) -> list[int]:
    return [(first * 7 + position * 3) % 50 for position in range(num_tokens)]


@pytest.mark.parametrize(
    ("first", "later", "expected", "num_pages"),
    [
        # Decodes come first, and prefills share the rest by arrival.
        ({"a": 5}, {"b": 40, "c": 20}, {"a": 1, "b": 40, "c": 20}, 1_000),
        # A short prompt does not wait for a long one.
        ({"long": 1_000}, {"short": 30}, {"long": 34, "short": 30}, 1_000),
        # The shortest of the later ones goes first.
        ({}, {"head": 500, "medium": 60, "short": 20}, {"head": 32, "short": 20, "medium": 12}, 1_000),
        # A waiting sequence that does not fit is not overtaken for memory.
        ({"running": 60}, {"big": 120, "small": 4}, {"running": 1}, 40),
    ],
)
def test_step_is_shared_by_length_and_arrival(
    first: dict[str, int], later: dict[str, int], expected: dict[str, int], num_pages: int
) -> None:
    harness = make(num_pages)
    for number, (name, num_tokens) in enumerate(first.items()):
        harness.add(name, prompt(num_tokens, number), SamplingParams(max_tokens=30))
    if first:
        harness.step()
    for number, (name, num_tokens) in enumerate(later.items(), start=len(first)):
        harness.add(name, prompt(num_tokens, number))
    plan, batch, _ = harness.step()
    assert {key[0]: num_tokens for key, num_tokens in plan.scheduled.items()} == expected
    assert batch.num_decodes == sum(num_tokens == 1 for num_tokens in expected.values())
    harness.run()


def test_lower_class_takes_nothing_from_the_head_of_a_higher_one() -> None:
    harness = make()
    harness.add("urgent", prompt(500), priority=0)
    harness.add("batch", prompt(10, 1), priority=1)
    plan, _, _ = harness.step()
    assert dict(plan.scheduled) == {("urgent", 0): 64}
    harness.run()


def test_health_check_joins_a_worker_without_free_seats() -> None:
    harness = make(max_num_seqs=2)
    for number, name in enumerate(("first", "second", "waiting")):
        harness.add(name, prompt(5, number), SamplingParams(max_tokens=30))
    harness.step()
    for number, name in enumerate(("check", "another check"), start=3):
        harness.add(name, prompt(5, number), SamplingParams(max_tokens=2), priority=HEALTH_PRIORITY)
    admitted = [key[0] for _ in range(4) for key in harness.step()[0].admitted]
    assert admitted == ["check", "another check"], "one at a time, and no client takes such a seat"
    harness.run()


def test_several_long_prompts_cannot_starve_short_ones() -> None:
    harness = make()
    for number in range(3):
        harness.add(f"long-{number}", prompt(900, number))
    harness.step()
    for number in range(5):
        (short,) = harness.add(f"short-{number}", prompt(25, 10 + number), SamplingParams(max_tokens=1))
        for _ in range(2):
            harness.step()
        assert short.num_generated_tokens == 1
    harness.run()


def test_newcomer_leaves_headroom_for_running_sequences() -> None:
    harness = make(num_pages=20)
    harness.add("a", prompt(30), SamplingParams(max_tokens=20))
    harness.step()
    harness.add("b", prompt(40, 1))  # 8 + 10 pages of 20, but "a" may soon want 4 more
    plan, _, _ = harness.step()
    assert plan.admitted == ()
    harness.run()
    assert sum(sequence.num_preemptions for sequence in harness.finished) == 0


def reserve_all_but(harness: Harness, num_pages: int) -> None:
    pages = harness.pool.reserve(harness.pool.num_free - num_pages, "transfer")
    harness.leased["transfer"] = set(pages)


def end_reservation(harness: Harness) -> None:
    harness.pool.release(sorted(harness.leased.pop("transfer")), "transfer")


def test_last_page_goes_to_the_better_decode_and_the_other_waits_with_its_pages() -> None:
    harness = make(num_pages=20)
    for number, name in enumerate("ab"):
        harness.add(name, prompt(7, number))
    for _ in range(2):
        harness.step()
    reserve_all_but(harness, 1)
    plan, _, _ = harness.step()
    assert dict(plan.scheduled) == {("a", 0): 1} and not plan.preempted
    end_reservation(harness)
    harness.run()


@pytest.mark.parametrize("num_choices", [2, 4])
def test_later_choices_share_the_prompt_pages_of_the_first(num_choices: int) -> None:
    harness = make()
    sequences = harness.add("r", prompt(22), SamplingParams(n=num_choices, max_tokens=3))
    plan, _, _ = harness.step()
    assert dict(plan.scheduled) == {("r", 0): 22}
    plan, _, _ = harness.step()
    assert dict(plan.scheduled) == {("r", 0): 1} | {("r", choice): 2 for choice in range(1, num_choices)}
    assert [sequence.num_cached_tokens for sequence in sequences] == [0] + [20] * (num_choices - 1)
    assert len({tuple(sequence.page_table[:5]) for sequence in sequences}) == 1
    harness.run()
    assert len({tuple(sequence.token_ids) for sequence in sequences}) == num_choices


def test_choices_with_no_full_page_to_share_start_together() -> None:
    harness = make()
    harness.add("r", prompt(3), SamplingParams(n=3))
    plan, _, _ = harness.step()
    assert len(plan.admitted) == 3
    harness.run()


def test_later_choices_go_on_when_the_first_is_gone() -> None:
    harness = make(max_num_batched_tokens=8)
    _, second = harness.add("r", prompt(22), SamplingParams(n=2, max_tokens=1))
    for _ in range(3):
        assert not second.page_table
        harness.step()
    assert [sequence.choice for sequence in harness.finished] == [0]
    harness.run()
    assert second.num_cached_tokens == 20
