"""Over real sockets."""

import asyncio
import socket

import pytest

from baton.errors import WireError
from baton.messages.bounds import MAX_EVENTS, Kind
from baton.messages.codec import CONTROL_SCHEMA
from baton.messages.control import Ended, Hello, Members, Started
from baton.messages.operations import StatusQuery
from baton.rpc import server as hub_module
from baton.rpc.auth import KeyRing
from baton.rpc.server import RpcServer
from tests.unit.baton.messages.test_control import worker
from tests.unit.baton.peers import KEY, Recorder, Rogue, hosted, rogue_after_hello, tokens, until


def test_messages_travel_both_ways_in_order() -> None:
    async def run() -> None:
        one, other = Recorder("a"), Recorder("b")
        async with hosted(one) as (_, address), hosted(other) as (rpc_server, _):
            rpc_server.dial(address)
            await until(lambda: one.num_joined == other.num_joined == 1)
            assert one.peers[0].hello == other.hello and other.peers[0].hello == one.hello
            for number in range(300):
                one.peers[0].send(tokens(number % 7, number))
                other.peers[0].send(tokens(1, number))
            await until(lambda: len(one.messages) == len(other.messages) == 300)
            assert other.messages == [tokens(number % 7, number) for number in range(300)]
            assert one.messages == [tokens(1, number) for number in range(300)]
        assert one.num_left == other.num_left == 1

    asyncio.run(run())


def test_dialling_again_does_nothing_while_a_connection_lasts_and_connects_after_it() -> None:
    async def run() -> None:
        one, other = Recorder("a"), Recorder("b")
        async with hosted(one) as (_, address), hosted(other) as (rpc_server, _):
            for _ in range(3):
                rpc_server.dial(address)
            await until(lambda: one.num_joined == 1)
            rpc_server.dial(address)
            one.peers[0].close()
            await until(lambda: one.num_left == other.num_left == 1)
            assert one.num_joined == 1

            def again() -> bool:
                rpc_server.dial(address)
                return one.num_joined == other.num_joined == 2

            await until(again)
            other.peers[0].send(StatusQuery())
            await until(lambda: one.messages == [StatusQuery()])

    asyncio.run(run())


def test_dialling_where_nobody_listens_is_forgotten() -> None:
    async def run() -> None:
        one, other = Recorder("a"), Recorder("b")
        async with hosted(other) as (rpc_server, _):
            async with hosted(one) as (_, address):
                pass
            rpc_server.dial(address)
            await until(lambda: address not in rpc_server._dialing)
            assert other.num_joined == 0

    asyncio.run(run())


def test_closing_does_not_wait_for_a_peer_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "CLOSE_TIMEOUT_S", 0.1)

    async def run() -> None:
        node = Recorder("a")
        async with hosted(node) as (rpc_server, address):
            rogue = await rogue_after_hello(address)
            rogue._writer.transport.pause_reading()  # type: ignore[attr-defined]
            for _ in range(40):
                node.peers[0].send(tokens(MAX_EVENTS))
            await asyncio.sleep(0)
            async with asyncio.timeout(2):
                await rpc_server.close()
            assert node.num_left == 1

    asyncio.run(run())


def test_what_was_sent_before_close_arrives() -> None:
    async def run() -> None:
        one, other = Recorder("a"), Recorder("b")
        async with hosted(one) as (_, address), hosted(other) as (rpc_server, _):
            rpc_server.dial(address)
            await until(lambda: other.num_joined == 1)
            other.peers[0].send(tokens(MAX_EVENTS))
            other.peers[0].close()
            await until(lambda: one.num_left == 1)
            assert one.messages == [tokens(MAX_EVENTS)]

    asyncio.run(run())


def test_message_that_fits_no_frame_is_the_senders_error_and_costs_nothing() -> None:
    async def run() -> None:
        one, other = Recorder("a"), Recorder("b")
        async with hosted(one) as (_, address), hosted(other) as (rpc_server, _):
            rpc_server.dial(address)
            await until(lambda: other.num_joined == 1)
            attempts = (("a" * 32, 0),) * (2 * MAX_EVENTS)
            with pytest.raises(WireError, match="an Ended of|a Ended of"):
                other.peers[0].send(Ended(attempts=attempts))
            other.peers[0].send(Started(attempts=attempts[:1]))
            await until(lambda: one.messages == [Started(attempts=attempts[:1])])

    asyncio.run(run())


def test_peer_of_a_process_that_is_not_ready_comes_again() -> None:
    async def run() -> None:
        one, other = Recorder("a"), Recorder("b")
        early = RpcServer(b"k" * 16)
        address = await early.listen()
        async with hosted(other) as (rpc_server, _):
            rpc_server.dial(address)
            await until(lambda: early.dropped.counts() == {"early": 1})
            early.serve(one)

            def joined() -> bool:
                rpc_server.dial(address)
                return one.num_joined == 1

            await until(joined)
        await early.close()
        early.dial(address)
        assert not early._dialing

    asyncio.run(run())


def test_ticks_go_on_after_one_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub_module, "TICK_S", 0.005)

    class Stumbling(Recorder):
        def tick(self) -> None:
            super().tick()
            if self.num_ticks == 1:
                raise KeyError("a bug")

    async def run() -> None:
        node = Stumbling("a")
        async with hosted(node):
            await until(lambda: node.num_ticks >= 3)

    asyncio.run(run())
    assert "a tick of Stumbling failed" in caplog.text


def test_port_of_somebody_else_is_an_error() -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError):
            await RpcServer(b"k" * 16).listen(port=taken.getsockname()[1])

    asyncio.run(run())


def test_list_of_all_workers_fits_a_frame() -> None:
    async def run() -> None:
        one, other = Recorder("a"), Recorder("b")
        async with hosted(one) as (_, address), hosted(other) as (rpc_server, _):
            rpc_server.dial(address)
            await until(lambda: other.num_joined == 1)
            members = Members(
                workers=(worker(name="n" * 128, model="m" * 128, fingerprint="f" * 128),) * 1024
            )
            other.peers[0].send(members)
            await until(lambda: one.messages == [members])

    asyncio.run(run())


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "mixed builds" in record.getMessage()]


def test_peers_of_another_schema_are_refused_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        node = Recorder("a")
        async with hosted(node) as (rpc_server, address):
            for number in range(1, 4):
                await Rogue.connect(address, schema=b"schema-2")
                await until(lambda number=number: rpc_server.dropped.counts().get("version") == number)  # type: ignore[misc]
            assert node.num_joined == 0

    asyncio.run(run())
    (complaint,) = complaints(caplog)
    assert b"schema-2".hex() in complaint and CONTROL_SCHEMA.hex() in complaint


def test_address_that_refuses_is_dialled_again_after_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "LEAST_PAUSE_S", 60.0)

    async def run() -> None:
        one, other = Recorder("a"), Recorder("b")
        async with (
            hosted(one, b"another key of 32 bytes or so...") as (_, address),
            hosted(other) as (rpc_server, _),
        ):

            def refused(number: int) -> bool:
                rpc_server.dial(address)
                return rpc_server.dropped.counts().get("key") == number

            await until(lambda: refused(2))  # the first failure may be chance, it costs no pause
            for _ in range(20):
                rpc_server.dial(address)
                await asyncio.sleep(0)
            assert rpc_server.dropped.counts() == {"key": 2}

    asyncio.run(run())


def test_process_cannot_pose_as_one_of_another_kind() -> None:
    async def run() -> None:
        node = Recorder("a")
        async with hosted(node) as (rpc_server, address):
            rogue = await Rogue.connect(address, kind=Kind.ROUTER)
            rogue.write(rogue.frame(hub_hello(Kind.WORKER)))
            await until(lambda: rpc_server.dropped.counts().get("role") == 1)
            assert node.num_joined == 0

    asyncio.run(run())


def hub_hello(kind: Kind) -> Hello:
    return Hello(process=kind, id="d" * 32)


def test_rotated_key_keeps_connections_and_refuses_the_old_key_afterwards() -> None:
    old, new = KEY, b"n" * 32

    async def run() -> None:
        one, other, late = Recorder("a"), Recorder("b"), Recorder("c")
        rings = [KeyRing.of(old, Kind.GATEWAY) for _ in range(2)]
        async with hosted(one, rings[0]) as (_, address), hosted(other, rings[1]) as (rpc_server, _):
            rpc_server.dial(address)
            await until(lambda: one.num_joined == other.num_joined == 1)
            for keys in ((old, new), (new, old), (new,)):
                for ring in rings:
                    ring.replace(KeyRing.of(keys, Kind.GATEWAY).generations)
            one.peers[0].send(tokens(1, 1))
            await until(lambda: len(other.messages) == 1)
            assert one.num_left == other.num_left == 0
            async with hosted(late, old) as (stranger, _):
                stranger.dial(address)
                await until(lambda: stranger.dropped.counts().get("key") == 1)
            one.peers[0].close()
            await until(lambda: one.num_left == other.num_left == 1)
            rpc_server.dial(address)
            await until(lambda: one.num_joined == other.num_joined == 2)
            assert late.num_joined == 0

    asyncio.run(run())
