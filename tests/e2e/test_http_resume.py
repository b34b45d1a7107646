"""Another gateway ends a stream of the first one: no event is lost or repeated."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from baton.errors import WorkerLost
from baton.request import Request
from tests.engine_frontend import EngineFrontend, served_engine, tiny_engine
from tests.event_stream import Event, Refused, joined, read_all
from tests.scripted_service import ScriptedService, answer_at_once
from tests.scripted_service import events as events_of
from tests.served import until
from tests.served_gateway import ServedGateway
from tests.tenant_clients import write_tenants

Served = ServedGateway[EngineFrontend]

RESUMABLE: Final[dict[str, Any]] = {
    "model": "tiny",
    "stream": True,
    "stream_options": {"include_usage": True, "resumable": True},
    "max_tokens": 40,
}
COMPLETION: Final = {**RESUMABLE, "prompt": "the sun and the moon and a star; the sun and"}
CHAT: Final = {**RESUMABLE, "messages": [{"role": "user", "content": "What is Baton?"}]}
SAMPLED: Final = {"temperature": 1.3, "ignore_eos": True}
CASES: Final[dict[str, dict[str, Any]]] = {
    "greedy completion": {**COMPLETION, "temperature": 0},
    "sampled completion": {**COMPLETION, **SAMPLED},
    "sampled chat": {**CHAT, **SAMPLED},
    "seeded chat": {**CHAT, **SAMPLED, "seed": -5},
    "two prompts": {**COMPLETION, **SAMPLED, "prompt": ["the sun", [5, 6, 7]], "n": 2},
    "three chats": {**CHAT, **SAMPLED, "n": 3, "max_tokens": 20},
    "stop strings": {**COMPLETION, **SAMPLED, "stop": ["qqqq", "the s", "zz", "e", "st"], "min_tokens": 6},
    "chat logprobs": {**CHAT, **SAMPLED, "logprobs": True, "top_logprobs": 3},
    "completion logprobs": {**COMPLETION, **SAMPLED, "logprobs": 2, "n": 2},
    "echoed logprobs": {**COMPLETION, **SAMPLED, "logprobs": 1, "echo": True, "n": 2},
    "token ids": {**CHAT, **SAMPLED, "return_token_ids": True},
    "penalties": {**COMPLETION, **SAMPLED, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    "no tokens": {**COMPLETION, "max_tokens": 0, "echo": True},
}


@pytest.fixture(scope="module")
def gateways() -> Iterator[tuple[Served, Served]]:
    """Two of one cluster: they share its key, and a model."""
    with served_engine(tiny_engine()) as one, served_engine(tiny_engine()) as other:
        yield one, other


def numbered(events: list[Event]) -> list[int]:
    """The indexes of events that have an id."""
    return [index for index, event in enumerate(events) if event.id]


@pytest.mark.parametrize("case", CASES)
def test_another_gateway_resumes_a_stream_after_each_event(
    gateways: tuple[Served, Served], case: str
) -> None:
    one, other = gateways
    undisturbed = read_all(one.address.port, CASES[case])
    whole = joined(undisturbed)
    places = numbered(undisturbed)
    assert len(places) == len(undisturbed) - 1  # all but the last
    assert len({undisturbed[place].id for place in places}) == len(places)
    for place in {*places[:2], *places[:: max(1, len(places) // 3)], *places[-2:]}:
        seen = undisturbed[: place + 1]
        rest = read_all(other.address.port, CASES[case], seen[-1].id)
        assert joined([*seen, *rest]) == whole, f"resumed after event {place}"


def test_resumed_stream_can_be_resumed_again(gateways: tuple[Served, Served]) -> None:
    one, other = gateways
    body = {**CASES["completion logprobs"], "return_token_ids": True}
    events = read_all(one.address.port, body)
    whole, seen = joined(events), events[:1]
    for turn in range(len(events) * 50):
        if seen[-1].data == "[DONE]":
            break
        gateway = (other, one)[turn % 2]
        seen += read_all(gateway.address.port, body, seen[-1].id)[:8]
    assert joined(seen) == whole


def test_stream_that_was_sent_whole_has_only_its_end(gateways: tuple[Served, Served]) -> None:
    one, other = gateways
    events = read_all(one.address.port, CASES["sampled chat"])
    num_requests = len(other.service.requests)
    assert read_all(other.address.port, CASES["sampled chat"], events[-2].id) == [Event("", "[DONE]")]
    assert len(other.service.requests) == num_requests  # nothing is generated for that


def test_stream_has_no_ids_by_default(gateways: tuple[Served, Served]) -> None:
    body = {**CASES["greedy completion"], "stream_options": {"include_usage": True}}
    assert not any(event.id for event in read_all(gateways[0].address.port, body))


def refused(port: int, body: dict[str, Any], last_id: str = "") -> tuple[int, str, str]:
    with pytest.raises(Refused) as raised:
        read_all(port, body, last_id)
    return raised.value.status, raised.value.error["code"], raised.value.error["param"]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "another"},
        {"temperature": 0.7},
        {"max_tokens": 41},
        {"n": 2},
        {"stop": "x"},
        {"seed": 1},
        {"stream_options": {"resumable": True}},
        {"stream_options": {"include_usage": True}},
        {"logprobs": 1},
        {"return_token_ids": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_id_of_another_request_is_refused(gateways: tuple[Served, Served], change: dict[str, Any]) -> None:
    port, body = gateways[0].address.port, CASES["sampled completion"]
    last_id = read_all(port, body)[0].id  # the gateway may send several tokens as one event
    assert refused(port, {**body, **change}, last_id) == (400, "other_request", "Last-Event-ID")
    # Fields that do not change the answer may differ.
    assert read_all(port, {**body, "priority": 3, "user": "me"}, last_id)


def test_only_streams_of_few_choices_are_resumable(gateways: tuple[Served, Served]) -> None:
    port, name = gateways[0].address.port, "stream_options.resumable"
    body = CASES["sampled completion"]
    assert refused(port, {**body, "stream": False}) == (400, "invalid_value", name)
    assert refused(port, {**body, "prompt": ["a", "b"], "n": 5}) == (400, "invalid_value", name)


SENTENCE: Final = list(range(300, 320))


def test_id_of_another_tenant_is_refused(tmp_path: Path) -> None:
    file = str(write_tenants(tmp_path))
    body = CASES["sampled completion"]

    def headers(key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    with ServedGateway(lambda: ScriptedService(answer_at_once(SENTENCE)), tenants_file=file) as served:
        port = served.address.port
        events = read_all(port, body, **headers("k-acme"))
        num_requests = len(served.service.requests)
        refusals = []
        for key, last_id in (("k-zeta", events[0].id), ("k-zeta", "made-up"), ("none", events[0].id)):
            with pytest.raises(Refused) as raised:
                read_all(port, body, last_id, **headers(key))
            refusals.append((raised.value.status, raised.value.error))
        assert refusals[0] == refusals[1] and refusals[0][0] == 400
        assert refusals[2][0] == 401
        assert len(served.service.requests) == num_requests  # no worker has heard of it
        rest = read_all(port, body, events[0].id, **headers("k-acme"))
        assert joined([events[0], *rest]) == joined(events)
        assert served.service.requests[-1].tenant == "acme"  # this tenant is charged


def test_id_expires_with_its_window() -> None:
    with ServedGateway(lambda: ScriptedService(answer_at_once(SENTENCE)), resume_window_s=0.01) as served:
        port, body = served.address.port, CASES["sampled completion"]
        last_id = read_all(port, body)[0].id

        def has_expired() -> bool:
            try:
                read_all(port, body, last_id)
            except Refused as refused:
                assert refused.error["code"] == "expired_event_id"
                return True
            return False

        until(has_expired)


def test_failed_stream_is_resumed_after_its_last_event() -> None:
    body = CASES["sampled completion"]
    with ServedGateway(ScriptedService) as served:
        service, port = served.service, served.address.port

        def begin_and_fail(service: ScriptedService, request: Request) -> None:
            service.emit(request.request_id, events_of(request, SENTENCE[:7], end=None))
            asyncio.get_running_loop().call_later(0.1, service.fail, request.request_id, WorkerLost("twice"))

        service.play = begin_and_fail
        *seen, failure, done = read_all(port, body)
        assert "worker_crash" in failure.data and not failure.id and not done.id
        service.play = answer_at_once(SENTENCE)
        whole = joined([*seen, *read_all(port, body, seen[-1].id)])
        undisturbed = joined(read_all(port, body))
        assert whole | {"heads": None} == undisturbed | {"heads": None} and len(whole["heads"]) == 1


def test_websocket_is_not_resumable(gateways: tuple[Served, Served]) -> None:
    async def ask() -> str:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{gateways[0].url}/v1/stream") as socket,
        ):
            body = {name: value for name, value in CASES["sampled completion"].items() if name != "stream"}
            await socket.send_json(body)
            return str(await socket.receive_str(timeout=30))

    answer = asyncio.run(ask())
    assert "stream_options.resumable" in answer and "WebSocket is not supported" in answer
