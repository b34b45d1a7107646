"""WebSocket `/v1/stream`: misuse by clients, and a bug of the gateway."""

import asyncio
import socket
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import aiohttp
import pytest

from baton.gateway.http.websocket import MAX_FRAGMENTS
from baton.request import Request
from tests.e2e.test_http_streams import hear
from tests.http_wire import exchange, post_bytes, read_all, read_until
from tests.scripted_service import ScriptedService, answer_at_once
from tests.served_gateway import ServedGateway

Served = ServedGateway[ScriptedService]
SENTENCE = [300, 301, 302]


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


def test_wrong_body_is_an_error_event() -> None:
    with ServedGateway(lambda: ScriptedService(answer_at_once(SENTENCE))) as served:
        large = {"prompt": "a", "max_tokens": 2**64}
        error, answer = conversation(served, large, {"prompt": "a"})
    assert error["error"]["code"] == "invalid_value" and "max_tokens" in error["error"]["message"]
    assert answer["choices"][0]["finish_reason"] == "length"


def test_error_event_names_the_wrong_key() -> None:
    wrong = {"n": 0}, {"top_p": 5}, {"prompt_logprobs": 1}  # the last: every answer here is a stream
    with ServedGateway(lambda: ScriptedService(answer_at_once(SENTENCE))) as served:
        errors = conversation(served, *({"prompt": "a", **fields} for fields in wrong))
    assert [each["error"]["param"] for each in errors] == ["n", "top_p", "prompt_logprobs"]


def test_log_probabilities_of_an_echoed_prompt_are_charged() -> None:
    echoed = {"prompt": [5] * 50, "echo": True, "logprobs": 1, "max_tokens": 1}
    with ServedGateway(lambda: ScriptedService(answer_at_once(SENTENCE)), max_answer_bytes=2048) as small:
        error, answer = conversation(small, echoed, {"prompt": "a"})
        small.until(lambda: not small.gateway.limiter.answers.num_taken)
    assert "no room" in error["error"]["message"]
    assert answer["choices"][0]["finish_reason"] == "length"


def test_bug_ends_one_answer_and_not_the_connection(caplog: pytest.LogCaptureFixture) -> None:
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
    """A gateway with short timeouts."""
    play = answer_at_once(SENTENCE)
    with ServedGateway(lambda: ScriptedService(play), header_timeout_s=0.3, idle_timeout_s=0.3) as served:
        yield served


def upgraded(served: Served) -> socket.socket:
    """A client's socket after the handshake."""
    client = served.connect()
    client.settimeout(8)
    client.sendall(b"GET /v1/stream HTTP/1.1\r\n" + UPGRADE + b"\r\n")
    assert client.recv(65_536).startswith(b"HTTP/1.1 101 ")
    return client


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
def test_wrong_upgrade_is_refused(impatient: Served, head: bytes) -> None:
    answer = exchange(impatient.connect(), head + UPGRADE + b"\r\n", b"{}")
    assert answer.startswith(b"HTTP/1.1 400 ") and b'"bad_upgrade"' in answer


def test_refusal_is_readable_while_the_client_writes(impatient: Served) -> None:
    line = b"GET /v1/stream HTTP/1.1\r\nx-long: " + b"a" * 10_000 + b"\r\n"
    with impatient.connect() as client:
        client.settimeout(8)
        client.sendall(line + UPGRADE + b"\r\n")
        told = client.recv(65_536, socket.MSG_PEEK)
        for _ in range(5):
            client.sendall(b"{}" * 1000)
            time.sleep(0.05)
        answer = read_all(client)
    assert answer.startswith(told) and b'"bad_upgrade"' in answer


def test_websocket_does_not_begin_during_an_answer() -> None:
    with ServedGateway(ScriptedService) as served, served.connect() as client:
        client.sendall(post_bytes(b'{"prompt": "a", "stream": true}'))
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
def test_idle_websocket_is_closed(impatient: Served, sent: bytes) -> None:
    with upgraded(impatient) as client:
        client.sendall(sent)
        frame = client.recv(65_536)
        assert frame[:1] == CLOSE and frame[2:4] == GOING_AWAY
        assert client.recv(65_536) == b""  # it does not wait for our close


def test_websocket_that_sends_garbage_is_closed(impatient: Served) -> None:
    with upgraded(impatient) as client:
        client.sendall(b"\xff" * 5000)
        assert client.recv(65_536)[:1] == CLOSE


def test_websocket_between_two_calls_may_be_idle_for_longer(impatient: Served) -> None:
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


def frame(data: bytes, first: int = 0x81) -> bytes:
    """Return a masked frame of a client. first: 0x81 is a whole text message, 0x89 a ping."""
    size = len(data)
    if size < 126:
        length = bytes([0x80 | size])
    elif size < 2**16:
        length = b"\xfe" + size.to_bytes(2)
    else:
        length = b"\xff" + size.to_bytes(8)
    return bytes([first]) + length + b"\0\0\0\0" + data


def fragments(data: bytes, size: int) -> bytes:
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    firsts = [0x01] + [0x00] * (len(parts) - 2) + [0x80]
    return b"".join(frame(part, first) for part, first in zip(parts, firsts, strict=True))


def close_code(served: Served, sent: bytes) -> int:
    """Return the close code that the gateway answers with."""
    answer = exchange(upgraded(served), sent)
    size = answer[answer.rindex(CLOSE) + 1]
    assert len(answer) - answer.rindex(CLOSE) == size + 2
    return int.from_bytes(answer[answer.rindex(CLOSE) + 2 :][:2])


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with ServedGateway(lambda: ScriptedService(answer_at_once(SENTENCE))) as made:
        yield made


def holds(served: Served, num_bytes: int) -> bool:
    """On the gateway's thread."""
    return served.gateway.limiter.inputs.num_taken >= num_bytes


UNFINISHED = frame(b"x" * 400_000)[:-1]


def test_bytes_of_unfinished_messages_are_charged_and_released() -> None:
    play = answer_at_once(SENTENCE)
    with ServedGateway(lambda: ScriptedService(play), max_input_bytes=600 * 2**10) as small:
        with upgraded(small) as holder:
            holder.sendall(UNFINISHED)
            small.until(lambda: holds(small, 399_000))
            assert close_code(small, UNFINISHED) == 1013
        small.until(lambda: not holds(small, 1))


def test_open_websockets_keep_no_body(served: Served) -> None:
    body = frame(b'{"prompt": "a", "max_tokens": 2, "x": "%s"}' % (b"y" * 10**6))
    with ExitStack() as clients:
        tracemalloc.start()
        clients.callback(tracemalloc.stop)
        for number in range(9):
            client = clients.enter_context(upgraded(served))
            client.sendall(body)
            read_until(client, b"[DONE]")
            if number == 0:
                before = served.on_loop(lambda: tracemalloc.get_traced_memory()[0])
        grown = served.on_loop(lambda: tracemalloc.get_traced_memory()[0]) - before
    assert grown < 2 * 10**6


def test_client_that_does_not_read_its_errors_is_not_read_either() -> None:
    wrong = memoryview(frame(b'{"prompt": 5, "x": "%s"}' % (b"y" * 2000)) * 10_000)
    with ServedGateway(ScriptedService, send_buffer_bytes=2**14) as small, upgraded(small) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        num_sent = num_turns = 0

        def is_stuck() -> bool:
            """Send on, in each turn of the gateway's loop, until there is no room in 200 turns in a row."""
            nonlocal num_sent, num_turns
            num_turns += 1
            with suppress(BlockingIOError):
                num_sent += client.send(wrong[num_sent:])
                num_turns = 0
            return num_turns == 200

        small.until(is_stuck)
        assert num_sent < len(wrong)
        assert small.on_loop(lambda: holds(small, 2000))


def test_message_that_does_not_arrive_in_time_ends_the_connection() -> None:
    play = answer_at_once(SENTENCE)
    with ServedGateway(lambda: ScriptedService(play), body_timeout_s=0.3) as hasty:
        assert close_code(hasty, UNFINISHED) == 1008
        assert close_code(hasty, fragments(b"x" * 4000, 1000)[:-1006]) == 1008


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        pytest.param(frame(b"", 0x89) * 40_000, 1008, id="pings"),
        pytest.param(frame(b"a", 0x8A) * 40_000, 1008, id="pongs that nobody asked for"),
        pytest.param(frame(b"") * 40_000, 1008, id="empty messages"),
        pytest.param(frame(b"", 0x01) + frame(b"", 0x00) * 40_000, 1008, id="empty fragments"),
        pytest.param(fragments(b"x" * 130 * (MAX_FRAGMENTS + 2), 130), 1009, id="many fragments"),
    ],
)
def test_flood_of_frames_ends_the_connection(served: Served, sent: bytes, code: int) -> None:
    assert close_code(served, sent) == code
    served.until(lambda: not holds(served, 1))


def test_long_message_is_answered_whole_or_in_fragments(served: Served) -> None:
    body = b'{"prompt": "a", "user": "%s"}' % (b"x" * 1_000_000)
    assert body.count(b"x") == 1_000_000
    with upgraded(served) as client:
        for message in (frame(body), fragments(body, 1000), frame(b"", 0x89) + frame(body)):
            client.sendall(message)
            assert b'"finish_reason"' in read_until(client, b"[DONE]")
    served.until(lambda: not holds(served, 1))
