"""Links over which nothing comes any more, though no socket has said so."""

import asyncio
import time

import pytest

from baton.bench.faults.link_proxy import Direction, LinkProxy
from baton.messages.workers import Address
from tests.unit.baton.peers import Recorder, hosted, rogue_after_hello, tokens, until

TIMEOUT_S = 2.0
PATIENCE_S = 20.0  # of the test: for a machine that does much else


@pytest.mark.parametrize(
    "swallowed", [(Direction.FORTH, Direction.BACK), (Direction.FORTH,), (Direction.BACK,)]
)
def test_swallowed_link_is_dropped_at_both_ends(swallowed: tuple[Direction, ...]) -> None:
    async def run() -> None:
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
                await until(lambda: one.num_left == other.num_left == 1, PATIENCE_S)
                assert time.monotonic() - begun_s > TIMEOUT_S - 1.0
                for rpc_server in (accepting, dialling):
                    assert set(rpc_server.dropped.counts()) <= {"silent", "unheard"}
                assert accepting.dropped.counts() or dialling.dropped.counts()

    asyncio.run(run())


def test_idle_link_lives_on() -> None:
    async def run() -> None:
        one, other = Recorder("a"), Recorder("b")
        async with (
            hosted(one, link_timeout_s=TIMEOUT_S) as (accepting, address),
            hosted(other, link_timeout_s=TIMEOUT_S) as (dialling, _),
        ):
            dialling.dial(address)
            await until(lambda: bool(one.peers and other.peers))
            num_ticks = one.num_ticks
            # As many ticks as twice the timeout has: no sleep for luck, the hub's own clock is counted.
            await until(lambda: one.num_ticks - num_ticks >= 2 * TIMEOUT_S / 0.25, PATIENCE_S)
            one.peers[0].send(tokens(1))
            await until(lambda: other.messages == [tokens(1)])
            assert one.num_left == other.num_left == 0
            assert max(one.peers[0].silence_s, other.peers[0].silence_s) < TIMEOUT_S
            assert not accepting.dropped.counts() and not dialling.dropped.counts()

    asyncio.run(run())


def test_silence_of_a_peer_that_never_pings_is_seen_before_it_is_dropped() -> None:
    async def run() -> None:
        node = Recorder("a")
        async with hosted(node, link_timeout_s=TIMEOUT_S) as (rpc_server, address):
            await rogue_after_hello(address)
            await until(lambda: bool(node.peers))
            peer = node.peers[0]
            await until(lambda: peer.silence_s > TIMEOUT_S / 2, PATIENCE_S)
            assert node.num_left == 0
            await until(lambda: node.num_left == 1, PATIENCE_S)
            assert rpc_server.dropped.counts() == {"silent": 1}

    asyncio.run(run())
