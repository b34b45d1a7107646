"""The tiny model with its chat template for tools: the real `openai` client and a real engine."""

import json
from collections.abc import Iterator
from typing import Any, Final

import openai
import pytest
from pydantic import BaseModel

from baton.cluster.model_directory import resolve_model
from tests.e2e.conftest import client_of
from tests.engine_frontend import served_engine, tiny_engine

TOOLS: Final[Any] = [
    {"type": "function", "function": {"name": "add", "description": "Add two numbers."}},
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
]


class Fruit(BaseModel):
    """A form of answers."""

    name: str
    count: int


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    template = str(resolve_model("tiny") / "tools.jinja")
    with served_engine(tiny_engine(), chat_template=template) as gateway, client_of(gateway.url) as client:
        yield client


def ask(client: openai.OpenAI, messages: list[Any], **given: Any) -> Any:
    answer = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=100, **given
    )
    return answer.choices[0].message


@pytest.mark.parametrize(
    ("question", "name", "arguments", "result"),
    [
        ("What is 7+5?", "add", {"a": 7, "b": 5}, "12"),
        ("weather in Rome?", "weather", {"city": "Rome"}, "snow"),
    ],
)
def test_model_calls_a_tool_and_answers_with_its_result(
    client: openai.OpenAI, question: str, name: str, arguments: dict[str, object], result: str
) -> None:
    messages: list[Any] = [{"role": "user", "content": question}]
    message = ask(client, messages, tools=TOOLS)
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    message = ask(client, messages, tools=TOOLS)
    assert (message.content, message.tool_calls) == (result, None)


def test_model_that_has_tools_answers_what_needs_none(client: openai.OpenAI) -> None:
    message = ask(client, [{"role": "user", "content": "sort(3 1 2)="}], tools=TOOLS)
    assert (message.content, message.tool_calls) == ("1 2 3", None)


def test_model_writes_json_with_and_without_a_form(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "json(name=fig count=7)="}]
    assert ask(client, messages).content == '{"name": "fig", "count": 7}'
    answer = client.chat.completions.parse(
        model="tiny", messages=messages, temperature=0, response_format=Fruit
    )
    assert answer.choices[0].message.parsed == Fruit(name="fig", count=7)
