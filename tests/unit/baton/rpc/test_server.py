"""RPC servers over real sockets; tests/unit/baton/rpc/test_session.py has the rules of the wire."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from itertools import pairwise, product

import pytest
import uvloop

from baton.bench.faults.link_proxy import Direction, LinkProxy
from baton.errors import WireError
from baton.messages.bounds import MAX_EVENTS, Kind
from baton.messages.codec import CONTROL_SCHEMA, AnyMessage
from baton.messages.control import Ended, Hello, Members, Started
from baton.messages.operations import StatusQuery
from baton.messages.workers import Address
from baton.rpc import server, session
from baton.rpc.auth import KeyRing
from baton.rpc.peers import Peer
from baton.rpc.server import RpcLink, RpcServer
from tests.event_loop import on_loop
from tests.node_peers import a_worker
from tests.unit.baton.rpc.rpc_peers import (
    KEY,
    Joined,
    Recorder,
    Rogue,
    hosted,
    rogue_after_hello,
    tokens,
    until,
)

TIMEOUT_S = 2.0
PATIENCE_S = 20.0  # of a test on a busy machine


@on_loop
async def test_messages_travel_both_ways_in_order() -> None:
    async with Joined() as pair:
        assert pair.one.peers[0].hello == pair.other.hello and pair.other.peers[0].hello == pair.one.hello
        for number in range(300):
            pair.one.peers[0].send(tokens(number % 7, number))
            pair.other.peers[0].send(tokens(1, number))
        await until(lambda: len(pair.one.messages) == len(pair.other.messages) == 300)
        assert pair.other.messages == [tokens(number % 7, number) for number in range(300)]
        assert pair.one.messages == [tokens(1, number) for number in range(300)]
    assert pair.one.num_left == pair.other.num_left == 1


@on_loop
async def test_dialling_again_connects_only_after_the_connection_has_ended() -> None:
    async with Joined() as pair:
        pair.dialling.dial(pair.address)
        pair.one.peers[0].close()
        await until(lambda: pair.one.num_left == pair.other.num_left == 1)
        assert pair.one.num_joined == 1
        await pair.again()
        pair.other.peers[0].send(StatusQuery())
        await until(lambda: pair.one.messages == [StatusQuery()])


@on_loop
async def test_peer_of_a_process_that_is_not_ready_may_dial_again() -> None:
    one, other, early = Recorder("a"), Recorder("b"), RpcServer(KEY)
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


class ClosesOnceConnected(RpcServer):
    """A server that closes when its first socket is connected, before its dial has heard of it."""

    closing: asyncio.Task[None] | None = None
    num_closed = 0

    def opened(self, link: RpcLink) -> None:
        super().opened(link)
        self.closing = asyncio.create_task(self.close())

    def closed(self, link: RpcLink) -> None:
        super().closed(link)
        self.num_closed += 1


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_server_closes_though_a_dial_is_cancelled_as_its_socket_connects(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def run() -> None:
        dialling = ClosesOnceConnected(KEY)
        async with hosted(Recorder("a")) as (_, address):
            dialling.serve(Recorder("b"))
            dialling.dial(address)
            await until(lambda: dialling.closing is not None and dialling.closing.done())
            await asyncio.sleep(0)  # a loop that reports the end again does so now
        assert dialling.num_closed == 1

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


@on_loop
async def test_messages_sent_before_close_arrive() -> None:
    async with Joined() as pair:
        pair.other.peers[0].send(tokens(MAX_EVENTS))
        pair.other.peers[0].close()
        await until(lambda: pair.one.num_left == 1)
        assert pair.one.messages == [tokens(MAX_EVENTS)]


class Slow(Recorder):
    """A node that answers each message, after `takes_s`: by default longer than a turn."""

    def __init__(self, name: str, takes_s: float = 2 * server.TURN_S) -> None:
        super().__init__(name)
        self.takes_s = takes_s
        self.num_handled_at_turn: list[int] = []

    def received(self, peer: Peer, message: AnyMessage) -> None:
        super().received(peer, message)
        time.sleep(self.takes_s)
        peer.send(StatusQuery())

    def watch(self, num_messages: int) -> None:
        """Record in each turn of the loop how many messages have been handled, until there are so many."""
        if not self.num_handled_at_turn or self.num_handled_at_turn[-1] < len(self.messages):
            self.num_handled_at_turn.append(len(self.messages))
        if len(self.messages) < num_messages:
            asyncio.get_running_loop().call_soon(self.watch, num_messages)


NUM_SENT = 6


@contextlib.asynccontextmanager
async def sending_to(slow: Slow) -> AsyncIterator[Recorder]:
    """Yield a peer that has just sent NUM_SENT messages in one piece."""
    sender = Recorder("b")
    async with hosted(slow) as (_, address), hosted(sender) as (dialling, _):
        dialling.dial(address)
        await until(lambda: slow.num_joined == sender.num_joined == 1)
        for number in range(NUM_SENT):
            sender.peers[0].send(tokens(1, number))
        yield sender


@on_loop
async def test_messages_that_take_long_are_handled_one_a_turn_and_answered_at_once() -> None:
    slow = Slow("a")
    async with sending_to(slow) as sender:
        slow.watch(NUM_SENT)
        await until(lambda: len(sender.messages) == NUM_SENT)
        assert slow.messages == [tokens(1, number) for number in range(NUM_SENT)]
        assert slow.num_handled_at_turn[-NUM_SENT:] == list(range(1, NUM_SENT + 1))


@on_loop
async def test_turn_is_shared_by_all_peers() -> None:
    slow, senders = Slow("a", server.TURN_S / 2), [Recorder(name) for name in "bcd"]
    async with contextlib.AsyncExitStack() as stack:
        _, address = await stack.enter_async_context(hosted(slow))
        for sender in senders:
            (await stack.enter_async_context(hosted(sender)))[0].dial(address)
        await until(lambda: slow.num_joined == len(senders) == sum(each.num_joined for each in senders))
        for sender, number in product(senders, range(NUM_SENT)):
            sender.peers[0].send(tokens(1, number))
        slow.watch(len(senders) * NUM_SENT)
        await until(lambda: len(slow.messages) == len(senders) * NUM_SENT)
    steps = [after - before for before, after in pairwise(slow.num_handled_at_turn)]
    assert max(steps) <= 3 + len(senders) - 1  # as many as a turn takes, and one more for each other peer


@on_loop
async def test_messages_between_two_turns_arrive_when_the_peer_closes() -> None:
    slow = Slow("a")
    async with sending_to(slow) as sender:
        sender.peers[0].close()
        await until(lambda: slow.num_left == 1)
        assert slow.messages == [tokens(1, number) for number in range(NUM_SENT)]


@on_loop
async def test_connection_ends_when_the_node_fails_in_any_turn() -> None:
    class Failing(Slow):
        def received(self, peer: Peer, message: AnyMessage) -> None:
            super().received(peer, message)
            if len(self.messages) == NUM_SENT:
                raise KeyError("a bug")

    failing = Failing("a")
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    async with sending_to(failing) as sender:
        await until(lambda: failing.num_left == sender.num_left == 1)
        assert len(failing.messages) == NUM_SENT


def test_closing_does_not_wait_for_a_peer_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CLOSE_TIMEOUT_S", 0.1)

    @on_loop
    async def run() -> None:
        node = Recorder("a")
        async with hosted(node) as (rpc_server, address):
            (await rogue_after_hello(address)).read_nothing()
            for _ in range(40):
                node.peers[0].send(tokens(MAX_EVENTS))
            await asyncio.sleep(0)
            async with asyncio.timeout(2):
                await rpc_server.close()
            assert node.num_left == 1

    run()


@on_loop
async def test_message_that_fits_no_frame_is_an_error_of_the_sender_alone() -> None:
    async with Joined() as pair:
        attempts = (("a" * 32, 0),) * (2 * MAX_EVENTS)
        with pytest.raises(WireError, match="an? Ended of"):
            pair.other.peers[0].send(Ended(attempts=attempts))
        pair.other.peers[0].send(Started(attempts=attempts[:1]))
        await until(lambda: pair.one.messages == [Started(attempts=attempts[:1])])


@on_loop
async def test_list_of_all_workers_fits_a_frame() -> None:
    async with Joined() as pair:
        longest = a_worker("n" * 128, model="m" * 128, fingerprint="f" * 128)
        members = Members(workers=(longest,) * 1024)
        pair.other.peers[0].send(members)
        await until(lambda: pair.one.messages == [members])


def test_ticks_go_on_after_one_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "TICK_S", 0.005)

    class Stumbling(Recorder):
        def tick(self) -> None:
            super().tick()
            if self.num_ticks == 1:
                raise KeyError("a bug")

    @on_loop
    async def run() -> None:
        node = Stumbling("a")
        async with hosted(node):
            await until(lambda: node.num_ticks >= 3)

    run()
    assert "a tick of Stumbling failed" in caplog.text


@on_loop
async def test_port_of_another_process_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError):
        await RpcServer(KEY).listen(port=taken.getsockname()[1])


def test_peers_of_another_schema_are_refused_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    @on_loop
    async def run() -> None:
        node = Recorder("a")
        async with hosted(node) as (rpc_server, address):
            for number in range(1, 4):
                await Rogue.connect(address, schema=b"schema-2")
                await until(lambda number=number: rpc_server.dropped.counts().get("version") == number)  # type: ignore[misc]
            assert node.num_joined == 0

    run()
    (complaint,) = [each.getMessage() for each in caplog.records if "mixed builds" in each.getMessage()]
    assert b"schema-2".hex() in complaint and CONTROL_SCHEMA.hex() in complaint


def test_address_with_another_key_is_dialled_again_after_growing_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "LEAST_BACKOFF_S", 60.0)

    @on_loop
    async def run() -> None:
        one, other = Recorder("a"), Recorder("b")
        async with hosted(one, b"o" * 16) as (_, address), hosted(other) as (rpc_server, _):

            def is_refused(number: int) -> bool:
                rpc_server.dial(address)
                return rpc_server.dropped.counts().get("key") == number

            await until(lambda: is_refused(2))  # the first failure costs no pause
            for _ in range(20):
                rpc_server.dial(address)
                await asyncio.sleep(0)
            assert rpc_server.dropped.counts() == {"key": 2}
            assert one.num_joined == other.num_joined == one.num_left == other.num_left == 0

    run()


@on_loop
async def test_process_cannot_pose_as_one_of_another_kind() -> None:
    node = Recorder("a")
    async with hosted(node) as (rpc_server, address):
        rogue = await Rogue.connect(address, kind=Kind.GATEWAY)
        rogue.write(rogue.frame(Hello(process=Kind.WORKER, id="d" * 32)))
        await until(lambda: rpc_server.dropped.counts().get("role") == 1)
        assert node.num_joined == 0


@on_loop
async def test_rotated_key_keeps_connections_and_refuses_the_old_key() -> None:
    old, new = KEY, b"n" * 32
    one, other, late = Recorder("a"), Recorder("b"), Recorder("c")
    rings = [KeyRing.of(old, Kind.WORKER) for _ in range(2)]
    async with hosted(one, rings[0]) as (_, address), hosted(other, rings[1]) as (rpc_server, _):
        rpc_server.dial(address)
        await until(lambda: one.num_joined == other.num_joined == 1)
        for keys in ((old, new), (new, old), (new,)):
            for ring in rings:
                ring.replace(KeyRing.of(keys, Kind.WORKER).generations)
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


@on_loop
async def test_message_before_the_hello_is_refused() -> None:
    node = Recorder("a")
    async with hosted(node) as (rpc_server, address):
        rogue = await Rogue.connect(address)
        rogue.write(rogue.frame(StatusQuery()))
        assert isinstance(await rogue.read(), Hello)
        assert await rogue.read() is None
        assert rpc_server.dropped.counts() == {"protocol": 1}
        assert node.num_joined == node.num_left == 0


@pytest.mark.parametrize(
    ("offence", "reason"),
    [
        (lambda rogue: rogue.frame(StatusQuery())[:-1] + b"?", "seal"),
        (lambda rogue: rogue.frame_of(b"\xc1"), "message"),
        (lambda rogue: b"\xff\xff\xff\xff\x01", "length"),
        (lambda rogue: rogue.frame(Ended(attempts=())), "protocol"),
    ],
    ids=["seal", "message", "length", "protocol"],
)
@on_loop
async def test_rule_breaker_is_dropped_and_counted_after_its_good_messages(
    offence: Callable[[Rogue], bytes], reason: str
) -> None:
    node = Recorder("a", refuses=Ended)
    async with hosted(node) as (rpc_server, address):
        rogue = await rogue_after_hello(address)
        for byte in rogue.frame(StatusQuery()) + offence(rogue):
            rogue.write(bytes([byte]))
        assert await rogue.read() is None
        await until(lambda: node.num_left == 1)
        assert rpc_server.dropped.counts() == {reason: 1}
        assert node.messages == [StatusQuery()]


def test_half_a_frame_must_be_finished_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "FRAME_TIMEOUT_S", 0.1)

    @on_loop
    async def run() -> None:
        node = Recorder("a")
        async with hosted(node) as (rpc_server, address):
            rogue = await rogue_after_hello(address)
            rogue.write(rogue.frame(StatusQuery())[:7])
            assert await rogue.read() is None
            await until(lambda: node.num_left == 1)
            assert rpc_server.dropped.counts() == {"slow": 1}

    run()


@on_loop
async def test_peer_that_leaves_in_a_frame_is_not_counted() -> None:
    node = Recorder("a")
    async with hosted(node) as (rpc_server, address):
        rogue = await rogue_after_hello(address)
        rogue.write(rogue.frame(StatusQuery())[:7])
        await rogue.close()
        await until(lambda: node.num_left == 1)
        assert rpc_server.dropped.counts() == {}


def test_silent_stranger_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_S", 0.1)

    @on_loop
    async def run() -> None:
        async with hosted(Recorder("a")) as (rpc_server, address):
            for first in (b"", b"\0\0\0\x21"):
                reader, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(first)
                assert await reader.read() == b""
                writer.close()
            assert rpc_server.dropped.counts() == {"handshake": 2}

    run()


def test_strangers_displace_each_other_and_keep_no_peer_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_STRANGERS", 8)

    @on_loop
    async def run() -> None:
        one, other = Recorder("a"), Recorder("b")
        async with hosted(one) as (accepting, address), hosted(other) as (rpc_server, _):
            strangers = [socket.create_connection((address.host, address.port)) for _ in range(40)]
            await until(lambda: accepting.dropped.counts().get("limit", 0) >= 32)
            await asyncio.sleep(0.05)
            assert accepting.dropped.counts() == {"limit": 32}
            rpc_server.dial(address)
            await until(lambda: one.num_joined == 1)
            for stranger in strangers:
                stranger.close()

    run()


def test_peer_that_reads_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_UNSENT_BYTES", 1 << 20)

    @on_loop
    async def run() -> None:
        node = Recorder("a")
        async with hosted(node) as (rpc_server, address):
            (await rogue_after_hello(address)).read_nothing()
            peer = node.peers[0]

            def is_dropped() -> bool:
                peer.send(tokens(MAX_EVENTS))
                return rpc_server.dropped.counts() == {"slow": 1}

            await until(is_dropped)
            await until(lambda: node.num_left == 1)
            peer.send(StatusQuery())  # is lost without an error

    run()


@pytest.mark.parametrize(
    "swallowed", [(Direction.FORTH, Direction.BACK), (Direction.FORTH,), (Direction.BACK,)]
)
@on_loop
async def test_swallowed_link_is_dropped_at_both_ends(swallowed: tuple[Direction, ...]) -> None:
    one, other = Recorder("a"), Recorder("b")
    async with (
        hosted(one, link_timeout_s=TIMEOUT_S) as (accepting, address),
        hosted(other, link_timeout_s=TIMEOUT_S) as (dialling, _),
    ):
        with LinkProxy((address.host, address.port)) as proxy:
            dialling.dial(Address(*proxy.address))
            await until(lambda: bool(one.peers and other.peers))
            proxy.swallow(*swallowed)
            begun_s = time.monotonic()
            await until(lambda: one.num_left == other.num_left == 1, timeout_s=PATIENCE_S)
            assert time.monotonic() - begun_s > TIMEOUT_S - 1.0
            for rpc_server in (accepting, dialling):
                assert set(rpc_server.dropped.counts()) <= {"silent", "unheard"}
            assert accepting.dropped.counts() or dialling.dropped.counts()


@on_loop
async def test_idle_link_lives_on() -> None:
    async with Joined(TIMEOUT_S) as pair:
        num_ticks = pair.one.num_ticks
        await until(lambda: pair.one.num_ticks - num_ticks >= 2 * TIMEOUT_S / 0.25, timeout_s=PATIENCE_S)
        pair.one.peers[0].send(tokens(1))
        await until(lambda: pair.other.messages == [tokens(1)])
        assert pair.one.num_left == pair.other.num_left == 0
        assert max(pair.one.peers[0].silence_s, pair.other.peers[0].silence_s) < TIMEOUT_S


@on_loop
async def test_silence_of_a_peer_that_never_pings_is_seen_before_its_drop() -> None:
    node = Recorder("a")
    async with hosted(node, link_timeout_s=TIMEOUT_S) as (rpc_server, address):
        await rogue_after_hello(address)
        peer = node.peers[0]
        await until(lambda: peer.silence_s > TIMEOUT_S / 2, timeout_s=PATIENCE_S)
        assert node.num_left == 0
        await until(lambda: node.num_left == 1, timeout_s=PATIENCE_S)
        assert rpc_server.dropped.counts() == {"silent": 1}
