import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.clock import SystemClock
from baton.cluster import operator_node
from baton.cluster.operator_node import connected
from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.messages.control import Members
from baton.messages.operations import Drain, Undrain
from baton.messages.workers import Address
from baton.router.router import Router
from baton.rpc.server import RpcServer
from tests.node_peers import TestPeer, a_worker, id_of

KEY = b"k" * 32


def with_router(test: Callable[[Router, Address], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        rpc_server = RpcServer(KEY)
        router = Router(RouterConfig(), SystemClock(), "a" * 32)
        address = await rpc_server.listen()
        rpc_server.serve(router)
        try:
            await test(router, address)
        finally:
            await rpc_server.close()

    asyncio.run(run())


def test_status_tells_of_every_worker() -> None:
    async def test(router: Router, address: Address) -> None:
        for name in ("d0", "p0"):
            TestPeer.worker(router, a_worker(name))
        async with connected([address], KEY) as operator:
            first, second = await asyncio.gather(operator.status(), operator.status())
        assert {entry.worker.name for entry in first.workers} == {"d0", "p0"}
        assert {entry.worker.name for entry in second.workers} == {"d0", "p0"}

    with_router(test)


def test_a_drain_reaches_the_worker_before_it_returns() -> None:
    async def test(router: Router, address: Address) -> None:
        worker = TestPeer.worker(router, a_worker("d0"))
        async with connected([address], KEY) as operator:
            with pytest.raises(
                ConfigError, match="d0 is the last decode worker: without it no request is answered"
            ):
                await operator.drain("d0")
            assert not any(isinstance(message, Drain) for message in worker.received)
            await operator.drain("d0", may_be_last=True)
        assert any(isinstance(message, Drain) for message in worker.received)

    with_router(test)


def test_one_of_several_goes_without_being_asked_twice() -> None:
    async def test(router: Router, address: Address) -> None:
        first, second = (TestPeer.worker(router, a_worker(name)) for name in ("d0", "d1"))
        TestPeer.worker(router, a_worker("p0"))
        async with connected([address], KEY) as operator:
            await operator.drain("d0")
            assert any(isinstance(message, Drain) for message in first.received)
            with pytest.raises(
                ConfigError, match="d1 is the last decode worker"
            ):  # the other has begun to go
                await operator.drain("d1")
        assert not any(isinstance(message, Drain) for message in second.received)

    with_router(test)


def test_unknown_worker_is_answered_with_the_known_ones() -> None:
    async def test(router: Router, address: Address) -> None:
        TestPeer.worker(router, a_worker("d0"))
        async with connected([address], KEY) as operator:
            with pytest.raises(ConfigError, match="there is no 'd1'; the cluster's workers are: d0"):
                await operator.drain("d1")

    with_router(test)


def test_operator_with_another_key_gets_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_node, "ANSWER_TIMEOUT_S", 0.3)

    async def test(router: Router, address: Address) -> None:
        async with connected([address], b"another key of enough length") as operator:
            with pytest.raises(TimeoutError):
                await operator.status()

    with_router(test)


def test_a_router_that_comes_back_is_asked_again() -> None:
    async def run() -> None:
        first = RpcServer(KEY)
        address = await first.listen()
        first.serve(Router(RouterConfig(), SystemClock(), "a" * 32))
        async with connected([address], KEY) as operator:
            assert (await operator.status()).workers == ()
            await first.close()
            second = RpcServer(KEY)
            await second.listen(address.host, address.port)
            router = Router(RouterConfig(), SystemClock(), "b" * 32)
            second.serve(router)
            TestPeer.worker(router, a_worker("d0"))
            assert len((await operator.status()).workers) == 1
            await second.close()

    asyncio.run(run())


@asynccontextmanager
async def a_router(name: str) -> AsyncIterator[tuple[Router, Address]]:
    rpc_server = RpcServer(KEY)
    router = Router(RouterConfig(), SystemClock(), id_of(name))
    address = await rpc_server.listen()
    rpc_server.serve(router)
    try:
        yield router, address
    finally:
        await rpc_server.close()


def test_all_routers_are_asked_and_told() -> None:
    async def run() -> None:
        async with a_router("a") as (one, first), a_router("b") as (other, second):
            workers = [TestPeer.worker(one, a_worker(name)) for name in ("d0", "d1")]
            workers.append(TestPeer.worker(other, a_worker("d0")))
            async with connected([first, second], KEY) as operator:
                status = await operator.status()
                assert {router.id for router in status.routers} == {id_of("a"), id_of("b")}
                assert {entry.worker.name for entry in status.workers} == {"d0", "d1"}
                assert await operator.explain(id_of("r")) == ()
                await operator.drain("d0")
        drained = [any(isinstance(message, Drain) for message in worker.received) for worker in workers]
        assert drained == [True, False, True]

    asyncio.run(run())


class Recording:
    """A Watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, object]] = []
        self.num_ticks = 0

    def joined(self, router: str) -> None:
        self.heard.append((router, "joined"))

    def left(self, router: str) -> None:
        self.heard.append((router, "left"))

    def tick(self) -> None:
        self.num_ticks += 1

    def told(self, router: str, message: object) -> None:
        self.heard.append((router, message))


def test_watcher_hears_of_members_and_orders_and_of_the_routers_end() -> None:
    async def run() -> None:
        recording = Recording()
        async with a_router("a") as (router, address):
            TestPeer.worker(router, a_worker("d0"))
            asking = TestPeer.operator(router)
            async with connected([address], KEY, recording), asyncio.timeout(10):
                while len(recording.heard) < 2:
                    await asyncio.sleep(0.01)
                asking.say(Undrain(worker="d1"))
                while len(recording.heard) < 3:
                    await asyncio.sleep(0.01)
                (_, joined), (_, members), (_, order) = recording.heard
                assert (joined, order) == ("joined", Undrain(worker="d1"))
                assert recording.num_ticks > 0
                assert isinstance(members, Members) and members.workers[0].name == "d0"
                for peer in list(router._watchers):
                    peer.close()
                while recording.heard[3:4] != [(id_of("a"), "left")]:
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_router_that_is_gone_keeps_no_other_from_answering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_node, "MOMENT_S", 0.05)

    async def run() -> None:
        async with a_router("a") as (_, first):
            async with a_router("b") as (_, second), connected([first, second], KEY) as operator:
                assert len((await operator.status()).routers) == 2
            async with connected([first, second], KEY) as operator:
                assert [router.id for router in (await operator.status()).routers] == [id_of("a")]

    asyncio.run(run())
