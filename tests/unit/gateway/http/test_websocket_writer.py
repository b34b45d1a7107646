"""`WebSocketWriter`; tests/e2e has the calls over WebSockets."""

import asyncio
from typing import Any, cast

import pytest
from starlette.websockets import WebSocket, WebSocketDisconnect

from baton.gateway.api.errors import ClientGone
from baton.gateway.http.websocket import MAX_UNSENT, WebSocketWriter
from tests.event_loop import on_loop


class Reader:
    """The writing side of a WebSocket; the test decides when a message is taken."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.may_read = asyncio.Event()
        self.has_left = False

    async def send_text(self, text: str) -> None:
        await self.may_read.wait()
        if self.has_left:
            raise WebSocketDisconnect
        self.read.append(text)


def writer_to(reader: Reader) -> WebSocketWriter:
    return WebSocketWriter(cast(WebSocket, cast(Any, reader)))


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@on_loop
async def test_websocket_sends_lines_as_messages_in_order() -> None:
    reader = Reader()
    reader.may_read.set()
    writer = writer_to(reader)
    writer.write(b'{"a":1}\n{"b":2}\n')
    writer.write(b"[DONE]\n")
    await turns()
    assert reader.read == ['{"a":1}', '{"b":2}', "[DONE]"]
    await writer.close()


@on_loop
async def test_websocket_client_that_does_not_read_lags_until_it_has_read() -> None:
    reader, told = Reader(), list[str]()
    writer = writer_to(reader)
    writer.on_writable = lambda: told.append("writable")
    for _ in range(MAX_UNSENT + 2):
        assert not writer.lags
        writer.write(b"x\n")
        await turns()
    assert [writer.lags, told] == [True, []]
    reader.may_read.set()
    await turns()
    assert [writer.lags, told] == [False, ["writable"]]
    assert len(reader.read) == MAX_UNSENT + 2
    await writer.close()


@on_loop
async def test_websocket_has_sent_all_once_the_client_has_taken_it() -> None:
    reader = Reader()
    writer = writer_to(reader)
    await writer.sent_all()
    writer.write(b"x\ny\n")
    waiting = asyncio.create_task(writer.sent_all())
    await turns()
    assert not waiting.done()
    reader.may_read.set()
    await waiting
    assert reader.read == ["x", "y"]
    reader.has_left = True
    writer.write(b"z\n")
    with pytest.raises(ClientGone):
        await writer.sent_all()
    await writer.close()


@on_loop
async def test_websocket_client_that_left_gets_nothing_more() -> None:
    reader, told = Reader(), list[str]()
    reader.has_left = True
    reader.may_read.set()
    writer = writer_to(reader)
    writer.on_gone = lambda: told.append("gone")
    writer.write(b"x\n")
    await turns()
    assert told == ["gone"]
    writer.write(b"y\n")
    await turns()
    assert writer.is_gone and not reader.read
    await writer.close()
