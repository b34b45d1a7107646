"""An answer that an earlier attempt began, and one choice of several alone: the tokens of one plain run."""

from pathlib import Path
from typing import Any

import pytest

from baton.engine.engine import Engine
from baton.errors import InvalidRequest
from baton.request import FinishReason, Request, SamplingParams, StepOutput, TokenIds
from tests.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, generate, run_to_end, tiny_engine, token_ids

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)


@pytest.fixture(scope="module", params=[True, False], ids=["prefix-cache", "no-cache"])
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> Engine:
    return tiny_engine(tiny_model, cache={"enable_prefix_caching": request.param})


def answer(engine: Engine, *, sampling: SamplingParams, **fields: Any) -> list[StepOutput]:
    engine.add(Request(request_id="r", token_ids=TokenIds.of(PROMPT), sampling=sampling, **fields))
    return run_to_end(engine)


def essence(outputs: list[StepOutput]) -> list[tuple[Any, ...]]:
    return [(each.choice, each.index, each.token_id, each.logprobs, each.finish_reason) for each in outputs]


def test_single_choices_equal_those_of_one_request(engine: Engine) -> None:
    params = {"temperature": 1.2, "max_tokens": 6, "seed": 3, "prompt_logprobs": 0}
    together = answer(engine, sampling=SamplingParams(n=3, **params))  # type: ignore[arg-type]
    for choice in range(3):
        alone = answer(engine, sampling=SamplingParams(**params), choice=choice)  # type: ignore[arg-type]
        of_it = [output for output in together if output.choice == choice]
        assert essence(alone) == essence(of_it)
        assert [each.prompt_logprobs for each in alone] == [each.prompt_logprobs for each in of_it]


def test_stop_id_that_the_answer_has_already_ends_nothing(engine: Engine) -> None:
    free = token_ids(answer(engine, sampling=SamplingParams(temperature=0.0, max_tokens=8)))
    stop = free[0] or 0
    sampling = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(stop,))
    rest = answer(engine, sampling=sampling, generated_token_ids=(stop,))
    expected = free[1 : free.index(stop, 1) + 1] if stop in free[1:] else free[1:]
    assert token_ids(rest) == expected


def test_models_length_ends_a_continued_answer_too(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=None)
    begun = (7,) * (MAX_MODEL_LEN - len(PROMPT) - 2)
    rest = answer(engine, sampling=sampling, generated_token_ids=begun)
    assert [each.index for each in rest] == [len(begun), len(begun) + 1]
    assert rest[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"generated_token_ids": (1, 2)}, "2 tokens fill max_tokens 2"),
        ({"generated_token_ids": (1,), "n": 2}, "n must be 1, got 2"),
        ({"choice": 1, "n": 2}, "n must be 1, got 2"),
        ({"choice": 128}, "choice must be between 0 and 127, got 128"),
        ({"choice": -1}, "choice must be between 0 and 127, got -1"),
        ({"choice": True}, "choice must be an integer"),
        ({"generated_token_ids": (VOCAB_SIZE,), "max_tokens": 5}, f"token id {VOCAB_SIZE} is outside"),
        (
            {"generated_token_ids": (1,) * (MAX_MODEL_LEN - len(PROMPT)), "max_tokens": None},
            f"10 tokens and {MAX_MODEL_LEN - 10} of the answer; the model takes {MAX_MODEL_LEN}",
        ),
    ],
)
def test_answer_that_cannot_continue_is_refused(engine: Engine, fields: dict[str, Any], message: str) -> None:
    sampling = SamplingParams(n=fields.get("n", 1), max_tokens=fields.get("max_tokens", 2))
    of_request = {name: value for name, value in fields.items() if name not in ("n", "max_tokens")}
    with pytest.raises(InvalidRequest, match=message):
        answer(engine, sampling=sampling, **of_request)
    assert not engine.has_work()


def test_too_few_pages_for_the_generated_tokens_are_reported(tiny_model: Path) -> None:
    engine = tiny_engine(tiny_model)
    engine.max_model_len = 10**6  # as for a model with more positions than its pages hold
    sampling = SamplingParams(temperature=0.0, max_tokens=None)
    with pytest.raises(InvalidRequest, match="of the answer; the model and its KV pages hold"):
        answer(engine, sampling=sampling, generated_token_ids=(1,) * 5000)
    assert token_ids(generate(engine, list(PROMPT), max_tokens=2))
