"""The client joins a vLLM pair as the proxy does: one token from the prefill server, the rest from decode."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

from baton.bench.serve.client import Address, Answer
from baton.bench.serve.load import Job, VllmPair
from tests.unit.bench.serve.test_load import whole


class Heard(asyncio.Protocol):
    """Keeps what it is asked and gives one answer to all of it."""

    def __init__(self, bodies: list[Any], answer: bytes) -> None:
        self._bodies, self._answer = bodies, answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._bodies.append(json.loads(data.partition(b"\r\n\r\n")[2]))
        self._transport.write(self._answer)


@asynccontextmanager
async def hearing(answer: bytes) -> AsyncIterator[tuple[Address, list[Any]]]:
    bodies: list[Any] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Heard(bodies, answer), "127.0.0.1", 0)
    async with server:
        yield Address(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), bodies
    await asyncio.sleep(0)


async def ask(prefill_answer: bytes) -> tuple[Answer, list[Any], list[Any]]:
    async with hearing(prefill_answer) as (prefill, asked), hearing(whole(b"rest")) as (decode, told):
        with closing(VllmPair(prefill, decode)) as pair:
            answer = await pair.post("/v1/completions", Job((5, 6), 9).body("m", stream=True))
        return answer, asked, told


def test_transfer_parameters_of_the_prefill_server_reach_the_decode_server() -> None:
    params = {"remote_engine_id": "e", "remote_block_ids": [1, 2]}
    answer, (asked,), (told,) = asyncio.run(ask(whole(json.dumps({"kv_transfer_params": params}).encode())))
    assert answer.body == b"rest"
    assert asked["max_tokens"] == 1 and asked["stream"] is False and "stream_options" not in asked
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert told["kv_transfer_params"] == params
    assert told["max_tokens"] == 9 and told["stream"] is True and told["prompt"] == [5, 6]


def test_refusal_of_the_prefill_server_is_the_answer() -> None:
    answer, asked, told = asyncio.run(ask(whole(b"{}", b"503 Busy")))
    assert answer.status == 503 and len(asked) == 1 and not told
