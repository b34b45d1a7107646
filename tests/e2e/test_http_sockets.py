"""WebSocket `/v1/stream`, as clients misuse it, and what a bug of ours does to one."""

import asyncio
from typing import Any

import aiohttp
import pytest

from baton.request import Request
from tests.scripted_service import ScriptedService, answer_at_once
from tests.served_gateway import ServedGateway

Served = ServedGateway[ScriptedService]
SENTENCE = [300, 301, 302]


async def hear(websocket: "aiohttp.ClientWebSocketResponse") -> list[dict[str, Any]]:
    """The chunks of one answer."""
    chunks = []
    while True:
        message = await websocket.receive(timeout=10)
        assert message.type is aiohttp.WSMsgType.TEXT, message
        if message.data == "[DONE]":
            return chunks
        chunks.append(message.json())


def conversation(served: Served, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    """The last chunk of the answer to each, all over one connection."""

    async def converse() -> list[dict[str, Any]]:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{served.url}/v1/stream") as websocket,
        ):
            last = []
            for body in bodies:
                await websocket.send_json(body)
                last.append((await hear(websocket))[-1])
            return last

    return asyncio.run(converse())


def test_a_number_that_is_too_large_is_an_error_event() -> None:
    with ServedGateway(lambda: ScriptedService(answer_at_once(SENTENCE))) as served:
        large = {"prompt": "a", "max_tokens": 2**64}
        error, answer = conversation(served, large, {"prompt": "a"})
    assert error["error"]["code"] == "invalid_value" and "max_tokens" in error["error"]["message"]
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_bug_ends_one_answer_and_not_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    def break_down(service: ScriptedService, request: Request) -> None:
        service.play = answer_at_once(SENTENCE)
        raise ZeroDivisionError("secret")

    with ServedGateway(lambda: ScriptedService(break_down)) as served:
        error, answer = conversation(served, {"prompt": "a"}, {"prompt": "a"})
    assert error["error"]["code"] == "internal_error" and "secret" not in str(error)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert "secret" in caplog.text
