"""Requests in, tokens out, over a tiny model with random weights."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.clock import ManualClock
from baton.engine.engine import Engine
from baton.errors import InvalidRequest
from baton.request import (
    HEALTH_PRIORITY,
    FinishReason,
    Request,
    SamplingParams,
    StepOutput,
    TokenIds,
)
from tests.tiny_models import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    add,
    generate,
    run_to_end,
    tiny_engine,
    token_ids,
    write_config,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> Engine:
    return tiny_engine(tiny_model)


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    """Idle before and after every test, with all pages back."""
    yield loaded
    assert not loaded.has_work()
    loaded.scheduler.check_integrity()


def drain(engine: Engine) -> dict[tuple[str, int], list[StepOutput]]:
    """(request id, choice) -> outputs in order."""
    outputs = defaultdict(list)
    for output in run_to_end(engine):
        outputs[output.request_id, output.choice].append(output)
    return dict(outputs)


def test_every_choice_ends_in_one_output_with_a_reason(engine: Engine) -> None:
    add(engine, "one", PROMPT, n=3, temperature=1.0)
    add(engine, "two", PROMPT[:1], max_tokens=1)
    outputs = drain(engine)
    assert set(outputs) == {("one", 0), ("one", 1), ("one", 2), ("two", 0)}
    for of_one in outputs.values():
        assert [output.index for output in of_one] == list(range(len(of_one)))
        assert [output.finish_reason for output in of_one[:-1]] == [None] * (len(of_one) - 1)
        assert of_one[-1].finish_reason is FinishReason.LENGTH
        assert all(0 <= (output.token_id or 0) < VOCAB_SIZE for output in of_one)
    assert len(outputs["two", 0]) == 1 and len(outputs["one", 2]) == 6


def test_choices_differ_and_a_seed_repeats_them(engine: Engine) -> None:
    runs = []
    for company in (0, 5):
        add(engine, "seeded", PROMPT, n=4, temperature=1.0, seed=11)
        for other in range(company):
            add(engine, f"other {other}", PROMPT[other:], temperature=1.0)
        outputs = drain(engine)
        runs.append([token_ids(outputs["seeded", choice]) for choice in range(4)])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 4


def test_without_a_seed_the_engines_own_decides(tiny_model: Path) -> None:
    def two_answers(seed: int) -> list[list[int | None]]:
        engine = tiny_engine(tiny_model, cache={"enable_prefix_caching": False}, seed=seed)
        return [token_ids(generate(engine, PROMPT, temperature=1.0)) for _ in range(2)]

    first = two_answers(1)
    assert first == two_answers(1)
    assert first[0] != first[1]


def test_aborted_request_ends_at_once_and_once(engine: Engine) -> None:
    add(engine, "kept", PROMPT)
    add(engine, "aborted", PROMPT, n=2, max_tokens=50, prompt_logprobs=0)
    while not (first := [output for output in engine.step() if output.request_id == "aborted"]):
        pass
    ended = engine.abort("aborted")
    assert [(output.choice, output.token_id, output.finish_reason) for output in ended] == [
        (0, None, FinishReason.ABORT),
        (1, None, FinishReason.ABORT),
    ]
    assert [output.index for output in ended] == [first[0].index + 1, 0]  # the others wait for its pages
    assert engine.abort("aborted") == [] and engine.abort("never seen") == []
    assert all(request_id == "kept" for request_id, _ in drain(engine))


def test_request_aborted_before_its_first_step_leaves_nothing(engine: Engine) -> None:
    add(engine, "early", PROMPT)
    assert [output.index for output in engine.abort("early")] == [0]
    assert engine.step() == []


def test_request_aborted_within_its_prompt_leaves_nothing_to_one_of_its_name(tiny_model: Path) -> None:
    engine = tiny_engine(tiny_model, scheduler={"max_num_batched_tokens": 4})
    add(engine, "only", PROMPT, prompt_logprobs=0)
    assert engine.step() == [] and len(engine.abort("only")) == 1
    assert generate(engine, PROMPT[:1], prompt_logprobs=0)[0].prompt_logprobs == (None,)


def test_refused_request_leaves_nothing(engine: Engine) -> None:
    for prompt, sampling in (([], {}), ([VOCAB_SIZE], {}), (PROMPT, {"top_k": VOCAB_SIZE + 1})):
        with pytest.raises(InvalidRequest):
            add(engine, "refused", prompt, **sampling)
        assert not engine.has_work()
    add(engine, "refused", PROMPT)  # the id is free
    drain(engine)


def test_id_in_use_is_refused_and_the_first_goes_on(engine: Engine) -> None:
    add(engine, "same", PROMPT)
    with pytest.raises(ValueError, match="already here"):
        add(engine, "same", PROMPT[:2])
    assert len(drain(engine)["same", 0]) == 6


def test_stop_id_ends_the_answer_but_not_before_min_tokens(engine: Engine) -> None:
    free = token_ids(generate(engine, PROMPT, max_tokens=12))
    stop = free[2] or 0
    stopped = generate(engine, PROMPT, max_tokens=12, stop_token_ids=(stop,))
    assert token_ids(stopped) == free[: free.index(stop) + 1]
    assert stopped[-1].finish_reason is FinishReason.STOP
    later = generate(engine, PROMPT, max_tokens=12, stop_token_ids=(stop,), min_tokens=8)
    assert len(later) >= 8 and stop not in token_ids(later)[:8]


def test_models_end_token_ends_the_answer_unless_ignored(tmp_path: Path, engine: Engine) -> None:
    free = token_ids(generate(engine, PROMPT, max_tokens=9))
    write_config(tmp_path, eos_token_id=free[3])
    ending = tiny_engine(tmp_path)
    assert token_ids(generate(ending, PROMPT, max_tokens=9)) == free[: free.index(free[3]) + 1]
    assert token_ids(generate(ending, PROMPT, max_tokens=9, ignore_eos=True)) == free


def test_answer_never_outgrows_the_model(engine: Engine) -> None:
    prompt = [i % VOCAB_SIZE for i in range(MAX_MODEL_LEN - 3)]
    outputs = generate(engine, prompt, max_tokens=1000)
    assert len(outputs) == 3 and outputs[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompt_logprobs_are_those_the_tokens_were_generated_with(tiny_model: Path, dtype: str) -> None:
    """To the bit: a position computed in a prefill, in chunks of any size, and in decode is the same."""
    engine = tiny_engine(tiny_model, dtype=dtype)
    answer = generate(engine, PROMPT, logprobs=2, max_tokens=20)
    generated = [output.logprobs for output in answer]
    whole = [*PROMPT, *(output.token_id or 0 for output in answer)]
    for chunk in (2048, 7, 1):
        chunked = tiny_engine(tiny_model, dtype=dtype, scheduler={"max_num_batched_tokens": chunk})
        (first, *rest) = generate(chunked, whole, prompt_logprobs=2, max_tokens=2)
        assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
        assert list(first.prompt_logprobs[len(PROMPT) :]) == generated
        assert [output.prompt_logprobs for output in rest] == [None]


def test_one_choice_answers_for_the_prompt_and_the_others_share_its_pages(engine: Engine) -> None:
    add(engine, "alone", PROMPT, prompt_logprobs=1)
    (expected,) = drain(engine).values()
    add(engine, "three", PROMPT, n=3, prompt_logprobs=1)
    first, *others = drain(engine).values()
    assert first[0].prompt_logprobs == expected[0].prompt_logprobs is not None
    assert first[0].num_cached_tokens == 0
    assert [of_one[0].prompt_logprobs for of_one in others] == [None, None]
    assert [of_one[0].num_cached_tokens for of_one in others] == [8, 8]  # two whole pages
    assert {tuple(token_ids(of_one)) for of_one in (first, *others)} == {tuple(token_ids(expected))}


def test_step_that_waits_for_the_queue_window_says_how_long(tiny_model: Path) -> None:
    clock = ManualClock()
    engine = tiny_engine(tiny_model, clock, scheduler={"max_queue_delay_ms": 250.0})
    add(engine, "waits", PROMPT)
    assert engine.step() == [] and engine.wait_s == pytest.approx(0.25)
    clock.advance(0.25)
    assert len(engine.step()) == 1 and engine.wait_s is None
    drain(engine)


def test_engine_of_one_rank_can_be_closed_twice(tiny_model: Path) -> None:
    engine = tiny_engine(tiny_model)
    engine.close()
    engine.close()


def test_largest_step_runs_and_leaves_no_trace(tiny_model: Path) -> None:
    engine = tiny_engine(tiny_model)
    engine.runner.run_largest_step()
    assert not engine.runner.pool.device.any()


def test_health_check_is_answered_while_every_seat_is_taken(tiny_model: Path) -> None:
    engine = tiny_engine(tiny_model, scheduler={"max_num_seqs": 1})
    add(engine, "client", PROMPT, max_tokens=30)
    engine.step()
    sampling = SamplingParams(temperature=0.0, max_tokens=2)
    check = Request(
        request_id="check", token_ids=TokenIds.of(PROMPT[:3]), sampling=sampling, priority=HEALTH_PRIORITY
    )
    engine.add(check)
    ended = [output.request_id for output in run_to_end(engine) if output.finish_reason]
    assert ended == ["check", "client"]
