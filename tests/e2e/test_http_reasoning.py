"""Reasoning, with the real `openai` client: scripted text of a model, and forms after real reasoning."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from baton.config.generation_config import GenerationConfig
from baton.gateway.text.tokenizer import Tokenizer
from tests.e2e.conftest import client_of
from tests.engine_frontend import served_engine, tiny_engine
from tests.event_stream import joined, read_all
from tests.scripted_service import ScriptedService
from tests.served_gateway import ServedGateway
from tests.tool_model import CALLED, TOKENIZER, TOOL, tool_model, writing

# As Qwen 3's: the model begins its reasoning itself, unless the prompt has an empty one.
TEMPLATE: Final = """\
{%- if tools %}<tools>{{ tools | tojson }}</tools><tool_call>{% endif -%}
{%- for message in messages %}{{ message.role }}: {{ message.content.split('</think>')[-1] }}
{% endfor -%}
{%- if opens_reasoning is defined %}<think>
{% elif enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif -%}
"""
ASKED: Final[Any] = [{"role": "user", "content": "7+5="}]
THOUGHT: Final = "<think>\nSeven, then five.\n</think>\n\n"
TAGS: Final = ("<think>", "</think>")

Served = ServedGateway[ScriptedService]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tool_model(tmp_path_factory.mktemp("model"), TEMPLATE)
    with ServedGateway(ScriptedService, model=directory) as gateway:
        yield gateway


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with client_of(served.url) as client:
        yield client


def ask(client: openai.OpenAI, **given: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": ASKED, **given})


def test_reasoning_is_apart_from_the_text(served: Served, client: openai.OpenAI) -> None:
    served.service.play = writing(f"{THOUGHT}It is 12.")
    message = ask(client).choices[0].message
    assert (message.content, message.reasoning_content) == ("It is 12.", "Seven, then five.")
    assert message.reasoning == message.reasoning_content
    deltas = [chunk.choices[0].delta for chunk in ask(client, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == "It is 12."
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, name, "") for delta in deltas) == "Seven, then five."


def test_reasoning_tokens_are_counted_with_the_tag_that_ends_them(
    served: Served, client: openai.OpenAI
) -> None:
    text = f"{THOUGHT}It is 12."
    served.service.play = writing(text)
    token_ids = TOKENIZER.encode(text)
    begin, end = (
        next(at for at in range(len(token_ids)) if tag in TOKENIZER.decode(token_ids[: at + 1]))
        for tag in TAGS
    )
    usage = ask(client).usage
    assert usage.completion_tokens_details.reasoning_tokens == end - begin + 1
    streamed = [*ask(client, stream=True, stream_options={"include_usage": True})]
    assert streamed[-1].usage == usage
    served.service.play = writing("It is 12.")
    assert ask(client).usage.completion_tokens_details.reasoning_tokens == 0


def test_prompt_may_begin_the_reasoning_or_end_it(served: Served, client: openai.OpenAI) -> None:
    def asked(text: str, **kwargs: bool) -> tuple[Any, Any]:
        served.service.play = writing(text)
        message = ask(client, extra_body={"chat_template_kwargs": kwargs}).choices[0].message
        return message.content, getattr(message, "reasoning_content", None)

    assert asked("Seven.</think>12", opens_reasoning=True) == ("12", "Seven.")
    assert asked("12", enable_thinking=False) == ("12", None)
    assert asked(THOUGHT, enable_thinking=False) == (THOUGHT, None)
    assert asked("12", enable_thinking=True) == ("12", None)


def test_settings_give_the_variables_and_the_length_of_requests_without_them(tmp_path: Path) -> None:
    with (
        ServedGateway(
            ScriptedService,
            model=tool_model(tmp_path, TEMPLATE),
            default_chat_template_kwargs={"enable_thinking": False},
            override_generation_config=GenerationConfig(max_new_tokens=3),
        ) as gateway,
        client_of(gateway.url) as client,
    ):
        gateway.service.play = writing(THOUGHT)
        num_tokens = ask(client).usage.prompt_tokens
        kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
        assert ask(client, max_tokens=2, extra_body=kwargs).usage.prompt_tokens < num_tokens
        assert [each.sampling.max_tokens for each in gateway.service.requests] == [3, 2]


def test_reasoning_comes_before_a_call(served: Served, client: openai.OpenAI) -> None:
    served.service.play = writing(f"{THOUGHT}I look. {CALLED}")
    (choice,) = ask(client, tools=[TOOL]).choices
    assert (choice.message.content, choice.message.reasoning_content) == ("I look.", "Seven, then five.")
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})


def test_reasoning_can_be_left_out_or_left_in(served: Served, client: openai.OpenAI) -> None:
    served.service.play = writing(f"{THOUGHT}It is 12.")
    message = ask(client, extra_body={"include_reasoning": False}).choices[0].message
    assert message.content == "It is 12." and not hasattr(message, "reasoning_content")
    message = ask(client, extra_body={"separate_reasoning": False}).choices[0].message
    assert message.content == f"{THOUGHT}It is 12." and not hasattr(message, "reasoning_content")


def test_resumed_stream_has_the_rest_of_reasoning_text_and_calls(served: Served) -> None:
    second = CALLED.replace("Paris", "Rome")
    served.service.play = writing(f"{THOUGHT}I look. {CALLED} And there. {second} So.")
    body = {"model": "tiny", "messages": ASKED, "tools": [TOOL], "n": 2, "stream": True}
    body["stream_options"] = {"resumable": True}
    undisturbed = read_all(served.address.port, body)
    whole = joined(undisturbed)
    assert len(whole["choices"]) == 2
    for choice in whole["choices"].values():
        assert (choice["reasoning"], choice["text"]) == ("Seven, then five.", "I look. And there. So.")
        cities = [call["function"]["arguments"] for call in choice["tool_calls"]]
        assert cities == ['{"city":"Paris"}', '{"city":"Rome"}']
    for place, event in enumerate(undisturbed[:-1]):
        rest = read_all(served.address.port, body, event.id)
        assert joined([*undisturbed[: place + 1], *rest]) == whole


@pytest.fixture(scope="module", params=[(), TAGS], ids=["text", "tags"])
def engine_client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[openai.OpenAI, Tokenizer]]:
    directory = tmp_path_factory.mktemp("model")
    model = tool_model(directory, TEMPLATE, request.param)
    with (
        served_engine(tiny_engine(model=model), model=model) as gateway,
        client_of(gateway.url) as client,
    ):
        yield client, Tokenizer.from_directory(directory)


def test_form_holds_after_the_reasoning(engine_client: tuple[openai.OpenAI, Tokenizer]) -> None:
    """The tiny model does not end its reasoning by itself, so a bias does, where the end is a token."""
    client, tokenizer = engine_client
    end = tokenizer.added_tokens.get("</think>")
    for seed in range(4):
        extra = {
            "structured_outputs": {"regex": "[0-9]{3}"},
            "chat_template_kwargs": {"opens_reasoning": True},
        }
        bias = {} if end is None else {str(end): 20 - 4 * seed}
        (choice,) = ask(
            client, seed=seed, temperature=1, max_tokens=60, logit_bias=bias, extra_body=extra
        ).choices
        if choice.finish_reason == "stop":
            assert re.fullmatch("[0-9]{3}", choice.message.content)
        else:
            assert re.fullmatch("[0-9]{0,3}", choice.message.content)
        assert choice.finish_reason == "stop" or end is None or seed > 0


def test_form_holds_at_once_when_the_prompt_has_ended_the_reasoning(
    engine_client: tuple[openai.OpenAI, Tokenizer],
) -> None:
    client, _ = engine_client
    extra = {"structured_outputs": {"regex": "[0-9]{3}"}, "chat_template_kwargs": {"enable_thinking": False}}
    (choice,) = ask(client, max_tokens=9, extra_body=extra).choices
    assert choice.finish_reason == "stop" and re.fullmatch("[0-9]{3}", choice.message.content)
