"""Clients that compare every answer, before a gateway that breaks."""

import asyncio

import pytest

from baton.bench.faults import clients
from baton.bench.faults.clients import Clients, Question
from tests.event_loop import on_loop

ERROR = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\n{}"


async def _answer_500(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"}}")
    writer.write(ERROR)
    await writer.drain()
    writer.close()


@on_loop
async def test_call_that_fails_before_its_client_hangs_up_is_lost() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clients, "STREAM_SHARE", 1.0)
        patch.setattr(clients, "CANCEL_SHARE", 1.0)
        patch.setattr(clients, "CANCEL_S", (60.0, 60.0))
        async with await asyncio.start_server(_answer_500, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            asking = Clients(f"http://127.0.0.1:{port}", [Question({"prompt": "a"}, [1])], 0, num_clients=1)
            await asking.run(0.05)
    assert set(asking.outcomes) == {"lost"} and "status 500" in asking.complaints[0]
