"""WebSocket `/v1/stream`, as clients misuse it, and what a bug of ours does to one."""

import asyncio
import socket
import time
from collections.abc import Iterator
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
    chunks: list[dict[str, Any]] = []
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


UPGRADE = (
    b"host: 127.0.0.1\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
CLOSE = b"\x88"  # the first byte of the frame
GOING_AWAY = (1001).to_bytes(2)


@pytest.fixture(scope="module")
def impatient() -> Iterator[Served]:
    """Which no connection may keep waiting."""
    play = answer_at_once(SENTENCE)
    with ServedGateway(lambda: ScriptedService(play), header_timeout_s=0.3, idle_timeout_s=0.3) as served:
        yield served


def all_that_comes(served: Served, *sent: bytes) -> bytes:
    """Until the server ends the connection; TimeoutError if it does not."""
    with served.connect() as client:
        client.settimeout(8)
        for data in sent:
            client.sendall(data)
        answer = b""
        while data := client.recv(65_536):
            answer += data
        return answer


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"GET /v1/stream HTTP/1.1\r\ncontent-length: 5\r\n", id="a body that never comes"),
        pytest.param(b"GET /v1/stream HTTP/1.1\r\ntransfer-encoding: chunked\r\n", id="chunks"),
        pytest.param(b"POST /v1/stream HTTP/1.1\r\n", id="a post"),
        pytest.param(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\n", id="a post with a body"),
        pytest.param(b"GET /v1/stream HTTP/1.1\r\nx-long: " + b"a" * 10_000 + b"\r\n", id="a long line"),
    ],
)
def test_no_websocket_begins_like_this(impatient: Served, head: bytes) -> None:
    answer = all_that_comes(impatient, head + UPGRADE + b"\r\n", b"{}")
    assert answer.startswith(b"HTTP/1.1 400 ") and b'"bad_upgrade"' in answer


def test_what_comes_after_a_refusal_does_not_take_it_away(impatient: Served) -> None:
    line = b"GET /v1/stream HTTP/1.1\r\nx-long: " + b"a" * 10_000 + b"\r\n"
    with impatient.connect() as client:
        client.settimeout(8)
        client.sendall(line + UPGRADE + b"\r\n")
        told = client.recv(65_536, socket.MSG_PEEK)
        for _ in range(5):
            client.sendall(b"{}" * 1000)
            time.sleep(0.05)
        answer = b""
        while data := client.recv(65_536):
            answer += data
    assert answer.startswith(told) and b'"bad_upgrade"' in answer


def test_a_websocket_does_not_begin_while_an_answer_is_on_its_way() -> None:
    body = b'{"prompt": "a", "stream": true}'
    post = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body)
    with ServedGateway(ScriptedService) as served, served.connect() as client:
        client.sendall(post + body)
        served.until(lambda: len(served.service.sinks) == 1)
        client.sendall(b"GET /v1/stream HTTP/1.1\r\n" + UPGRADE + b"\r\n")
        served.until(lambda: not served.service.sinks)
        assert client.recv(65_536).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x81\xfe\x10\x00abcd", id="half a frame"),
        pytest.param(b"\x01\x80abcd", id="a message without an end"),
    ],
)
def test_a_websocket_that_asks_for_nothing_is_closed(impatient: Served, sent: bytes) -> None:
    with impatient.connect() as client:
        client.settimeout(8)
        client.sendall(b"GET /v1/stream HTTP/1.1\r\n" + UPGRADE + b"\r\n")
        assert client.recv(65_536).startswith(b"HTTP/1.1 101 ")
        client.sendall(sent)
        frame = client.recv(65_536)
        assert frame[:1] == CLOSE and frame[2:4] == GOING_AWAY
        assert client.recv(65_536) == b""  # it does not wait for our close


def test_a_websocket_that_sends_garbage_is_closed(impatient: Served) -> None:
    with impatient.connect() as client:
        client.settimeout(8)
        client.sendall(b"GET /v1/stream HTTP/1.1\r\n" + UPGRADE + b"\r\n")
        assert client.recv(65_536).startswith(b"HTTP/1.1 101 ")
        client.sendall(b"\xff" * 5000)
        assert client.recv(65_536)[:1] == CLOSE


def test_a_websocket_between_two_calls_may_wait_longer_and_is_closed_then(impatient: Served) -> None:
    async def converse() -> tuple[float, int | None]:
        loop = asyncio.get_running_loop()
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{impatient.url}/v1/stream") as websocket,
        ):
            await websocket.send_json({"prompt": "a"})
            await hear(websocket)
            from_s = loop.time()
            message = await websocket.receive(timeout=10)
            assert message.type is aiohttp.WSMsgType.CLOSE
            return loop.time() - from_s, websocket.close_code

    waited_s, code = asyncio.run(converse())
    assert waited_s > 0.9 and code == 1001
