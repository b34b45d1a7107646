"""Streams under stress: slow clients, clients that leave, workers that fail; WebSockets, keys, draining."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest

from baton.errors import BatonError, Overloaded, WorkerLost
from baton.request import FinishReason, Request
from tests.http_wire import post_bytes, read_until
from tests.scripted_service import ScriptedService, answer_at_once, events
from tests.served_gateway import ServedGateway

Served = ServedGateway[ScriptedService]
SENTENCE = [300, 301, 302]


@pytest.fixture
def served() -> Iterator[Served]:
    with ServedGateway(ScriptedService, ping_interval_s=0.2, stall_timeout_s=1.0) as gateway:
        yield gateway


def begin(served: Served, body: dict[str, Any]) -> tuple[socket.socket, Request]:
    """A call that has reached the service."""
    num_before = served.on_loop(lambda: len(served.service.requests))
    client = served.connect()
    client.sendall(post_bytes(json.dumps(body).encode()))
    served.until(lambda: len(served.service.requests) > num_before)
    return client, served.service.requests[num_before]


def data_lines(answer: bytes) -> list[bytes]:
    return [line[6:] for line in answer.splitlines() if line.startswith(b"data: ")]


def test_only_pings_are_sent_before_the_first_token(served: Served) -> None:
    client, request = begin(served, {"prompt": [5], "stream": True})
    answer = read_until(client, b": ping\n\n")
    assert answer.startswith(b"HTTP/1.1 200") and b"data:" not in answer
    served.on_loop(lambda: served.service.emit(request.request_id, events(request, SENTENCE)))
    assert data_lines(read_until(client, b"[DONE]\n\n"))[-1] == b"[DONE]"
    client.close()


def test_stream_without_a_worker_can_be_refused_with_a_status(served: Served) -> None:
    served.on_loop(lambda: setattr(served.service, "has_room", False))
    client, request = begin(served, {"prompt": [5], "stream": True})
    client.settimeout(1.0)  # five times as long as until a ping
    with pytest.raises(TimeoutError):
        client.recv(1)
    refusal = Overloaded("no worker had room for it within 30 s", retry_after_s=1.0)
    served.on_loop(lambda: served.service.fail(request.request_id, refusal))
    answer = read_until(client, b"\r\n\r\n").lower()
    assert answer.startswith(b"http/1.1 503") and b"\r\nretry-after: 1\r\n" in answer
    assert b"x-should-retry: true" in answer
    client.close()


def test_stream_that_a_worker_takes_late_has_pings(served: Served) -> None:
    served.on_loop(lambda: setattr(served.service, "has_room", False))
    client, request = begin(served, {"prompt": [5], "stream": True})
    served.on_loop(lambda: setattr(served.service, "has_room", True))
    assert b"data:" not in read_until(client, b": ping\n\n")
    served.on_loop(lambda: served.service.emit(request.request_id, events(request, SENTENCE)))
    assert data_lines(read_until(client, b"[DONE]\n\n"))[-1] == b"[DONE]"
    client.close()


def test_failure_in_the_middle_is_an_error_event(served: Served) -> None:
    client, request = begin(served, {"prompt": [5], "stream": True})
    served.on_loop(lambda: served.service.emit(request.request_id, events(request, SENTENCE, end=None)))
    read_until(client, b"data:")
    served.on_loop(lambda: served.service.fail(request.request_id, WorkerLost("twice")))
    *_, failure, done = data_lines(read_until(client, b"[DONE]\n\n"))
    assert json.loads(failure)["error"]["code"] == "worker_crash" and done == b"[DONE]"
    client.close()


@pytest.mark.parametrize(
    ("error", "status"), [(Overloaded("full", retry_after_s=2.5), 503), (WorkerLost("twice"), 500)]
)
def test_failure_before_the_first_token_is_a_status(served: Served, error: BatonError, status: int) -> None:
    for streams in (False, True):
        client, request = begin(served, {"prompt": [5], "stream": streams})
        served.on_loop(lambda: served.service.fail(request.request_id, error))  # noqa: B023
        answer = read_until(client, b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 %d" % status)
        assert (b"retry-after-ms: 2500" in answer) == (status == 503)
        client.close()


@pytest.mark.parametrize("streams", [False, True])
def test_client_that_leaves_before_the_first_token_cancels(served: Served, streams: bool) -> None:
    client, request = begin(served, {"prompt": [5], "n": 2, "stream": streams})
    client.close()
    served.until(lambda: served.service.cancelled == [request.request_id])
    served.until(lambda: served.gateway.metrics.clients_gone == 1)


def test_client_that_leaves_in_the_middle_cancels_every_choice(served: Served) -> None:
    client, request = begin(served, {"prompt": [5], "n": 3, "stream": True})
    served.on_loop(lambda: served.service.emit(request.request_id, events(request, SENTENCE, end=None)))
    read_until(client, b"data:")
    assert len(served.service.requests) == 3
    client.close()
    served.until(lambda: len(served.service.cancelled) == 3)
    served.until(lambda: not served.service.sinks)


def test_client_that_reads_nothing_is_given_up_and_delays_no_other(served: Served) -> None:
    slow, first = begin(served, {"prompt": [5], "stream": True, "max_tokens": 100_000})
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    other, second = begin(served, {"prompt": [6], "stream": True, "max_tokens": 100_000})
    big = [300] * 500

    def step() -> None:
        service = served.service
        for request in (first, second):
            service.emit(request.request_id, events(request, big, end=None))

    read = 0
    other.setblocking(False)
    for _ in range(3000):
        served.on_loop(step)
        with contextlib.suppress(BlockingIOError):
            read += len(other.recv(1 << 20))
        if first.request_id in served.service.cancelled:
            break
    assert served.service.cancelled == [first.request_id]
    assert served.gateway.metrics.clients_given_up <= 1  # or the stall was found first
    assert read > 0
    other.setblocking(True)
    served.on_loop(lambda: served.service.emit(second.request_id, events(second, SENTENCE)))
    assert read_until(other, b"[DONE]\n\n")
    slow.close()
    other.close()


async def hear(websocket: aiohttp.ClientWebSocketResponse) -> list[Any]:
    """The chunks of one answer."""
    chunks = []
    while (text := await websocket.receive_str(timeout=20)) != "[DONE]":
        chunks.append(json.loads(text))
    return chunks


async def is_true(served: Served, holds: Callable[[], bool]) -> None:
    await asyncio.to_thread(served.until, holds)


def test_websocket_streams_and_cancels() -> None:
    with ServedGateway(lambda: ScriptedService(answer_at_once(SENTENCE))) as served:
        service = served.service

        async def converse() -> None:
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(f"{served.url}/v1/stream") as websocket,
            ):
                await websocket.send_json({"prompt": "a"})
                text, last = await hear(websocket)
                assert text["choices"][0]["text"] and last["choices"][0]["finish_reason"] == "length"
                await websocket.send_json({"messages": [{"role": "user", "content": "a"}]})
                role, _, last = await hear(websocket)
                assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
                assert last["choices"][0]["delta"] == {}
                await websocket.send_str("{")
                (error,) = await hear(websocket)
                assert error["error"]["code"] == "invalid_json"
                service.play = None
                for message in ({"cancel": True}, {"prompt": "b"}):
                    await websocket.send_json({"prompt": "a"})
                    await is_true(served, lambda: len(service.sinks) == 1)
                    num_cancelled = len(service.cancelled)
                    await websocket.send_json(message)
                    await is_true(served, lambda: len(service.cancelled) > num_cancelled)  # noqa: B023
                await is_true(served, lambda: len(service.sinks) == 1)
            await is_true(served, lambda: not service.sinks)

        asyncio.run(converse())


def test_draining_lets_a_stream_end_and_takes_no_new_request() -> None:
    with ServedGateway(ScriptedService, drain_timeout_s=30.0) as served:
        stream, request = begin(served, {"prompt": [5], "stream": True})
        emit: Callable[[Any], None] = lambda batch: served.on_loop(  # noqa: E731
            lambda: served.service.emit(request.request_id, batch)
        )
        emit(events(request, SENTENCE, end=None))
        read_until(stream, b"data:")
        draining = served.begin_drain()
        served.until(lambda: served.gateway.is_draining)
        with pytest.raises(OSError):  # the gateway does not listen any more
            while True:
                served.connect().close()
        emit(events(request, [303], start=3, end=FinishReason.LENGTH))
        read_until(stream, b"[DONE]\n\n")
        stream.close()
        draining.result(timeout=30)


def test_stream_that_outlasts_draining_ends_with_an_error() -> None:
    with ServedGateway(ScriptedService, drain_timeout_s=0.1) as served:
        stream, request = begin(served, {"prompt": [5], "stream": True})
        served.on_loop(lambda: served.service.emit(request.request_id, events(request, SENTENCE, end=None)))
        read_until(stream, b"data:")
        whole, _ = begin(served, {"prompt": [5]})
        draining = served.begin_drain()
        *_, failure, done = data_lines(read_until(stream, b"[DONE]\n\n"))
        assert json.loads(failure)["error"]["code"] == "overloaded" and done == b"[DONE]"
        assert read_until(whole, b"\r\n\r\n").startswith(b"HTTP/1.1 503")
        stream.close()
        whole.close()
        draining.result(timeout=30)
    assert len(served.service.cancelled) == 2
