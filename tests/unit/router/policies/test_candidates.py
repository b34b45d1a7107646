from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.policies.candidates import (
    DecodeCandidate,
    PairCandidate,
    PrefillCandidate,
    PromptCost,
    PullCandidate,
    cheapest,
    local_pair,
    longest,
    prompt_costs,
    remote_pair,
)

NUM_TOKENS = 1000  # of the prompt


def compute_s(num_new: int, num_tokens: int) -> float:
    return 0.01 + 1e-3 * num_new


def nothing(worker: str) -> float:
    """No worker was given anything."""
    return 0.0


def a_prefill(worker: str = "p", wait_s: float = 0.0, num_held: int = 0) -> PrefillCandidate:
    return PrefillCandidate(worker, wait_s, num_held, (0.01, 1e-3, 0.0))


def a_source(worker: str, num_tokens: int, token_s: float = 1e-4) -> PullCandidate:
    return PullCandidate(worker, num_tokens, lambda prefill, num: 0.005 + token_s * num)


def cost_at(
    prefill: PrefillCandidate, sources: Sequence[PullCandidate] = (), arrival_rate: float = 0.0
) -> PromptCost:
    (cost,) = prompt_costs([prefill], NUM_TOKENS, sources, arrival_rate)
    return cost


def a_candidate(total_s: float, prefill: str = "p", num_held: int = 0, queue_s: float = 0.0) -> PairCandidate:
    """A decode worker that costs nothing."""
    compute_s = total_s - queue_s
    cost = PromptCost(total_s, a_prefill(prefill or "d", queue_s), "", num_held, 100, 0.0, compute_s, 0.0)
    decoder = DecodeCandidate(a_prefill("d"), num_delayed=0, room_s=0.0, join_s=0.0, decode_delay_s=0.0)
    return remote_pair(cost, decoder, 0.0) if prefill else local_pair(cost, decoder)


def test_later_arrivals_make_computing_more_expensive_behind_a_queue() -> None:
    short, long = (cost_at(a_prefill(wait_s=wait_s), arrival_rate=2.0).queue_delay_s for wait_s in (0.0, 5.0))
    assert 0 < short < long


@pytest.mark.parametrize("is_local", (True, False))
def test_cost_of_a_candidate_is_the_sum_of_its_terms(is_local: bool) -> None:
    decoder = DecodeCandidate(a_prefill("d", 0.5), num_delayed=3, room_s=0.25, join_s=0.3, decode_delay_s=0.2)
    prefill = decoder.as_prefill if is_local else a_prefill("p", 0.125)
    cost = cost_at(prefill, [a_source("q", 800)], arrival_rate=2.0)
    candidate = local_pair(cost, decoder) if is_local else remote_pair(cost, decoder, 0.05)
    assert candidate.total_s == pytest.approx(candidate.terms.total_s)
    assert (candidate.decode, candidate.prefill) == ("d", "" if is_local else "p")
    assert candidate.num_held_tokens + candidate.num_new_tokens == NUM_TOKENS
    assert candidate.terms.handoff_s == (0.0 if is_local else 0.05)


@given(st.lists(st.floats(0.001, 1e4), min_size=1, max_size=8), st.integers(0, 2**32))
def test_cheapest_is_within_a_tie_of_the_least(totals_s: list[float], random: int) -> None:
    chosen = cheapest([a_candidate(total_s) for total_s in totals_s], random, nothing)
    assert chosen.terms.total_s <= min(totals_s) * 1.0201


def test_ties_are_broken_at_random() -> None:
    candidates = [a_candidate(1.0, prefill) for prefill in "abc"]
    assert {cheapest(candidates, random, nothing).prefill for random in range(3)} == set("abc")


def test_of_equal_candidates_the_worker_that_was_given_less_wins() -> None:
    candidates = [a_candidate(1.0, prefill) for prefill in "abc"]
    lately = {"a": 3.0, "b": 1.0, "c": 2.0}
    taken = [cheapest(candidates, random, lately.__getitem__).prefill for random in range(9)]
    assert {name: taken.count(name) for name in "abc"} == {"a": 1, "b": 5, "c": 3}
    dear = [a_candidate(1.0, "a"), a_candidate(1.1, "b")]
    assert cheapest(dear, 1, lately.__getitem__).prefill == "a"


def test_longest_looks_at_held_tokens_only() -> None:
    candidates = [a_candidate(9.0, "p", 64), a_candidate(1.0, "q", 32), a_candidate(0.1, "", 128)]
    assert longest(candidates, 0).prefill == "p"
    equals = [a_candidate(1.0, "p", 64, queue_s=0.5), a_candidate(1.0, "q", 64, queue_s=0.1)]
    assert longest(equals, 0).prefill == "q"


def on_disk(worker: str, num_held: int, load_s: float, wait_s: float = 0.0) -> PrefillCandidate:
    return PrefillCandidate(worker, wait_s, num_held, (0.01, 1e-3, 0.0), load_s=load_s)


def test_prefix_below_the_device_costs_its_load_as_far_as_the_queue_does_not_hide_it() -> None:
    idle, busy = cost_at(on_disk("p", 900, 0.3)), cost_at(on_disk("p", 900, 0.3, wait_s=0.2))
    assert idle.total_s == pytest.approx(0.3 + compute_s(100, NUM_TOKENS))
    assert busy.pull_s == pytest.approx(0.1) and busy.total_s == pytest.approx(0.2 + 0.1 + 0.11)
    assert not idle.source and idle.num_held_tokens == 900


def test_prefix_is_pulled_from_a_device_rather_than_read_from_a_slow_disk() -> None:
    source = a_source("q", 900)
    assert cost_at(on_disk("p", 800, 0.3), [source]).source == "q"
    assert not cost_at(on_disk("p", 800, 0.001), [a_source("q", 801)]).source


@pytest.mark.parametrize(("load_s", "is_pulled"), [(0.0, True), (0.3, True), (0.9, False)])
def test_prefix_on_a_peers_disk_is_pulled_unless_computing_is_faster(load_s: float, is_pulled: bool) -> None:
    source = PullCandidate("q", 900, lambda *_: 0.005, load_s=load_s)
    cost = cost_at(a_prefill("p"), [source])
    assert bool(cost.source) == is_pulled
    expected_s = load_s + 0.005 + compute_s(100, NUM_TOKENS) if is_pulled else compute_s(1000, NUM_TOKENS)
    assert cost.total_s == pytest.approx(expected_s)
