from random import Random

import pytest

from baton.messages.control import Measured
from baton.messages.workers import PrefillTimes, StepTimes
from baton.router.policies.cost_model import LEAST_SEQUENCE, PREFILL_PRIOR, PULL_PRIOR, CostModel, Fit
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
    alone, beside_others = CostModel(), CostModel()
    for num_new in (100, 500, 2000, 100, 500, 2000):
        alone.learn("p", Measured(prefills=(times(num_new, 1e-4 * num_new),)))
        late = times(num_new, 1e-4 * num_new + 0.7, own_s=1e-4 * num_new)
        beside_others.learn("p", Measured(prefills=(late,)))
    assert beside_others.of("p").compute_s(1000, 1000) == pytest.approx(alone.of("p").compute_s(1000, 1000))


def test_new_worker_begins_with_the_measurements_of_others() -> None:
    model = taught(CostModel(), "p", 1e-3)
    assert model.of("q").compute_s(1000, 1000) == pytest.approx(1.01, rel=0.2)
    assert CostModel().of("q").prefill.coefficients == PREFILL_PRIOR


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
    child = parent.successor()
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
