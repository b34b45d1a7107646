"""The tenants file changes while a gateway serves, over real sockets."""

import asyncio
from pathlib import Path

import aiohttp
import httpx2

from baton.request import Request
from tests.scripted_service import ScriptedService, answer_at_once, events
from tests.served_gateway import ServedGateway
from tests.tenant_clients import ask, digest, keys, served_with

Served = ServedGateway[ScriptedService]
SENTENCE = [300, 301, 302]


def until_taken(served: Served, times: int) -> None:
    served.until(lambda: served.gateway.metrics.tenants_file["taken"] >= times)


def test_revoked_key_opens_nothing_new_and_running_streams_continue(file: Path) -> None:
    def begin(service: ScriptedService, request: Request) -> None:
        service.emit(request.request_id, events(request, SENTENCE[:1], end=None))

    headers = {"authorization": "Bearer k-acme"}
    body = {"prompt": "a", "stream": True}
    with (
        served_with(file, ScriptedService(begin)) as served,
        httpx2.stream("POST", f"{served.url}/v1/completions", json=body, headers=headers) as running,
    ):
        (request,) = served.service.requests
        keys("revoke", digest("k-acme"), "--tenants", str(file))
        until_taken(served, 1)
        assert ask(served.url, "k-acme").status_code == 401
        rest = events(request, SENTENCE[1:], start=1)
        served.on_loop(lambda: served.service.emit(request.request_id, rest))
        assert running.status_code == 200 and "[DONE]" in running.read().decode()


def test_websocket_of_a_revoked_key_is_closed_at_its_next_message(file: Path) -> None:
    async def converse(served: Served) -> None:
        headers = {"authorization": "Bearer k-zeta"}
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{served.url}/v1/stream", headers=headers) as websocket,
        ):
            await websocket.send_json({"prompt": "a"})
            while (await websocket.receive(timeout=10)).data != "[DONE]":
                pass
            keys("revoke", "zeta/all", "--tenants", str(file))
            await asyncio.to_thread(until_taken, served, 1)
            await websocket.send_json({"prompt": "a"})
            message = await websocket.receive(timeout=10)
            assert message.type is aiohttp.WSMsgType.CLOSE and message.data == 1008

    with served_with(file, ScriptedService(answer_at_once(SENTENCE))) as served:
        asyncio.run(converse(served))
        assert len(served.service.requests) == 1


def test_changed_policy_holds_from_the_next_request(file: Path) -> None:
    with served_with(file, ScriptedService(answer_at_once(SENTENCE))) as served:
        ask(served.url, "k-acme")
        file.write_text(file.read_text().replace("weight: 3", "weight: 7").replace("normal\n", "fast\n"))
        until_taken(served, 1)
        ask(served.url, "k-acme")
        before, after = (request.scheduling_key for request in served.service.requests)
    assert (before.weight, before.rank) == (3.0, 1) and (after.weight, after.rank) == (7.0, 0)


def test_reloads_under_load_drop_no_request(file: Path) -> None:
    """Calls go on while keys come and go, and while the file is wrong in between."""
    statuses: list[int] = []

    async def call_on(session: aiohttp.ClientSession, url: str, done: asyncio.Event) -> None:
        while not done.is_set():
            async with session.post(f"{url}/v1/completions", json={"prompt": "a"}) as answer:
                body = await answer.json()
                statuses.append(answer.status)
                assert body["choices"][0]["finish_reason"] == "length"

    async def load(served: Served) -> None:
        done = asyncio.Event()
        async with aiohttp.ClientSession(headers={"authorization": "Bearer k-zeta"}) as session:
            calling = [asyncio.create_task(call_on(session, served.url, done)) for _ in range(8)]
            await asyncio.to_thread(change_file, served)
            done.set()
            await asyncio.gather(*calling)

    def change_file(served: Served) -> None:
        for round_ in range(2):
            fresh = keys("add", f"t{round_}", "--tenants", str(file))
            until_taken(served, 2 * round_ + 1)
            assert ask(served.url, fresh).status_code == 200
            good = file.read_text()
            file.write_text(good + "x: [")
            served.until(lambda: served.gateway.metrics.tenants_file["refused"] == round_ + 1)  # noqa: B023
            file.write_text(good)
            until_taken(served, 2 * round_ + 2)

    with served_with(file, ScriptedService(answer_at_once(SENTENCE))) as served:
        asyncio.run(load(served))
    assert len(statuses) > 20 and set(statuses) == {200}
