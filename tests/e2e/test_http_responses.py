"""`/v1/responses`, with the real `openai` client, of an engine, a cluster and a scripted model with tools."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import httpx2
import openai
import psutil
import pytest
from pydantic import BaseModel

from baton.errors import WorkerLost
from tests.e2e.conftest import client_of
from tests.process_cluster import children
from tests.scripted_service import ScriptedService, events
from tests.served import Served as ServedCluster
from tests.served_gateway import ServedGateway
from tests.tenant_clients import write_tenants
from tests.tool_model import CALLED, TOKENIZER, TOOL, last_prompt, writing

Served = ServedGateway[ScriptedService]

PROMPT: Final = "copy(sun moon star)="
WEATHER: Final[Any] = {"type": "function", **TOOL["function"]}


@pytest.fixture
def tools_client(scripted: Served) -> Iterator[openai.OpenAI]:
    with client_of(scripted.url) as client:
        yield client


def test_response_has_the_text_of_a_chat(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input=PROMPT, temperature=0, metadata={"a": "b"})
    assert (response.status, response.output_text, response.metadata) == (
        "completed",
        "sun moon star",
        {"a": "b"},
    )
    assert response.usage is not None and response.usage.total_tokens == 14
    assert client.responses.retrieve(response.id) == response


def test_streamed_response_has_the_events_that_the_client_expects(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny", input=PROMPT, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert final.output_text == "sun moon star"
    assert client.responses.retrieve(final.id).output_text == final.output_text


def test_next_turn_has_the_conversation_but_not_the_former_instructions(
    scripted: Served, tools_client: openai.OpenAI
) -> None:
    scripted.service.play = writing("One.")
    first = tools_client.responses.create(model="tiny", input="First?", instructions="Be brief.")
    assert last_prompt(scripted).startswith("system: Be brief.user: First?")
    scripted.service.play = writing("Two.")
    second = tools_client.responses.create(
        model="tiny", input="Second?", previous_response_id=first.id, instructions="Be loud."
    )
    assert last_prompt(scripted).startswith("system: Be loud.user: First?assistant: One.user: Second?")
    assert second.previous_response_id == first.id and second.instructions == "Be loud."
    listed = tools_client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.type for item in listed] == ["message"] * 3  # over two pages
    tools_client.responses.delete(first.id)
    scripted.service.play = writing("Three.")
    tools_client.responses.create(model="tiny", input="Third?", previous_response_id=second.id)
    assert "One.user: Second?assistant: Two.user: Third?" in last_prompt(scripted)
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        tools_client.responses.create(model="tiny", input="Fourth?", previous_response_id=first.id)


def test_response_that_is_not_to_be_stored_is_not_found(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input=PROMPT, store=False, max_output_tokens=1)
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].type == "message" and response.output[0].status == "incomplete"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(response.id)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_calls_and_reasoning_are_items_of_the_output(
    scripted: Served, tools_client: openai.OpenAI, is_streamed: bool
) -> None:
    scripted.service.play = writing(f"<think>\nIs it far?\n</think>\n\nI look. {CALLED}\n{CALLED}")
    asked: dict[str, Any] = {"model": "tiny", "input": "Rain?", "tools": [WEATHER]}
    if is_streamed:
        with tools_client.responses.stream(**asked) as stream:
            response: Any = stream.until_done().get_final_response()
    else:
        response = tools_client.responses.create(**asked)
    reasoning, text, first, second = response.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Is it far?")
    assert (text.type, text.content[0].text) == ("message", "I look.")
    for call in (first, second):
        assert (call.type, call.name, json.loads(call.arguments)) == (
            "function_call",
            "weather",
            {"city": "Paris"},
        )
    assert first.call_id != second.call_id and first.id != second.id
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    output: Any = {"type": "function_call_output", "call_id": first.call_id, "output": "dry"}
    scripted.service.play = writing("No.")
    answer = tools_client.responses.create(
        model="tiny", input=[output], previous_response_id=response.id, tools=[WEATHER]
    )
    assert answer.output_text == "No."
    assert 'assistant: I look. {"city": "Paris"} {"city": "Paris"}tool: dry' in last_prompt(scripted)


def test_history_may_be_sent_as_items(scripted: Served, tools_client: openai.OpenAI) -> None:
    scripted.service.play = writing(f"I look. {CALLED}")
    items: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Rain?"}]
    first = tools_client.responses.create(model="tiny", input=items, tools=[WEATHER], store=False)
    items += [item.to_dict() for item in first.output]
    items.append(
        {"type": "function_call_output", "call_id": "x", "output": [{"type": "input_text", "text": "dry"}]}
    )
    scripted.service.play = writing("No.")
    tools_client.responses.create(model="tiny", input=items, tools=[WEATHER], store=False)
    expected = 'system: Be brief.user: Rain?assistant: I look. {"city": "Paris"}tool: dry'
    assert expected in last_prompt(scripted)


def test_grammar_of_a_required_call_reaches_the_workers(scripted: Served) -> None:
    scripted.service.play = writing(CALLED)
    with client_of(scripted.url) as client:
        client.responses.create(
            model="tiny", input="Rain?", tools=[WEATHER], tool_choice={"type": "function", "name": "weather"}
        )
    form = scripted.service.requests[-1].sampling.structured_outputs
    assert form is not None and form.frame is not None and "weather" in form.frame


class Answer(BaseModel):
    city: Literal["Paris"]
    is_dry: Literal[True]


def test_text_format_is_kept(client: openai.OpenAI) -> None:
    response = client.responses.parse(model="tiny", input="Rain?", text_format=Answer)
    assert response.output_parsed == Answer(city="Paris", is_dry=True)
    assert response.text is not None and response.text.format is not None
    assert response.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tool_calls": 2}, "max_tool_calls"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 5}}}}, "text.format"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "b"}]}, "input[0].arguments"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)  # fmt: skip
def test_key_that_cannot_be_honoured_is_named(
    scripted: Served, tools_client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    num_before = len(scripted.service.requests)
    with pytest.raises(openai.BadRequestError) as refused:
        tools_client.post("/responses", body={"model": "tiny", "input": "a", **fields}, cast_to=object)
    named = refused.value.param or ""
    assert named and (named.startswith(param) or param.startswith(named))
    assert param.split("[")[0].split(".")[0] in refused.value.message
    assert len(scripted.service.requests) == num_before


def test_key_that_asks_for_nothing_is_accepted(scripted: Served, tools_client: openai.OpenAI) -> None:
    """Clients send the defaults of OpenAI's API."""
    scripted.service.play = writing("Dry.")
    response = tools_client.responses.create(
        model="tiny",
        input="Rain?",
        background=False,
        conversation=None,
        include=[],
        max_tool_calls=None,
        top_logprobs=0,
        truncation="disabled",
    )
    assert response.output_text == "Dry." and response.truncation == "disabled"


def test_limit_of_tokens_is_named_as_the_client_knows_it(tools_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_output_tokens"):
        tools_client.responses.create(model="tiny", input="a", max_output_tokens=0)


def test_failure_in_the_middle_ends_the_stream_with_an_event(
    scripted: Served, tools_client: openai.OpenAI
) -> None:
    scripted.service.play = lambda service, request: service.emit(
        request.request_id, events(request, TOKENIZER.encode("Half "), end=None)
    )
    seen = []
    for event in tools_client.responses.create(model="tiny", input="a", stream=True):
        seen.append(event)
        if event.type == "response.output_text.delta":
            name = scripted.service.requests[-1].request_id
            scripted.on_loop(partial(scripted.service.fail, name, WorkerLost("gone")))
    last = seen[-1]
    assert last.type == "response.failed" and last.response.error is not None
    assert (last.response.status, last.response.error.code) == ("failed", "server_error")
    with pytest.raises(openai.NotFoundError):
        tools_client.responses.retrieve(last.response.id)


def test_no_tenant_finds_the_response_of_another_one(tmp_path: Path) -> None:
    file = str(write_tenants(tmp_path))
    with ServedGateway(lambda: ScriptedService(writing("One.")), tenants_file=file) as gateway:
        acme, zeta = (client_of(gateway.url).with_options(api_key=key) for key in ("k-acme", "k-zeta"))
        mine = acme.responses.create(model="tiny", input="a")
        assert acme.responses.retrieve(mine.id).output_text == "One."
        asked: list[Callable[[], object]] = [
            lambda: zeta.responses.retrieve(mine.id),
            lambda: zeta.responses.delete(mine.id),
            lambda: zeta.responses.input_items.list(mine.id),
            lambda: zeta.responses.create(model="tiny", input="b", previous_response_id=mine.id),
        ]
        for ask in asked:
            with pytest.raises(openai.NotFoundError):
                ask()
        acme.close()
        zeta.close()


def test_stream_of_a_response_is_charged_for_the_text_that_is_kept() -> None:
    settings = {"max_answer_bytes": 2048}
    with ServedGateway(lambda: ScriptedService(writing("sun " * 2000)), **settings) as gateway:
        with client_of(gateway.url) as client:
            with pytest.raises(openai.InternalServerError, match="no room"):
                list(client.responses.create(model="tiny", input="a", stream=True))
            gateway.service.play = writing("One.")
            assert client.responses.create(model="tiny", input="a").output_text == "One."
        gateway.until(lambda: not gateway.gateway.limiter.answers.num_taken)


@pytest.mark.parametrize("path", ["", "/input_items"])
def test_bytes_of_a_stored_response_are_charged_until_the_client_has_read_them(path: str) -> None:
    large = "d" * 2**20
    form = {"type": "json_schema", "name": "f", "schema": {"type": "integer"}, "description": large}
    asked = {
        "model": "tiny",
        "input": [{"role": "user", "content": "a", "x": large}],
        "text": {"format": form},
    }
    settings = {"max_answer_bytes": 2**23, "send_buffer_bytes": 2**14}
    with ServedGateway(lambda: ScriptedService(writing("1")), **settings) as gateway, ExitStack() as clients:
        answers = gateway.gateway.limiter.answers
        response = httpx2.post(f"{gateway.url}/v1/responses", json=asked, timeout=60.0).json()
        ask = f"GET /v1/responses/{response['id']}{path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
        statuses = list[int]()
        for _ in range(20):  # they read the status and no more
            client = clients.enter_context(gateway.connect())
            client.sendall(ask)
            statuses.append(int(client.recv(12).split()[1]))
        assert (statuses[0], statuses[-1]) == (200, 503)
        assert gateway.on_loop(lambda: answers.num_taken) > statuses.count(200) * 2**20
        clients.close()
        gateway.until(lambda: not answers.num_taken)


def test_tools_are_repeated_as_they_were_given(scripted: Served) -> None:
    scripted.service.play = writing("One.")
    schema = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 10**30}}}
    asked = {
        "model": "tiny",
        "input": "a",
        "tools": [{"type": "function", "name": "f", "parameters": schema}],
    }
    answer = httpx2.post(f"{scripted.url}/v1/responses", json=asked, timeout=60.0)
    assert answer.json()["tools"][0]["parameters"] == schema
    written = httpx2.post(f"{scripted.url}/v1/responses", json={**asked, "stream": True}, timeout=60.0)
    assert written.text.count(str(10**30)) == 3  # the events at the begin and the one at the end


def test_conversation_that_waits_to_be_read_is_charged() -> None:
    def helpers() -> set[psutil.Process]:
        return set(children(lambda command: "baton.gateway.api.body_reader" in command))

    def ask(gateway: Served, **fields: Any) -> httpx2.Response:
        return httpx2.post(f"{gateway.url}/v1/responses", json={"model": "tiny", **fields}, timeout=60.0)

    others, large = helpers(), {"role": "user", "content": "a", "x": "y" * 40_000}
    with (
        ServedGateway(lambda: ScriptedService(writing("One.")), max_input_bytes=2**16) as gateway,
        ThreadPoolExecutor(1) as waiting,
    ):
        turn = {"input": "b", "previous_response_id": ask(gateway, input=[large]).json()["id"]}
        (helper,) = helpers() - others
        helper.suspend()
        inputs, first = gateway.gateway.limiter.inputs, waiting.submit(ask, gateway, **turn)
        try:
            gateway.until(lambda: inputs.num_taken > 40_000)
            assert ask(gateway, **turn).status_code == 503
        finally:
            helper.resume()
        assert first.result().status_code == 200
        gateway.until(lambda: not inputs.num_taken)


def test_stored_conversation_that_is_too_long_is_refused() -> None:
    settings = {"max_stored_response_bytes": 1024}
    with (
        ServedGateway(lambda: ScriptedService(writing("One.")), **settings) as gateway,
        client_of(gateway.url) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="max_stored_response_bytes") as refused:
            client.responses.create(model="tiny", input="a" * 2000)
        assert refused.value.param == "store"
        assert client.responses.create(model="tiny", input="a" * 2000, store=False).output_text == "One."


def test_gateway_that_stores_nothing_says_so() -> None:
    with (
        ServedGateway(lambda: ScriptedService(writing("One.")), max_stored_responses=0) as gateway,
        client_of(gateway.url) as client,
    ):
        assert client.responses.create(model="tiny", input="a").to_dict()["store"] is False
        with pytest.raises(openai.BadRequestError, match="max_stored_responses"):
            client.responses.create(model="tiny", input="a", store=True)


def test_response_is_not_resumed_by_an_event_id(tools_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Last-Event-ID"):
        tools_client.responses.create(
            model="tiny", input="a", stream=True, extra_headers={"Last-Event-ID": "7"}
        )


def test_gateways_of_one_port_find_the_responses_of_each_other(redundant_cluster: ServedCluster) -> None:
    """Each call is a connection of its own, which any of the gateways may take."""

    def ask(method: str, path: str = "", **body: Any) -> Any:
        url = f"{redundant_cluster.url}/v1/responses{path}"
        answer = httpx2.request(method, url, json=body or None, timeout=60.0)
        return answer.status_code, answer.json()

    _, first = ask("POST", model="tiny", input="copy(sun moon star)=", temperature=0)
    asked = {"model": "tiny", "input": "copy(red blue)=", "previous_response_id": first["id"]}
    answers = [ask("POST", **asked, temperature=0) for _ in range(12)]
    assert {status for status, _ in answers} == {200}
    assert len({answer["output"][0]["content"][0]["text"] for _, answer in answers}) == 1
    _, second = answers[-1]
    for _ in range(8):
        status, items = ask("GET", f"/{second['id']}/input_items")
        assert status == 200 and len(items["data"]) == 3
    assert ask("DELETE", f"/{first['id']}")[0] == 200
    assert {ask("GET", f"/{first['id']}")[0] for _ in range(8)} == {404}
    assert ask("GET", f"/{second['id']}") == (200, second)
