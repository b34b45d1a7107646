import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Iterator

import pytest
from starlette.types import Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from baton.clock import ManualClock
from baton.config.gateway import GatewayConfig
from baton.gateway.api.errors import ClientGone
from baton.gateway.http.protocol import BLOCK_BYTES, TURN_S, HttpLimits, LimitedProtocol, respond_in_turns
from baton.messages.workers import Address
from tests.event_loop import on_loop
from tests.unit.gateway.calls import Client


class Work:
    """Parts of which each takes more than half a turn. Others have theirs meanwhile, which is counted."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.num_parts = 0
        self.num_turns_of_others = 0

    def parts(self) -> Iterator[bytes]:
        for index in range(10):
            self.clock.advance(TURN_S * 0.6)
            self.num_parts += 1
            yield b"%d" % index

    async def others(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.num_turns_of_others += 1


@on_loop
async def test_long_answer_leaves_turns_of_the_loop_to_others() -> None:
    work = Work()
    others = asyncio.create_task(work.others())
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    await respond_in_turns(send, work.parts(), work.clock, Client())
    assert b"".join(message.get("body", b"") for message in sent) == b"0123456789"
    others.cancel()
    # After every second part; the first of the five turns starts the task.
    assert work.num_turns_of_others == 4


@on_loop
async def test_long_answer_ends_when_the_client_has_left() -> None:
    work, client = Work(), Client()
    client.is_gone = True
    with pytest.raises(ClientGone):
        await respond_in_turns(_unsent, work.parts(), work.clock, client)
    assert work.num_parts == 2


async def _unsent(message: Message) -> None:
    raise AssertionError("nobody is there to be told")


def test_long_answer_is_sent_while_it_is_made() -> None:
    """The parts made so far have left when the next is made, but for one block."""
    sent, num_ahead = list[Message](), list[int]()

    async def send(message: Message) -> None:
        sent.append(message)

    def parts() -> Iterator[bytes]:
        for index in range(100):
            num_sent = sum(len(message.get("body", b"")) for message in sent)
            num_ahead.append(index * 10_000 - num_sent)
            yield b"x" * 10_000

    asyncio.run(respond_in_turns(send, parts(), ManualClock(), Client()))
    assert sum(len(message.get("body", b"")) for message in sent) == 1_000_000
    assert max(num_ahead) <= BLOCK_BYTES + 10_000
    assert sent[-1]["more_body"] is False


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@on_loop
async def test_closed_connection_is_freed_without_the_collector() -> None:
    gateway = GatewayConfig(model="tiny", routers=(Address("127.0.0.1", 1),), port=0)
    limits = HttpLimits(config=gateway, refused=Counter())
    config = Config(_answer, log_config=None, lifespan="off")
    config.load()
    connections = list[weakref.ref[LimitedProtocol]]()

    def connect() -> LimitedProtocol:
        made = LimitedProtocol(limits, config=config, server_state=ServerState(), app_state={})
        connections.append(weakref.ref(made))
        return made

    server = await asyncio.get_running_loop().create_server(connect, "127.0.0.1", 0)
    gc.collect()
    gc.disable()
    try:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()
        async with asyncio.timeout(10):
            while connections[0]() is not None:
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
        server.close()
