"""Tools whose calls are constrained, with the real `openai` client and a real engine with the tiny model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import jsonschema
import openai
import pytest

from baton.gateway.text.tokenizer import Tokenizer
from tests.e2e.conftest import client_of
from tests.engine_frontend import served_engine, tiny_engine
from tests.tool_model import TEMPLATE, tool_model

CITY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "is_short": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Final[Any] = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
TIME: Final[Any] = {"type": "function", "function": {"name": "time"}}
WEATHER_ONLY: Final[Any] = {"type": "function", "function": {"name": "weather"}}
TAGS: Final = ("<tool_call>", "</tool_call>")


class Model(NamedTuple):
    client: openai.OpenAI
    first_tag: int | None = None  # the token of the first tag, if tags are tokens


@pytest.fixture(scope="module", params=[False, True], ids=["tags as text", "tags as tokens"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """One parser of many: tests/unit/gateway/text/test_answer_grammar.py has the calls of all of them."""
    tags = TAGS if request.param else ()
    directory = tool_model(tmp_path_factory.mktemp("model"), TEMPLATE, tags)
    engine = tiny_engine(model=directory) if tags else tiny_engine()
    with (
        served_engine(engine, model=directory, tool_call_parser="hermes") as gateway,
        client_of(gateway.url) as client,
    ):
        tag = Tokenizer.from_directory(Path(directory)).encode(tags[0]) if tags else [None]
        yield Model(client, *tag)


def ask(model: Model, seed: int = 1, max_tokens: int = 400, **given: Any) -> Any:
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "7+5="}], "temperature": 1.0}
    return model.client.chat.completions.create(**asked, seed=seed, max_tokens=max_tokens, **given)


def ask_with_calls(model: Model, **given: Any) -> list[Any]:
    """Ask thrice with a bias of the tag's logit, which makes the model begin calls."""
    bias = {str(model.first_tag): 100}
    return [ask(model, seed, max_tokens=150, logit_bias=bias, **given) for seed in range(3)]


def calls_of(answer: Any) -> list[tuple[str, Any]]:
    (choice,) = answer.choices
    calls = choice.message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def num_checked(answer: Any) -> int:
    """Check the calls that were not cut off; return the number of all."""
    (choice,) = answer.choices
    calls = choice.message.tool_calls or []
    whole = calls[:-1] if choice.finish_reason == "length" else calls
    check([(call.function.name, json.loads(call.function.arguments)) for call in whole])
    return len(calls)


def check(calls: list[tuple[str, Any]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(arguments, CITY if name == "weather" else {"maxProperties": 0})


def test_required_call_follows_a_schema(model: Model) -> None:
    for seed in range(2):
        answer = ask(model, seed, tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False)
        calls = calls_of(answer)
        check(calls)
        assert len(calls) == 1 and not answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "tool_calls"


def test_named_function_is_called_once(model: Model) -> None:
    answer = ask(model, tools=[TIME, WEATHER], tool_choice=WEATHER_ONLY)
    ((name, arguments),) = calls_of(answer)
    assert name == "weather" and answer.choices[0].finish_reason == "stop"
    jsonschema.validate(arguments, CITY)


def test_stream_has_the_calls_of_the_whole_answer(model: Model) -> None:
    given: Any = {"tools": [WEATHER, TIME], "tool_choice": "required", "parallel_tool_calls": False}
    whole = calls_of(ask(model, 5, **given))
    name, pieces = "", list[str]()
    for chunk in ask(model, 5, stream=True, **given):
        for part in chunk.choices[0].delta.tool_calls or []:
            name = part.function.name or name
            pieces.append(part.function.arguments)
    assert [(name, json.loads("".join(pieces)))] == whole and pieces[0] == "" and len(pieces) >= 2


@pytest.mark.parametrize("model", [True], indirect=True)
def test_strict_arguments_hold_once_a_call_begins(model: Model) -> None:
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    assert sum(map(num_checked, ask_with_calls(model, tools=[strict]))) >= 3


@pytest.mark.parametrize("model", [False], indirect=True)
def test_allowed_tools_alone_are_called(model: Model) -> None:
    some: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [WEATHER_ONLY]}}
    for seed in range(3):
        answer = ask(model, seed, tools=[TIME, WEATHER], tool_choice=some, parallel_tool_calls=False)
        ((name, arguments),) = calls_of(answer)
        assert name == "weather" and answer.choices[0].finish_reason == "tool_calls"
        jsonschema.validate(arguments, CITY)


@pytest.mark.parametrize("model", [True], indirect=True)
def test_model_is_free_to_call_an_allowed_tool_and_no_other(model: Model) -> None:
    some: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [WEATHER_ONLY]}}
    answers = ask_with_calls(model, tools=[TIME, WEATHER], tool_choice=some)
    calls = [call for answer in answers for call in answer.choices[0].message.tool_calls or []]
    assert calls and {call.function.name for call in calls} == {"weather"}


@pytest.mark.parametrize("model", [False], indirect=True)
def test_keyword_that_cannot_be_kept_is_named(model: Model) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "propertyNames": {"format": "date"}}}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(openai.BadRequestError, match="propertyNames") as refused:
        ask(model, tools=[tool], tool_choice="required")
    assert refused.value.param == "tool_choice"
