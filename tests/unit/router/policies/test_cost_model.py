from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.messages.control import Measured
from baton.messages.workers import PrefillTimes, StepTimes
from baton.router.policies.cost_model import (
    LEAST_SEQUENCE,
    PREFILL_PRIOR,
    PULL_PRIOR,
    CandidateLoad,
    CostModel,
    DecodeCandidate,
    FilledCandidate,
    Fit,
    PairCandidate,
    PrefillCandidate,
    PullCandidate,
    cheapest,
    fill,
    local,
    longest,
    remote,
)
from tests.node_peers import id_of


def times(num_new: int, taken_s: float, num_tokens: int | None = None, **fields: float) -> PrefillTimes:
    num_tokens = num_new if num_tokens is None else num_tokens
    return PrefillTimes(id_of("r"), 0, 0.0, taken_s, num_new, num_tokens, **fields)  # type: ignore[arg-type]


def taught(model: CostModel, worker: str, token_s: float, num: int = 64, fixed_s: float = 0.01) -> CostModel:
    random = Random(1)
    for _ in range(num):
        num_new = random.randint(10, 4000)
        taken_s = (fixed_s + token_s * num_new) * random.uniform(0.95, 1.05)
        model.learn(worker, Measured(prefills=(times(num_new, taken_s),)))
    return model


@pytest.mark.parametrize("token_s", [1e-6, 1e-4, 3e-3])
def test_prefill_is_predicted_within_a_tenth_from_any_prior(token_s: float) -> None:
    model = taught(CostModel(), "p", token_s, num=256)
    for num_tokens in (100, 1000, 4000):
        predicted_s = model.of("p").compute_s(num_tokens, num_tokens)
        assert predicted_s == pytest.approx(0.01 + token_s * num_tokens, rel=0.15)


def test_time_of_other_prompts_is_no_cost_of_a_prompt() -> None:
    alone, sticky_worker = CostModel(), CostModel()
    for num_new in (100, 500, 2000, 100, 500, 2000):
        alone.learn("p", Measured(prefills=(times(num_new, 1e-4 * num_new),)))
        late = times(num_new, 1e-4 * num_new + 0.7, own_s=1e-4 * num_new)
        sticky_worker.learn("p", Measured(prefills=(late,)))
    assert sticky_worker.of("p").compute_s(1000, 1000) == pytest.approx(alone.of("p").compute_s(1000, 1000))


def test_new_worker_begins_with_the_measurements_of_others() -> None:
    model = taught(CostModel(), "p", 1e-3)
    assert model.of("q").compute_s(1000, 1000) == pytest.approx(1.01, rel=0.2)
    assert CostModel().of("q").prefill.coefficients == PREFILL_PRIOR


def test_workers_have_their_own_speeds() -> None:
    model = CostModel()
    taught(model, "slow", 1e-3)
    taught(model, "quick", 1e-4)
    assert model.of("slow").compute_s(1000, 1000) > 5 * model.of("quick").compute_s(1000, 1000)


def test_one_stall_changes_little() -> None:
    model = taught(CostModel(), "p", 1e-4)
    before_s = model.of("p").compute_s(1000, 1000)
    model.learn("p", Measured(prefills=(times(1000, 60.0),)))
    assert model.of("p").compute_s(1000, 1000) < 2 * before_s


def test_lasting_slowness_is_learnt() -> None:
    model = taught(CostModel(), "p", 1e-4)
    taught(model, "p", 2e-3)
    assert model.of("p").compute_s(1000, 1000) == pytest.approx(2.01, rel=0.25)


def test_coefficients_are_never_negative() -> None:
    random = Random(2)
    fit = Fit(PREFILL_PRIOR)
    for _ in range(500):
        fit.learn(random.choice((0.0, 1e-9, 86_400.0)), 1.0, random.randint(0, 2**40), random.random() * 1e15)
        assert all(0 <= each < float("inf") for each in fit.coefficients)


def test_steps_grow_with_sequences_and_context() -> None:
    model, random = CostModel(), Random(3)
    for _ in range(256):
        num, context = random.randint(1, 200), random.randint(0, 200_000)
        step = StepTimes(num, 0, context, 0.01 + 1e-4 * num + 2e-7 * context)
        model.learn("d", Measured(steps=(step,)))
    predicted_s = model.of("d").step.predict(1.0, 100, 100_000, 0)
    assert predicted_s == pytest.approx(0.04, rel=0.15)


def test_measured_transfers_tell_a_near_pair_from_a_far_pair() -> None:
    model = CostModel()
    for _ in range(64):
        model.learn_pull("a", "near", times(1, 1.0, pulled_bytes=10**9, pulled_s=0.1))
        model.learn_pull("a", "far", times(1, 1.0, pulled_bytes=10**9, pulled_s=4.0))
    assert model.pulls_from("a")("near", 8000) < 0.25 * model.pulls_from("a")("far", 8000)


def test_bytes_of_a_token_come_from_prompts_without_cached_pages() -> None:
    model = CostModel()
    model.learn_size(1000 * 4096, 1000)
    assert model.bytes_a_token == 4096
    for _ in range(20):
        model.learn_size(100 * 4096, 1000)
    assert model.bytes_a_token == pytest.approx(4096, rel=0.03)


def test_forgotten_worker_begins_anew() -> None:
    model = taught(CostModel(), "p", 1e-3)
    own = model.of("p").prefill.num_measured
    model.forget("p")
    assert own and model.of("p").prefill.num_measured == 0


def test_looking_at_a_worker_keeps_no_state() -> None:
    """Attempts of other routers name workers that never join or leave here."""
    model = taught(CostModel(), "p", 1e-3)
    looked_at = {id(model.of(f"gone-{number}")) for number in range(100)}
    assert len(looked_at) == 1 and set(model._workers) == {"p"}


def test_measurements_of_one_new_worker_are_its_own() -> None:
    model, first = CostModel(), CostModel().of("p").compute_s(1000, 1000)
    assert model.of("p").compute_s(1000, 1000) == first
    taught(model, "p", 1e-3)
    assert model.of("q").prefill.num_measured == 0
    assert model.of("p") is not model.of("q")


def test_prompts_of_one_length_are_enough_for_that_length() -> None:
    fit = Fit(PREFILL_PRIOR)
    for _ in range(2000):
        fit.learn(1e-3, 1.0, 1000, 500_000)
    assert fit.predict(1.0, 1000, 500_000) == pytest.approx(1e-3, rel=0.01)


def test_coefficient_of_zero_elsewhere_can_be_learnt_here() -> None:
    sizes = (10**6, 10**8, 10**9) * 20
    parent = Fit(PULL_PRIOR)
    for size in sizes:
        parent.learn(1e-9 * size, 1.0, size)
    child = parent.heir()
    for size in sizes:
        child.learn(0.02 + 1e-9 * size, 1.0, size)
    assert child.predict(1.0, 10**6) == pytest.approx(0.021, rel=0.05)


def test_one_message_teaches_the_same_as_many() -> None:
    random, steps = Random(4), []
    for _ in range(100):
        num, context = random.randint(1, 200), random.randint(0, 200_000)
        steps.append(StepTimes(num, 0, context, 0.01 + 1e-4 * num + 2e-7 * context))
    together, singly = CostModel(), CostModel()
    together.learn("d", Measured(steps=tuple(steps)))
    for step in steps:
        singly.learn("d", Measured(steps=(step,)))
    for quantities in ((1.0, 1, 0, 0), (1.0, 100, 100_000, 0)):
        one_s, other_s = (each.of("d").step.predict(*quantities) for each in (together, singly))
        assert one_s == pytest.approx(other_s, rel=0.01)


def test_settled_coefficients_include_all_measurements() -> None:
    fit = Fit(PULL_PRIOR)
    for size in (10**6, 10**6, 10**6, 10**9):  # only the last tells what a byte takes
        fit.learn(0.5 + 1e-8 * size, 1.0, size)
    unsettled_s = fit.predict(1.0, 10**9)
    fit.settle()
    assert fit.predict(1.0, 10**9) == pytest.approx(10.5, rel=0.02) != unsettled_s


def steps_of(random: Random, num_sequences: int, pace: float = 1.0, noise: float = 0.2) -> Measured:
    """Steps of a batch that hardly changes, on a machine that other programs use too."""
    found = []
    for _ in range(16):
        num = max(1, num_sequences + random.randint(-1, 1))
        context = num * random.randint(40, 120)
        taken_s = pace * (2e-3 + 1e-4 * num + 1e-7 * context) * random.uniform(1.0, 1.0 + noise)
        found.append(StepTimes(num, 0, context, taken_s))
    return Measured(steps=tuple(found))


@pytest.mark.parametrize("seed", range(10))
def test_steps_of_one_kind_differ_by_pace_alone(seed: int) -> None:
    model, random = CostModel(), Random(seed)
    for worker in ("d0", "d1", "slow"):
        model.join(worker, "alike")
    for _ in range(20):
        model.learn("d0", steps_of(random, 20))
        model.learn("d1", steps_of(random, 2))
        model.learn("slow", steps_of(random, 10, pace=3.0))
    one, other, slow = (model.of(worker).step.coefficients for worker in ("d0", "d1", "slow"))
    for each, likewise, slower in zip(one, other, slow, strict=True):
        assert each == pytest.approx(likewise, rel=0.3)
        assert slower == pytest.approx(3 * likewise, rel=0.4)
    assert model.of("slow").step.predict(1.0, 10, 800, 0) == pytest.approx(3 * 3.4e-3, rel=0.2)


def test_new_worker_has_the_steps_of_its_kind() -> None:
    model, random = CostModel(), Random(1)
    for worker in ("d0", "new"):
        model.join(worker, "decode")
    model.join("p", "prefill")
    for _ in range(20):
        model.learn("d0", steps_of(random, 20))
        model.learn("p", steps_of(random, 20, pace=50.0))
    assert model.of("new").step.predict(1.0, 20, 1600, 0) == pytest.approx(4.5e-3, rel=0.3)
    assert model.of("p").step.predict(1.0, 20, 1600, 0) == pytest.approx(50 * 4.5e-3, rel=0.3)


def test_no_sequence_is_free() -> None:
    model = CostModel()
    model.learn("d", Measured(steps=tuple(StepTimes(num, 0, 0, 0.01) for num in (1, 5, 10, 20) * 16)))
    fixed_s, sequence_s, _, _ = model.of("d").step.coefficients
    assert fixed_s == pytest.approx(0.01, rel=0.1) and sequence_s >= LEAST_SEQUENCE * fixed_s


def test_kinds_without_workers_are_forgotten() -> None:
    model, random = CostModel(), Random(1)
    for number in range(10):
        model.join(f"d{number}", f"kind {number}")
        model.learn(f"d{number}", steps_of(random, 5))
        model.forget(f"d{number}")
    assert not model._steps and not model._kinds and not model._workers


IDLE = CandidateLoad(num_tokens=1000, num_output_tokens=100, crowd_rate=0.0)


def compute_s(num_new: int, num_tokens: int) -> float:
    return 0.01 + 1e-3 * num_new


def nothing(worker: str) -> float:
    """No worker was given anything."""
    return 0.0


def a_computer(worker: str = "p", wait_s: float = 0.0, num_held: int = 0) -> PrefillCandidate:
    return PrefillCandidate(worker, wait_s, num_held, (0.01, 1e-3, 0.0))


def a_source(worker: str, num_tokens: int, token_s: float = 1e-4) -> PullCandidate:
    return PullCandidate(worker, num_tokens, lambda computer, num: 0.005 + token_s * num)


def a_decoder(
    worker: str = "d", num_delayed: int = 0, num_held: int = 0, wait_s: float = 0.0
) -> DecodeCandidate:
    computer = a_computer(worker, wait_s, num_held)
    return DecodeCandidate(computer, num_delayed, room_s=0.0, join_s=0.01, harm_s=1e-3 * num_delayed)


def local_at(decoder: DecodeCandidate) -> PairCandidate:
    return local(filled_at(decoder.computer), decoder)


def filled_at(
    computer: PrefillCandidate, sources: Sequence[PullCandidate] = (), load: CandidateLoad = IDLE
) -> FilledCandidate:
    (filled,) = fill([computer], load, sources)
    return filled


def a_candidate(total_s: float, prefill: str = "p", num_held: int = 0, queue_s: float = 0.0) -> PairCandidate:
    """A decode worker that costs nothing."""
    computer, compute_s = a_computer(prefill or "d", queue_s), total_s - queue_s
    filled = FilledCandidate(total_s, computer, "", num_held, 100, 0.0, compute_s, 0.0)
    decoder = DecodeCandidate(a_computer("d"), num_delayed=0, room_s=0.0, join_s=0.0, harm_s=0.0)
    return remote(filled, decoder, 0.0) if prefill else local(filled, decoder)


def test_held_tokens_are_not_computed() -> None:
    assert filled_at(a_computer(num_held=900)).compute_s == pytest.approx(compute_s(100, 1000))


def test_last_token_is_always_computed() -> None:
    filled = filled_at(a_computer(num_held=1000), [a_source("q", 1000)])
    assert filled.num_held_tokens == 999
    assert filled.compute_s == pytest.approx(compute_s(1, 1000))


def test_prefix_is_pulled_where_pulling_is_faster_than_computing() -> None:
    filled = filled_at(a_computer(), [a_source("q", 800)])
    assert (filled.source, filled.num_held_tokens) == ("q", 800)
    assert filled.pull_s == 0.005 + 1e-4 * 800
    slow = filled_at(a_computer(), [a_source("q", 800, token_s=2e-3)])
    assert (slow.source, slow.num_held_tokens) == ("", 0)


def test_nothing_is_pulled_from_a_worker_with_other_weights() -> None:
    source, computer = replace(a_source("q", 800), page_format=("old", "float32")), a_computer()
    assert filled_at(replace(computer, page_format=("new", "float32")), [source]).source == ""
    assert filled_at(replace(computer, page_format=("old", "float32")), [source]).source == "q"


def test_held_prefix_is_not_pulled() -> None:
    assert filled_at(a_computer("q"), [a_source("q", 800)]).source == ""
    assert filled_at(a_computer(num_held=800), [a_source("q", 800)]).source == ""


def test_pull_is_hidden_behind_the_queue() -> None:
    filled = filled_at(a_computer(wait_s=10.0), [a_source("q", 800)])
    assert (filled.source, filled.pull_s, filled.computer.wait_s) == ("q", 0.0, 10.0)


def test_better_of_two_sources_is_used() -> None:
    near, far = a_source("near", 800, 1e-5), a_source("far", 900, 2e-3)
    assert filled_at(a_computer(), [far, near]).source == "near"


def test_later_arrivals_make_computing_more_expensive_behind_a_queue() -> None:
    crowded = replace(IDLE, crowd_rate=2.0)
    short, long = (filled_at(a_computer(wait_s=wait_s), [], crowded).crowd_s for wait_s in (0.0, 5.0))
    assert 0 < short < long


def test_local_prefill_makes_the_batch_wait() -> None:
    alone, full = local_at(a_decoder()), local_at(a_decoder(num_delayed=8))
    assert alone.terms.harm_s == 0.0
    assert full.terms.harm_s >= 8 * full.terms.compute_s
    assert alone.terms.handoff_s == full.terms.handoff_s == 0.0


def test_running_decode_is_delayed_until_its_end_at_most() -> None:
    compute_s = local_at(a_decoder()).terms.compute_s
    for patience_s, waits_s in ((0.0, 0.0), (0.5 * compute_s, 0.5 * compute_s), (9.0, compute_s)):
        decoder = replace(a_decoder(), num_delayed=8, patience_s=patience_s)
        terms = local_at(decoder).terms
        assert terms.harm_s == pytest.approx(decoder.harm_s + 8 * waits_s)
        assert terms.total_s == pytest.approx(local_at(decoder).total_s)


@pytest.mark.parametrize("is_local", (True, False))
def test_cost_of_a_candidate_is_the_sum_of_its_terms(is_local: bool) -> None:
    decoder = DecodeCandidate(a_computer("d", 0.5), num_delayed=3, room_s=0.25, join_s=0.3, harm_s=0.2)
    computer, load = decoder.computer if is_local else a_computer("p", 0.125), replace(IDLE, crowd_rate=2.0)
    filled = filled_at(computer, [a_source("q", 800)], load)
    candidate = local(filled, decoder) if is_local else remote(filled, decoder, 0.05)
    assert candidate.total_s == pytest.approx(candidate.terms.total_s)
    assert (candidate.decode, candidate.prefill) == ("d", "" if is_local else "p")
    assert candidate.num_held_tokens + candidate.num_new_tokens == load.num_tokens
    assert candidate.terms.handoff_s == (0.0 if is_local else 0.05)


def test_busy_batch_sends_the_prompt_away_and_an_idle_one_keeps_it() -> None:
    for num_delayed, expected in ((0, ""), (16, "p")):
        decoder = a_decoder(num_delayed=num_delayed)
        away = remote(filled_at(a_computer()), decoder, 0.05)
        assert cheapest([local_at(decoder), away], 0, nothing).prefill == expected


def test_hot_prefix_is_used_elsewhere_when_its_holder_is_busy() -> None:
    sources = [a_source("holder", 900)]
    holder, other = a_computer("holder", wait_s=3.0, num_held=900), a_computer("other")
    filled = fill([holder, other], IDLE, sources)
    candidates = [remote(each, a_decoder(), 0.0) for each in filled]
    chosen = cheapest(candidates, 0, nothing)
    assert (chosen.prefill, chosen.source) == ("other", "holder")


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
    assert longest(candidates, 0, nothing).prefill == "p"
    equals = [a_candidate(1.0, "p", 64, queue_s=0.5), a_candidate(1.0, "q", 64, queue_s=0.1)]
    assert longest(equals, 0, nothing).prefill == "q"
