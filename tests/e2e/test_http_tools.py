"""Tools, with the real `openai` client: the gateway is real, the text of the model is scripted."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from baton.request import FinishReason
from tests.e2e.conftest import client_of
from tests.scripted_service import ScriptedService
from tests.served_gateway import ServedGateway
from tests.tool_model import CALLED, TOKENIZER, TOOL, tool_model, writing

ASKED: Final[Any] = [{"role": "user", "content": "Is it raining?"}]

Served = ServedGateway[ScriptedService]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ServedGateway(ScriptedService, model=tool_model(tmp_path_factory.mktemp("model"))) as gateway:
        yield gateway


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with client_of(served.url) as client:
        yield client


def ask(client: openai.OpenAI, **given: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": ASKED, **given})


def test_tool_call_is_an_answer(served: Served, client: openai.OpenAI) -> None:
    served.service.play = writing(f"I will look. {CALLED}")
    (choice,) = ask(client, tools=[TOOL]).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I will look.")
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})


def test_streamed_tool_call_begins_with_its_name_and_goes_on_with_its_arguments(
    served: Served, client: openai.OpenAI
) -> None:
    served.service.play = writing(f"I will look. {CALLED}\n{CALLED}")
    chunks = ask(client, tools=[TOOL], stream=True)
    choices = [chunk.choices[0] for chunk in chunks]
    assert choices[0].delta.role == "assistant" and choices[-1].finish_reason == "tool_calls"
    assert "".join(choice.delta.content or "" for choice in choices) == "I will look."
    parts = [part for choice in choices for part in choice.delta.tool_calls or []]
    for index in (0, 1):
        begun, *pieces = [part for part in parts if part.index == index]
        assert begun.id and begun.type == "function" and begun.function is not None
        assert (begun.function.name, begun.function.arguments) == ("weather", "")
        assert {(piece.id, piece.type) for piece in pieces} == {(None, None)}
        arguments = [piece.function.arguments or "" for piece in pieces if piece.function is not None]
        assert json.loads("".join(arguments)) == {"city": "Paris"}
    assert len({part.id for part in parts if part.id}) == 2


def test_client_library_finds_the_tool_call_in_a_stream(served: Served, client: openai.OpenAI) -> None:
    served.service.play = writing(CALLED)
    tool: Any = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    with client.chat.completions.stream(model="tiny", messages=ASKED, tools=[tool]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.content is None or message.content == ""
    assert message.tool_calls is not None and message.tool_calls[0].function.name == "weather"


def test_prompt_has_the_tools_and_the_former_calls(served: Served, client: openai.OpenAI) -> None:
    served.service.play = writing("No.")
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    messages: Any = [
        *ASKED,
        {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "dry"},
    ]
    (choice,) = ask(client, messages=messages, tools=[TOOL]).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "No.", None)
    prompt = TOKENIZER.decode(served.service.requests[-1].token_ids)
    assert json.dumps(TOOL) in prompt and 'assistant:  {"city": "Paris"}' in prompt and "tool: dry" in prompt


def test_without_tools_a_call_is_text(served: Served, client: openai.OpenAI) -> None:
    served.service.play = writing(CALLED)
    untold: list[dict[str, Any]] = [{}, {"tools": [TOOL], "tool_choice": "none"}]
    for given in untold:
        (choice,) = ask(client, **given).choices
        assert (choice.finish_reason, choice.message.content) == ("stop", CALLED)


def test_tool_call_that_was_cut_off_is_text(served: Served, client: openai.OpenAI) -> None:
    served.service.play = writing(CALLED[:30], FinishReason.LENGTH)
    (choice,) = ask(client, tools=[TOOL]).choices
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    assert (choice.message.content or "").startswith(CALLED[:30])


HARMONY: Final = (
    "<|channel|>analysis<|message|>Where is it?<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Paris"}'
)


@pytest.mark.parametrize(
    ("parser", "text", "reasoning", "id_form"),
    [
        ("openai", HARMONY, "Where is it?", "call_[0-9a-f]{24}"),
        (
            "mistral",
            'I look.[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]',
            None,
            "[0-9a-f]{9}",
        ),
    ],
)
def test_setting_chooses_the_parser(
    tmp_path: Path, parser: str, text: str, reasoning: str | None, id_form: str
) -> None:
    model = tool_model(tmp_path)
    with (
        ServedGateway(ScriptedService, model=model, tool_call_parser=parser) as gateway,
        client_of(gateway.url) as client,
    ):
        gateway.service.play = writing(text)
        (choice,) = ask(client, tools=[TOOL]).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city":"Paris"}')
    assert choice.message.content == "I look." and re.fullmatch(id_form, call.id)
    assert getattr(choice.message, "reasoning_content", None) == reasoning
