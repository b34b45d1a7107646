"""Peers that keep no rule, over real sockets."""

import asyncio
import socket
from collections.abc import Callable

import pytest

from baton.messages.bounds import MAX_EVENTS
from baton.messages.control import Ended, Hello
from baton.messages.operations import StatusQuery
from baton.rpc import server as hub_module
from baton.rpc import session
from baton.rpc.auth import MAX_CHALLENGE_BYTES
from baton.rpc.session import encode_frame
from tests.unit.baton.peers import Recorder, Rogue, hosted, rogue_after_hello, tokens, until


def test_peer_with_another_key_never_joins() -> None:
    async def run() -> None:
        one, other = Recorder("a"), Recorder("b")
        async with hosted(one) as (accepting, address), hosted(other, b"o" * 16) as (rpc_server, _):
            rpc_server.dial(address)
            await until(lambda: rpc_server.dropped.counts() == {"key": 1})
            await until(lambda: address not in rpc_server._dialing and not accepting._links)
            assert one.num_joined == other.num_joined == one.num_left == other.num_left == 0

    asyncio.run(run())


def test_peer_that_sends_another_message_before_its_hello_is_dropped() -> None:
    async def run() -> None:
        node = Recorder("a")
        async with hosted(node) as (rpc_server, address):
            rogue = await Rogue.connect(address)
            rogue.write(rogue.frame(StatusQuery()))
            assert isinstance(await rogue.read(), Hello)
            assert await rogue.read() is None
            assert rpc_server.dropped.counts() == {"protocol": 1}
            assert node.num_joined == node.num_left == 0

    asyncio.run(run())


def _replayed(rogue: Rogue) -> bytes:
    return rogue.frame(StatusQuery()) * 2


def _left_out(rogue: Rogue) -> bytes:
    return rogue.frame(StatusQuery()) + (rogue.frame(StatusQuery()), rogue.frame(StatusQuery()))[1]


def _changed(rogue: Rogue) -> bytes:
    frame = bytearray(rogue.frame(StatusQuery()) + rogue.frame(StatusQuery()))
    frame[-1] ^= 1
    return bytes(frame)


def _no_message(rogue: Rogue) -> bytes:
    return rogue.frame(StatusQuery()) + rogue.frame_of(b"\xc1")


def _too_long(rogue: Rogue) -> bytes:
    return rogue.frame(StatusQuery()) + b"\xff\xff\xff\xff\x01"


def _refused_by_the_node(rogue: Rogue) -> bytes:
    return rogue.frame(StatusQuery()) + rogue.frame(Ended(attempts=()))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (_replayed, "seal"),
        (_left_out, "seal"),
        (_changed, "seal"),
        (_no_message, "message"),
        (_too_long, "length"),
        (_refused_by_the_node, "protocol"),
    ],
)
def test_rule_breaker_is_dropped_and_counted_after_what_it_said_well(
    frames: Callable[[Rogue], bytes], reason: str
) -> None:
    async def run() -> None:
        node = Recorder("a", refuses=Ended)
        async with hosted(node) as (rpc_server, address):
            rogue = await rogue_after_hello(address)
            for byte in frames(rogue):
                rogue.write(bytes([byte]))
            assert await rogue.read() is None
            await until(lambda: node.num_left == 1)
            assert rpc_server.dropped.counts() == {reason: 1}
            assert set(node.messages) <= {StatusQuery()}

    asyncio.run(run())


def test_half_a_frame_must_be_finished_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "FRAME_TIMEOUT_S", 0.1)

    async def run() -> None:
        node = Recorder("a")
        async with hosted(node) as (rpc_server, address):
            rogue = await rogue_after_hello(address)
            rogue.write(rogue.frame(StatusQuery())[:7])
            assert await rogue.read() is None
            await until(lambda: node.num_left == 1)
            assert rpc_server.dropped.counts() == {"slow": 1}

    asyncio.run(run())


def test_stream_of_whole_frames_is_never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "FRAME_TIMEOUT_S", 0.2)

    async def run() -> None:
        node = Recorder("a")
        async with hosted(node) as (rpc_server, address):
            rogue = await rogue_after_hello(address)
            stream = b"".join(rogue.frame(StatusQuery()) for _ in range(40))
            size = len(stream) // 40
            for index in range(39):  # every piece ends in the middle of a frame
                rogue.write(stream[index * size + 3 * (index > 0) : (index + 1) * size + 3])
                await until(lambda index=index: len(node.messages) == index + 1)  # type: ignore[misc]
                await asyncio.sleep(0.01)
            assert rpc_server.dropped.counts() == {} and node.num_left == 0

    asyncio.run(run())


def test_end_of_stream_in_a_frame_is_a_peer_that_left() -> None:
    async def run() -> None:
        node = Recorder("a")
        async with hosted(node) as (rpc_server, address):
            rogue = await rogue_after_hello(address)
            rogue.write(rogue.frame(StatusQuery())[:7])
            await rogue.close()
            await until(lambda: node.num_left == 1)
            assert rpc_server.dropped.counts() == {}

    asyncio.run(run())


def test_silent_stranger_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "HANDSHAKE_TIMEOUT_S", 0.1)

    async def run() -> None:
        node = Recorder("a")
        async with hosted(node) as (rpc_server, address):
            for first in (b"", b"\0\0\0\x21"):
                reader, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(first)
                assert await reader.read() == b""
                writer.close()
            assert rpc_server.dropped.counts() == {"handshake": 2}

    asyncio.run(run())


def test_crowd_of_strangers_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_STRANGERS", 8)

    async def run() -> None:
        one, other = Recorder("a"), Recorder("b")
        async with hosted(one) as (accepting, address), hosted(other) as (rpc_server, _):
            strangers = [await asyncio.open_connection(address.host, address.port) for _ in range(20)]
            rpc_server.dial(address)
            await until(lambda: one.num_joined == 1)
            assert len(accepting._links) <= 9
            assert accepting.dropped.counts()["crowd"] >= 12
            for _, writer in strangers:
                writer.close()

    asyncio.run(run())


def test_strangers_that_come_at_once_drop_one_another_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_STRANGERS", 8)

    async def run() -> None:
        async with hosted(Recorder("a")) as (rpc_server, address):
            strangers = [socket.create_connection((address.host, address.port)) for _ in range(40)]
            await until(lambda: rpc_server.dropped.counts().get("crowd", 0) >= 32)
            await until(lambda: len(rpc_server._links) == 8)
            assert rpc_server.dropped.counts() == {"crowd": 32}
            for stranger in strangers:
                stranger.close()

    asyncio.run(run())


def test_stranger_gets_no_room_for_more_than_a_challenge() -> None:
    async def run() -> None:
        async with hosted(Recorder("a")) as (rpc_server, address):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(encode_frame(bytes(MAX_CHALLENGE_BYTES + 1)))
            assert await reader.read() == b""
            assert rpc_server.dropped.counts() == {"length": 1}
            writer.close()

    asyncio.run(run())


def test_peer_that_reads_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_UNSENT_BYTES", 1 << 20)

    async def run() -> None:
        node = Recorder("a")
        async with hosted(node) as (rpc_server, address):
            rogue = await rogue_after_hello(address)
            rogue._writer.transport.pause_reading()  # type: ignore[attr-defined]
            peer = node.peers[0]

            def dropped() -> bool:
                peer.send(tokens(MAX_EVENTS))
                return rpc_server.dropped.counts() == {"slow": 1}

            await until(dropped)
            await until(lambda: node.num_left == 1)
            peer.send(StatusQuery())  # to nobody, and no error

    asyncio.run(run())
