"""Drafts change no token and no log probability; the tokens only come sooner."""

from itertools import pairwise, product
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.config.engine import engine_config
from baton.engine import engine as engine_module
from baton.engine.engine import Engine
from baton.engine.runner.replica_rank import PendingTensor
from baton.engine.runner.step_inputs import StepArrays
from baton.engine.speculation.draft_lengths import DRAFTED_STEPS, MIN_GAIN, Acceptance, StepCosts
from baton.engine.speculation.draft_model import ModelDrafter
from baton.errors import ConfigError
from baton.messages.workers import Tier
from baton.request import Request, SamplingParams, TokenIds
from tests import disturbed_requests
from tests.disturbed_requests import answers, repeated_prompt
from tests.tiny_models import VOCAB_SIZE, add, generate, run_to_end, tiny_engine, token_ids, write_config

pytestmark = pytest.mark.usefixtures("ranks_are_forked")

# Long and less random answers repeat themselves, so that lookups find something.
SAMPLINGS: Final[list[dict[str, Any]]] = [
    *disturbed_requests.SAMPLINGS,
    {"temperature": 0.0, "max_tokens": 60},
    {"temperature": 0.4, "seed": 4, "n": 3, "repetition_penalty": 0.9, "frequency_penalty": 0.2},
]
FLAT: Final = {1: 1.0, 4096: 1.0}  # every step takes a second
NGRAM: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 1}
SUFFIX: dict[str, Any] = {"method": "suffix", "prompt_lookup_min": 2, "num_speculative_tokens": 5}
FEW_PAGES: Final = {"page_size": 16, "kv_cache_memory_bytes": 2**17}


@pytest.fixture(autouse=True)
def drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every step the same seconds, so that all proposed tokens are computed."""
    monkeypatch.setattr(engine_module, "time_steps", lambda *arguments: StepCosts(FLAT, FLAT))
    monkeypatch.setattr(StepCosts, "observe", lambda *arguments, **fields: None)


@pytest.fixture
def weaker_model(tmp_path: Path) -> Path:
    """A model of another seed and size with the same vocabulary."""
    return write_config(tmp_path / "weaker", num_hidden_layers=1)


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (NGRAM, {}),
    (NGRAM, {"scheduler": {"max_num_batched_tokens": 5}}),
    (NGRAM, {"cache": {"page_size": 1, "host_cache_memory_bytes": 2**16, "kv_cache_memory_bytes": 2**17}}),
    (NGRAM, {"tensor_parallel_size": 2}),
    (NGRAM, {"pipeline_parallel_size": 2}),
    (NGRAM, {"scheduler": {"policy": "static"}}),
    (SUFFIX, {}),
    (SUFFIX, {"scheduler": {"policy": "dynamic"}}),
    ({"model": "same"}, {"pipeline_parallel_size": 2}),
    ({"model": "same"}, {}),
    ({"model": "same", "num_speculative_tokens": 3}, {"tensor_parallel_size": 2}),
    ({"model": "same"}, {"scheduler": {"max_num_batched_tokens": 9}}),
    ({"model": "weaker"}, {}),
    ({"model": "weaker"}, {"cache": FEW_PAGES}),
    ({"model": "weaker"}, {"pipeline_parallel_size": 2, "cache": FEW_PAGES}),
]
SLOW: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (SUFFIX, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    ({"model": "same"}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    ({"model": "weaker"}, {"pipeline_parallel_size": 2, "scheduler": {"max_num_batched_tokens": 9}}),
    (NGRAM, {"pipeline_parallel_size": 2, "scheduler": {"policy": "static"}}),
]


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[Any]:
    """The answers without drafts, by seed."""
    engine = tiny_engine(tiny_model)
    return [answers(engine, seed, SAMPLINGS, repeated_prompt) for seed in range(3)]


@pytest.mark.parametrize(
    ("speculative", "settings"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_tokens_and_logprobs_are_those_without(
    speculative: dict[str, Any],
    settings: dict[str, Any],
    plain: list[Any],
    tiny_model: Path,
    weaker_model: Path,
) -> None:
    num_seeds = 1 if {"tensor_parallel_size", "pipeline_parallel_size"} & settings.keys() else 3
    models = {"same": str(tiny_model), "weaker": str(weaker_model)}
    if "model" in speculative:
        speculative = {**speculative, "model": models[speculative["model"]]}
    engine = tiny_engine(tiny_model, speculative=speculative, **settings)
    found = [answers(engine, seed, SAMPLINGS, repeated_prompt) for seed in range(num_seeds)]
    assert found == plain[:num_seeds]
    load = engine.load()
    assert load.num_accepted_tokens > 0
    assert load.num_accepted_tokens < load.num_draft_tokens or speculative.get("model") == str(tiny_model)
    assert engine.load().pages["active"] == 0
    engine.close()


def num_steps(engine: Engine, prompt: list[int], **sampling: Any) -> tuple[list[int | None], int]:
    add(engine, "r", prompt, **sampling)
    outputs, steps = [], 0
    while engine.has_work():
        outputs += engine.step()
        steps += 1
    return token_ids(outputs), steps


def test_draft_model_that_is_the_target_is_always_right(tiny_model: Path) -> None:
    """Seeded sampling too: both draw with the randomness of the same position."""
    engine = tiny_engine(tiny_model, speculative={"model": str(tiny_model), "num_speculative_tokens": 4})
    sampling: dict[str, Any] = {"temperature": 1.2, "seed": 9, "max_tokens": 41, "repetition_penalty": 1.2}
    expected = token_ids(generate(tiny_engine(tiny_model), [5, 6, 7], **sampling))
    # The first step with draft tokens is a try of two; the others have four.
    assert num_steps(engine, [5, 6, 7], **sampling) == (expected, 1 + 1 + 37 // 5 + 1)
    assert engine.load().num_accepted_tokens == engine.load().num_draft_tokens == 2 + 7 * 4 + 1


def test_last_stage_draws_after_drafts_too(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[StepArrays] = []
    made = tiny_engine(tiny_model, speculative=NGRAM, pipeline_parallel_size=2)
    answer = made.runner.answer

    def note(arrays: StepArrays) -> PendingTensor:
        steps.append(arrays)
        return answer(arrays)

    monkeypatch.setattr(made.runner, "answer", note)
    for sampling in ({"temperature": 0.0}, {"temperature": 0.5, "seed": 3, "top_p": 0.9}):
        expected = token_ids(generate(tiny_engine(tiny_model), [5, 6] * 8, max_tokens=40, **sampling))
        assert token_ids(generate(made, [5, 6] * 8, max_tokens=40, **sampling)) == expected
    assert all(step.sampling is not None for step in steps)
    assert any(len(step.logit_rows) > 1 for step in steps) and made.load().num_accepted_tokens > 0
    made.close()


def test_answer_that_was_given_before_is_copied(tiny_model: Path) -> None:
    engine = tiny_engine(tiny_model, speculative={"method": "suffix", "num_speculative_tokens": 8})
    first, slow = num_steps(engine, [5, 6, 7], max_tokens=40, temperature=1.0, seed=1)
    again, fast = num_steps(engine, [5, 6, 7], max_tokens=40, temperature=1.0, seed=1)
    assert again == first and slow > 30 and fast < 10


def test_worker_with_drafts_continues_what_one_without_began(tiny_model: Path) -> None:
    sampling = SamplingParams(temperature=0.8, seed=2, max_tokens=40, repetition_penalty=0.8)
    request = Request(request_id="r", token_ids=TokenIds.of([5, 6] * 8), sampling=sampling)
    plain = tiny_engine(tiny_model)
    plain.add(request)
    whole = [output.token_id or 0 for output in run_to_end(plain)]
    engine = tiny_engine(tiny_model, speculative=SUFFIX)
    for cut in range(1, 40):
        engine.add(msgspec.structs.replace(request, generated_token_ids=tuple(whole[:cut])))
        assert token_ids(run_to_end(engine)) == whole[cut:]
    assert engine.load().num_accepted_tokens > 0


def test_pages_of_rejected_drafts_are_not_offered(tiny_model: Path, weaker_model: Path) -> None:
    """After the answer, the prefix cache knows the pages of the prompt and the answer alone."""
    engine = tiny_engine(tiny_model, speculative={"model": str(weaker_model)}, cache={"page_size": 2})
    answer = token_ids(generate(engine, [5, 6, 7], max_tokens=30))
    known = engine.take_page_changes(is_snapshot=True).keys[Tier.DEVICE]
    keys = engine.page_keys([5, 6, 7, *(each or 0 for each in answer)], b"", 2)
    assert engine.load().num_draft_tokens > engine.load().num_accepted_tokens
    assert set(known) == set(keys[: len(known)]) and len(known) == 32 // 2


@pytest.mark.parametrize(
    ("speculative", "reason"),
    [
        ({}, "speculative.model"),
        ({"method": "ngram", "model": "x"}, "speculative.model"),
        ({"method": "ngram", "prompt_lookup_min": 9}, "speculative.prompt_lookup_min"),
        ({"method": "ngram", "prompt_lookup_max": 0}, "speculative.prompt_lookup_max"),
        ({"method": "eagle"}, "speculative.method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "speculative.num_speculative_tokens"),
    ],
)
def test_bad_settings_are_named(speculative: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        engine_config({"model": "m", "speculative": speculative})


def test_draft_model_of_another_vocabulary_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    other = write_config(tmp_path / "other", vocab_size=VOCAB_SIZE + 1)
    with pytest.raises(ConfigError, match="vocabulary of 131 tokens, got 132"):
        tiny_engine(tiny_model, ManualClock(), speculative={"model": str(other)})


@given(
    seconds=st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4),
    wanted=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=1, max_size=3),
    num_others=st.integers(0, 3),
    token_s=st.sampled_from([0.0, 0.1]),
)
def test_lengths_yield_the_most_tokens_a_second(
    seconds: list[float], wanted: list[tuple[float, int]], num_others: int, token_s: float
) -> None:
    sizes = dict(zip((1, 2, 4, 8), sorted(seconds), strict=True))
    costs = StepCosts(sizes, sizes)
    estimates, most = [estimate for estimate, _ in wanted], [length for _, length in wanted]
    num_decodes = len(wanted) + num_others

    def rate(lengths: tuple[int, ...]) -> float:
        gained = sum(
            estimate**place
            for estimate, n in zip(estimates, lengths, strict=True)
            for place in range(1, n + 1)
        )
        step_s = costs.drafted_s(num_decodes + sum(lengths)) + token_s * sum(lengths)
        return (num_decodes + gained) / step_s

    best = max(rate(each) for each in product(*(range(length + 1) for length in most)))
    plain = num_decodes / costs.plain_s(num_decodes)
    found = costs.choose_num_drafts(
        estimates, most, num_decodes=num_decodes, num_tokens=num_decodes, token_s=token_s
    )
    if sum(found):
        assert rate(tuple(found)) == pytest.approx(best) and best >= MIN_GAIN * plain
    else:
        assert best <= MIN_GAIN * plain * 1.000001


def test_real_steps_correct_the_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    costs = StepCosts({1: 1.0, 8: 1.0}, {1: 1.0, 8: 1.0})
    assert costs.choose_num_drafts([0.5], [4], num_decodes=1, num_tokens=1) == [4]
    for _ in range(30):
        costs.observe(1, 2.0, has_drafts=False)
        costs.observe(5, 8.0, has_drafts=True)
    assert costs.plain_s(1) == pytest.approx(2.0, rel=0.01) and costs.drafted_s(5) > 7.0
    assert costs.choose_num_drafts([0.5], [4], num_decodes=1, num_tokens=1) == [0]
    for _ in range(400):
        costs.observe(1, 2.0, has_drafts=False)
    assert costs.choose_num_drafts([0.5], [4], num_decodes=1, num_tokens=1) == [4], "it is tried again"


def test_proposal_counts_once() -> None:
    """Else a sequence whose draft tokens are not tried would never be tried again."""
    acceptance = Acceptance()
    acceptance.remember([1, 2], [3, 4])
    assert acceptance.observe([1, 2, 3]) == 1
    assert acceptance.rate == pytest.approx(0.6)
    acceptance.remember([1, 2, 3], [5])
    assert acceptance.observe([1, 2, 3, 4]) is None
    assert acceptance.rate == pytest.approx(0.48)
    assert acceptance.observe([1, 2, 3, 4, 5]) is None and acceptance.rate == pytest.approx(0.48)


def test_draft_model_is_tried_again_once_it_may_be_right(tiny_model: Path, weaker_model: Path) -> None:
    """Its waits grow, and end."""
    engine = tiny_engine(tiny_model, speculative={"model": str(weaker_model), "num_speculative_tokens": 2})
    drafter, lengths = engine.scheduler.drafter, list[int]()
    assert isinstance(drafter, ModelDrafter)
    drafter._costs = StepCosts({1: 1.0, 64: 64.0}, {1: 1.0, 2: 1.3, 64: 64.0})  # a draft token must be likely
    engine.on_batch = lengths.append
    generate(engine, [5, 6, 7], max_tokens=90)
    tries = [place for place, length in enumerate(lengths[1:]) if length > 1]
    waits = [later - earlier for earlier, later in pairwise(tries) if later - earlier > 8]
    assert waits and waits == sorted(waits) and waits[0] >= 16


def test_time_of_a_step_is_that_of_one_token_of_each_sequence(tiny_model: Path) -> None:
    engine = tiny_engine(tiny_model, speculative={"model": str(tiny_model), "num_speculative_tokens": 4})
    add(engine, "r", [5, 6, 7], max_tokens=30)
    engine.step()
    nums, shares = [], []  # tokens of each step, and shares of its time: no process delays all of them
    while engine.has_work():
        started_s = perf_counter()
        nums.append(len(engine.step()))
        whole_s, step = perf_counter() - started_s, engine.last_step()
        assert step is not None
        shares.append(nums[-1] * step.step_s / whole_s)
    assert nums[0] == 3 and max(shares) > 0.1 and all(each < 1 for each in shares)


def test_small_gain_is_compared_with_a_plain_step_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a plain step that has become cheaper would never be noticed."""
    monkeypatch.undo()
    costs = StepCosts({1: 1.0, 8: 1.0}, {1: 1.0, 8: 1.0})
    for rate, after in ((0.2, [0]), (0.5, [4])):
        for _ in range(DRAFTED_STEPS):
            assert costs.choose_num_drafts([rate], [4], num_decodes=1, num_tokens=1) == [4]
            costs.observe(5, 1.0, has_drafts=True)
        assert costs.choose_num_drafts([rate], [4], num_decodes=1, num_tokens=1) == after
        costs.observe(1, 1.0, has_drafts=False)
