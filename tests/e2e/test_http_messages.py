"""`/v1/messages`, with the real `anthropic` client, of an engine, a cluster and a scripted model."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import anthropic
import httpx2
import openai
import pytest

from baton.errors import WorkerLost
from baton.request import FinishReason
from tests.scripted_service import ScriptedService, events
from tests.served_gateway import ServedGateway
from tests.tenant_clients import write_tenants
from tests.tool_model import CALLED, TOKENIZER, last_prompt, writing

Served = ServedGateway[ScriptedService]

PROMPT: Final[Any] = [{"role": "user", "content": "copy(sun moon star)="}]
WEATHER: Final[Any] = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}


def anthropic_of(url: str, **given: Any) -> anthropic.Anthropic:
    base_url = url.removesuffix("/").removesuffix("/v1")
    return anthropic.Anthropic(base_url=base_url, max_retries=0, **{"api_key": "none is needed", **given})


@pytest.fixture(scope="module", params=["engine", "cluster"])
def messages_client(request: pytest.FixtureRequest) -> Iterator[anthropic.Anthropic]:
    other: openai.OpenAI = request.getfixturevalue(f"{request.param}_client")
    with anthropic_of(str(other.base_url)) as client:
        yield client


@pytest.fixture
def tools_client(scripted: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic_of(scripted.url) as client:
        yield client


def ask(client: anthropic.Anthropic, **given: Any) -> anthropic.types.Message:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": PROMPT, **given}
    message = client.messages.create(**body)
    assert isinstance(message, anthropic.types.Message)
    return message


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_message_has_the_text_of_a_chat(messages_client: anthropic.Anthropic) -> None:
    message = ask(messages_client, extra_body={"temperature": 0})
    assert (text_of(message), message.stop_reason, message.role) == ("sun moon star", "end_turn", "assistant")
    counted = messages_client.messages.count_tokens(model="tiny", messages=PROMPT)
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens == 10
    assert usage.output_tokens == 4


def test_streamed_message_is_the_whole_one(messages_client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 50, "messages": PROMPT, "extra_body": {"temperature": 0}}
    with messages_client.messages.stream(**asked) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_message()
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert text_of(final) == "sun moon star" and final.usage.output_tokens == 4


@pytest.mark.parametrize(
    ("given", "reason", "sequence", "text"),
    [
        ({"max_tokens": 1}, "max_tokens", None, None),
        ({"stop_sequences": [" moon"]}, "stop_sequence", " moon", "sun"),
    ],
)
def test_end_of_a_message_is_told(
    messages_client: anthropic.Anthropic,
    given: dict[str, Any],
    reason: str,
    sequence: str | None,
    text: str | None,
) -> None:
    message = ask(messages_client, **given, extra_body={"temperature": 0})
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert text is None or text_of(message) == text


@pytest.mark.parametrize("is_streamed", [False, True])
def test_thinking_and_calls_are_blocks(
    scripted: Served, tools_client: anthropic.Anthropic, is_streamed: bool
) -> None:
    scripted.service.play = writing(f"<think>\nIs it far?\n</think>\n\nI look. {CALLED}\n{CALLED}")
    asked: Any = {"model": "tiny", "max_tokens": 300, "messages": PROMPT, "tools": [WEATHER]}
    if is_streamed:
        with tools_client.messages.stream(**asked) as stream:
            message: anthropic.types.Message = stream.get_final_message()
    else:
        message = ask(tools_client, **asked)
    thinking, text, first, second = message.content
    assert thinking.type == "thinking" and thinking.thinking == "Is it far?"
    assert text.type == "text" and text.text == "I look."
    assert first.type == second.type == "tool_use" and first.id != second.id
    assert (first.name, first.input, message.stop_reason) == ("weather", {"city": "Paris"}, "tool_use")
    results: Any = [
        {"type": "tool_result", "tool_use_id": first.id, "content": [{"type": "text", "text": "dry"}]},
        {"type": "tool_result", "tool_use_id": second.id, "content": "wet", "is_error": True},
        {"type": "text", "text": "So?"},
    ]
    history: Any = [*PROMPT, message.to_param(), {"role": "user", "content": results}]
    scripted.service.play = writing("No.")
    asked_for = {"messages": history, "tools": [WEATHER], "system": [{"type": "text", "text": "Be brief."}]}
    assert text_of(ask(tools_client, **asked_for)) == "No."
    prompt = last_prompt(scripted)
    assert "system: Be brief.user: copy" in prompt and '"description": "The weather of a city."' in prompt
    expected = 'assistant: I look. {"city": "Paris"} {"city": "Paris"}tool: drytool: Error:\nwetuser: So?'
    assert expected in prompt


@pytest.mark.parametrize(
    ("choice", "is_required"),
    [
        ({"type": "any"}, True),
        ({"type": "tool", "name": "weather"}, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, False),
        ({"type": "none"}, False),
    ],
)
def test_tool_choice_decides_about_the_grammar(
    scripted: Served, tools_client: anthropic.Anthropic, choice: Any, is_required: bool
) -> None:
    scripted.service.play = writing(f"{CALLED}\n{CALLED}")
    message = ask(tools_client, tools=[WEATHER], tool_choice=choice)
    assert (scripted.service.requests[-1].sampling.structured_outputs is not None) is is_required
    num_calls = sum(block.type == "tool_use" for block in message.content)
    assert num_calls == {"any": 2, "none": 0}.get(choice["type"], 1)


def test_last_message_of_the_assistant_is_continued(
    scripted: Served, tools_client: anthropic.Anthropic
) -> None:
    scripted.service.play = writing("star")
    ask(tools_client, messages=[*PROMPT, {"role": "assistant", "content": "sun moon "}])
    assert last_prompt(scripted).endswith("assistant: sun moon ")


@pytest.mark.parametrize(
    ("thinking", "told"),
    [(None, None), ({"type": "disabled"}, "False"), ({"type": "adaptive", "display": "omitted"}, "True")],
)
def test_thinking_sets_the_variable_of_the_template(
    scripted: Served, tools_client: anthropic.Anthropic, thinking: Any, told: str | None
) -> None:
    scripted.service.play = writing("<think>\nIs it far?\n</think>\n\nNo.")
    message = ask(tools_client, **({} if thinking is None else {"thinking": thinking}))
    prompt = last_prompt(scripted)
    assert prompt.lower().endswith(f"thinks: {told}".lower()) if told else "thinks" not in prompt
    has_thinking = any(block.type == "thinking" for block in message.content)
    assert has_thinking is (thinking is None or "display" not in thinking)


def test_output_format_is_kept(messages_client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"const": "Paris"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    message = ask(messages_client, output_config=form)
    assert "".join(text_of(message).split()) == '{"city":"Paris"}'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, "thinking.display"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}},
            "output_config.format",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": []}, "messages"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"n": 2}, "n"),
        ({"max_completion_tokens": 2}, "max_completion_tokens"),
    ],
)
def test_key_that_cannot_be_honoured_is_named(
    scripted: Served, tools_client: anthropic.Anthropic, fields: dict[str, Any], param: str
) -> None:
    num_before = len(scripted.service.requests)
    body = {"model": "tiny", "max_tokens": 5, "messages": PROMPT, **fields}
    with pytest.raises(anthropic.BadRequestError) as refused:
        tools_client.post("/v1/messages", body=body, cast_to=object)
    content: Any = refused.value.body
    assert content["type"] == "error" and content["error"]["type"] == "invalid_request_error"
    assert param in content["error"]["message"]
    assert len(scripted.service.requests) == num_before


def test_count_of_tokens_has_the_tools(tools_client: anthropic.Anthropic) -> None:
    bare = tools_client.messages.count_tokens(model="tiny", messages=PROMPT).input_tokens
    told = tools_client.messages.count_tokens(model="tiny", messages=PROMPT, tools=[WEATHER], system="a b")
    assert told.input_tokens > bare
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        tools_client.messages.count_tokens(model="tiny", messages=PROMPT, extra_body={"max_tokens": 5})


def test_failure_in_the_middle_of_a_stream_raises_in_the_client(
    scripted: Served, tools_client: anthropic.Anthropic
) -> None:
    scripted.service.play = lambda service, request: service.emit(
        request.request_id, events(request, TOKENIZER.encode("Half "), end=None)
    )
    with (
        pytest.raises(anthropic.APIStatusError, match="workers that held this request failed"),
        tools_client.messages.stream(model="tiny", max_tokens=9, messages=PROMPT) as stream,
    ):
        for event in stream:
            if event.type == "text":
                name = scripted.service.requests[-1].request_id
                scripted.on_loop(partial(scripted.service.fail, name, WorkerLost("gone")))


def test_answer_that_fills_the_context_says_so(scripted: Served, tools_client: anthropic.Anthropic) -> None:
    scripted.service.play = writing("One.", FinishReason.LENGTH)
    assert ask(tools_client).stop_reason == "model_context_window_exceeded"


def test_either_header_has_the_key_of_the_tenant(tmp_path: Path) -> None:
    file = str(write_tenants(tmp_path))
    with ServedGateway(lambda: ScriptedService(writing("One.")), tenants_file=file) as gateway:
        by_key = anthropic_of(gateway.url, api_key="k-acme")
        by_token = anthropic_of(gateway.url, api_key=None, auth_token="k-zeta")
        for client, tenant in ((by_key, "acme"), (by_token, "zeta")):
            assert text_of(ask(client)) == "One."
            assert gateway.service.requests[-1].tenant == tenant
        wrong = anthropic_of(gateway.url, api_key="k-unknown")
        with pytest.raises(anthropic.AuthenticationError) as refused:
            ask(wrong)
        content: Any = refused.value.body
        assert content["error"]["type"] == "authentication_error" and content["request_id"]
        closes: list[Callable[[], None]] = [by_key.close, by_token.close, wrong.close]
        for close in closes:
            close()


def test_errors_of_other_methods_have_the_shape_of_the_api(scripted: Served) -> None:
    answer = httpx2.get(f"{scripted.url}/v1/messages")
    assert answer.status_code == 405 and answer.json()["type"] == "error"
