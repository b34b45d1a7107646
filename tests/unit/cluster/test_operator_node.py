import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from baton.clock import ManualClock, SystemClock
from baton.cluster import operator_node
from baton.cluster.operator_node import SILENCE_GRACE_S, Verdicts, connected
from baton.config.router import RouterConfig
from baton.errors import ConfigError, WorkerLost
from baton.messages.control import Members
from baton.messages.operations import Drain, Migrate, Migrated, OrderedWorkers, Undrain, WorkerRemoved
from baton.messages.orders import Sleep, Wake
from baton.messages.workers import Address, WorkerRole
from baton.router.router import Router
from baton.rpc.server import RpcServer
from tests.event_loop import on_loop
from tests.node_peers import TestPeer, a_worker, id_of
from tests.waiting import until

KEY = b"k" * 32


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


@on_loop
async def test_a_drain_reaches_the_worker_before_it_returns() -> None:
    async with a_router("a") as (router, address):
        worker = TestPeer.worker(router, a_worker("d0"))
        async with connected([address], KEY) as operator:
            with pytest.raises(
                ConfigError, match="d0 is the last decode worker: without it no request is answered"
            ):
                await operator.drain("d0")
            assert not any(isinstance(message, Drain) for message in worker.received)
            await operator.drain("d0", may_be_last=True)
        assert any(isinstance(message, Drain) for message in worker.received)


@on_loop
async def test_one_of_several_goes_without_being_asked_twice() -> None:
    async with a_router("a") as (router, address):
        first, second = (TestPeer.worker(router, a_worker(name)) for name in ("d0", "d1"))
        TestPeer.worker(router, a_worker("p0"))
        async with connected([address], KEY) as operator:
            await operator.drain("d0")
            assert any(isinstance(message, Drain) for message in first.received)
            with pytest.raises(ConfigError, match="there is no 'd2'; the cluster's workers are: d0, d1, p0"):
                await operator.drain("d2")
            with pytest.raises(
                ConfigError, match="d1 is the last decode worker"
            ):  # the other has begun to go
                await operator.drain("d1")
        assert not any(isinstance(message, Drain) for message in second.received)


@on_loop
async def test_last_worker_of_its_model_is_the_last_whatever_other_models_have() -> None:
    async with a_router("a") as (router, address):
        for model in ("a", "b"):
            TestPeer.worker(router, a_worker(f"d{model}", model=model))
        async with connected([address], KEY) as operator:
            with pytest.raises(ConfigError, match="da is the last decode worker"):
                await operator.drain("da")


@on_loop
async def test_sleeping_worker_takes_no_other_role() -> None:
    async with a_router("a") as (router, address):
        for name in ("d0", "d1"):
            TestPeer.worker(router, a_worker(name, is_asleep=name == "d0"))
        async with connected([address], KEY) as operator:
            with pytest.raises(ConfigError, match="d0 sleeps: wake its model first"):
                await operator.flip("d0", WorkerRole.PREFILL)


@on_loop
async def test_order_about_a_model_names_one_of_several() -> None:
    async with a_router("a") as (router, address):
        workers = {model: TestPeer.worker(router, a_worker(f"d{model}", model=model)) for model in ("a", "b")}
        async with connected([address], KEY) as operator:
            for model, message in (
                ("", "name one of a, b"),
                ("c", "there is no 'c'; the cluster serves a, b"),
            ):
                with pytest.raises(ConfigError, match=message):
                    await operator.new_order(Sleep(model=model))
                with pytest.raises(ConfigError, match=message):
                    await operator.scale(1, 1, model)
            for order in (Sleep(model="b", level=2), Wake(model="b")):
                await operator.send_order(await operator.new_order(order))
        assert workers["b"].only(Sleep).level == 2 and workers["b"].only(Wake)
        assert not workers["a"].take(Sleep)


@on_loop
async def test_operator_with_another_key_gets_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_node, "ANSWER_TIMEOUT_S", 0.3)
    async with (
        a_router("a") as (_, address),
        connected([address], b"another key of enough length") as operator,
    ):
        with pytest.raises(TimeoutError):
            await operator.status()


@on_loop
async def test_migration_whose_router_is_lost_ends_at_once() -> None:
    async with AsyncExitStack() as router_ends:
        router, address = await router_ends.enter_async_context(a_router("a"))
        TestPeer.worker(router, a_worker("d0"))
        gateway = TestPeer.gateway(router)
        async with connected([address], KEY) as operator, asyncio.timeout(5.0):
            moves = asyncio.create_task(operator.migrate(worker="d0"))
            await until(lambda: bool(gateway.take(Migrate)))
            await router_ends.aclose()
            with pytest.raises(TimeoutError):
                await moves


def num_orders(gateway: TestPeer) -> int:
    return sum(isinstance(message, Migrate) for message in gateway.received)


@on_loop
async def test_moves_are_counted_for_the_order_that_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_router("a") as (router, address):
        for name in ("d0", "d1"):
            TestPeer.worker(router, a_worker(name))
        gateways = [TestPeer.gateway(router, name) for name in ("g0", "g1")]
        async with connected([address], KEY) as operator:
            first = asyncio.create_task(operator.migrate(worker="d0"))
            await until(lambda: num_orders(gateways[1]) == 1)
            monkeypatch.setattr(operator_node, "MIGRATE_TIMEOUT_S", 1.0)
            second = asyncio.create_task(operator.migrate(worker="d1"))
            await until(lambda: num_orders(gateways[1]) == 2)
            for number, gateway in enumerate(gateways, 1):
                one, other = gateway.take(Migrate)
                if number == 1:  # the second gateway does not answer the second order
                    gateway.say(Migrated.answer_to(other, num_moved=5))
                gateway.say(Migrated.answer_to(one, num_moved=number))
            assert (await first).num_moved == 3
            with pytest.raises(WorkerLost, match="5 moved, but only 1 of 2 gateways have told"):
                await second


@on_loop
async def test_migration_ends_when_a_gateway_leaves_before_its_answer() -> None:
    async with a_router("a") as (router, address):
        TestPeer.worker(router, a_worker("d0"))
        gateways = [TestPeer.gateway(router, name) for name in ("g0", "g1")]
        async with connected([address], KEY) as operator, asyncio.timeout(5.0):
            moves = asyncio.create_task(operator.migrate(worker="d0"))
            await until(lambda: num_orders(gateways[1]) == 1)
            gateways[0].say(Migrated.answer_to(gateways[0].only(Migrate), num_moved=3))
            gateways[1].leave()
            with pytest.raises(WorkerLost, match="3 moved, but only 1 of 2 gateways have told"):
                await moves


@on_loop
async def test_a_router_that_comes_back_is_asked_again() -> None:
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


@on_loop
async def test_all_routers_are_asked_and_told() -> None:
    async with a_router("a") as (one, first), a_router("b") as (other, second):
        workers = [TestPeer.worker(one, a_worker(name)) for name in ("d0", "d1")]
        workers.append(TestPeer.worker(other, a_worker("d0")))
        async with connected([first, second], KEY) as operator:
            status, same = await asyncio.gather(operator.status(), operator.status())
            assert len(status.workers) == len(same.workers) == 2
            assert {router.id for router in status.routers} == {id_of("a"), id_of("b")}
            assert {entry.worker.name for entry in status.workers} == {"d0", "d1"}
            assert await operator.explain(id_of("r")) == ()
            await operator.drain("d0")
    drained = [any(isinstance(message, Drain) for message in worker.received) for worker in workers]
    assert drained == [True, False, True]


@on_loop
async def test_watcher_hears_of_members_and_orders_and_of_the_routers_end() -> None:
    judging = Judging()
    async with AsyncExitStack() as router_ends:
        router, address = await router_ends.enter_async_context(a_router("a"))
        TestPeer.worker(router, a_worker("d0"))
        async with connected([address], KEY, judging.verdicts) as operator:
            await operator.status()
            TestPeer.operator(router).say(Undrain(worker="d1"))
            await until(lambda: bool(judging.orders))
            judging.removes(id_of("a"), "d0")
            # The router has just started: its list is not complete until it has left.
            assert (judging.orders, judging.replaced) == ([Undrain(worker="d1")], [])
            await router_ends.aclose()
            await until(lambda: bool(judging.replaced))


@on_loop
async def test_a_router_that_is_gone_keeps_no_other_from_answering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_node, "MOMENT_S", 0.05)
    async with a_router("a") as (_, first):
        async with a_router("b") as (_, second), connected([first, second], KEY) as operator:
            assert len((await operator.status()).routers) == 2
        async with connected([first, second], KEY) as operator:
            assert [router.id for router in (await operator.status()).routers] == [id_of("a")]


@on_loop
async def test_late_answer_to_an_earlier_question_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_router("a") as (router, address), connected([address], KEY) as operator:
        gateway = TestPeer.gateway(router, "g")
        with monkeypatch.context() as patched:
            patched.setattr(operator_node, "MIGRATE_TIMEOUT_S", 0.05)
            with pytest.raises(TimeoutError):
                await operator.migrate(request_id="r")
        late = gateway.only(Migrate)
        asking = asyncio.create_task(operator.migrate(request_id="s"))
        await until(lambda: any(isinstance(each, Migrate) for each in gateway.received))
        gateway.say(Migrated.answer_to(late, num_moved=1))
        gateway.say(Migrated.answer_to(gateway.only(Migrate), num_moved=2))
        assert (await asking).num_moved == 2


UNLISTED_S = 600.0


class Judging:
    """Verdicts, with what they led to."""

    def __init__(self, *routers: str) -> None:
        self.clock = ManualClock()
        self.replaced: list[tuple[str, float]] = []
        self.orders: list[object] = []
        self.verdicts = Verdicts(
            self.clock.now_s,
            lambda name, why, age_s: self.replaced.append((name, age_s)),
            self.orders.append,
            UNLISTED_S,
        )
        for router in routers:
            self.verdicts.joined(router)
            self.lists(router, "d0", "d1")

    def lists(self, router: str, *names: str, is_complete: bool = True) -> None:
        workers = tuple(a_worker(name) for name in names)
        self.verdicts.told(router, Members(workers=workers, is_complete=is_complete))

    def removes(self, router: str, name: str, *, is_hung: bool = True) -> None:
        removed = WorkerRemoved(worker=id_of(name), name=name, reason="for some reason", is_hung=is_hung)
        self.verdicts.told(router, removed)

    def passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.verdicts.tick()


@on_loop
async def test_router_that_connects_later_hears_the_report() -> None:
    watcher = Judging().verdicts
    async with a_router("a") as (router, address), connected([address], KEY, watcher) as operator:
        operator.tell(ordered=(OrderedWorkers("m", WorkerRole.DECODE, 2),))
        await until(lambda: bool(router.status().ordered))
        assert router.status().ordered[0].number == 2


def test_worker_that_the_only_router_removes_is_replaced_at_once() -> None:
    judging = Judging("a")
    judging.removes("a", "d0")
    assert judging.replaced == [("d0", 0.0)]
    judging.lists("a", "d1")
    assert len(judging.replaced) == 1


def test_last_workers_are_replaced_although_their_router_begins_a_new_list() -> None:
    judging = Judging("a")
    for name in ("d0", "d1"):
        judging.removes("a", name, is_hung=False)
    judging.lists("a", is_complete=False)
    judging.passes(SILENCE_GRACE_S)
    assert [name for name, _ in judging.replaced] == ["d0", "d1"]


def test_worker_whose_router_died_before_it_removed_the_worker_is_replaced() -> None:
    judging = Judging("a")
    judging.passes(0.25)
    judging.verdicts.left("a")
    judging.passes(2 * UNLISTED_S)  # without any router nothing is known
    judging.verdicts.joined("b")
    judging.lists("b", "d1")
    judging.passes(UNLISTED_S - 1)
    assert not judging.replaced
    judging.passes(2.0)
    assert [name for name, _ in judging.replaced] == ["d0"]
    judging.passes(2 * UNLISTED_S)
    assert len(judging.replaced) == 1


def test_worker_that_another_router_lists_is_kept() -> None:
    judging = Judging("a", "b")
    judging.removes("a", "d0")
    judging.lists("a", "d1")
    judging.lists("b", "d0", "d1")
    assert judging.replaced == []


def test_worker_is_replaced_when_the_last_router_loses_it() -> None:
    judging = Judging("a", "b")
    judging.removes("a", "d0")
    judging.clock.advance(2.0)
    judging.lists("b", "d1")  # its connection ended there, which is no verdict
    assert judging.replaced == [("d0", 2.0)]


def test_worker_is_replaced_when_the_router_that_lists_it_leaves() -> None:
    judging = Judging("a", "b")
    judging.removes("a", "d0")
    judging.verdicts.left("b")
    assert judging.replaced == [("d0", 0.0)]


def test_router_that_does_not_know_all_workers_yet_is_waited_for() -> None:
    judging = Judging("a")
    judging.verdicts.joined("b")
    judging.removes("a", "d0")
    judging.lists("b", "d1", is_complete=False)
    assert judging.replaced == []
    judging.lists("b", "d0", "d1")
    assert judging.replaced == []
    judging.lists("b", "d1")
    assert judging.replaced == [("d0", 0.0)]


def test_worker_that_its_router_lists_again_is_kept() -> None:
    judging = Judging("a", "b")
    judging.removes("a", "d0")
    judging.lists("a", "d0", "d1")
    judging.lists("b", "d1")
    judging.lists("a", "d1")  # it left in order
    assert judging.replaced == []


def test_worker_with_a_listed_successor_is_not_replaced_again() -> None:
    judging = Judging("a", "b")
    judging.removes("a", "d0")
    successor = a_worker("d0", id=id_of("d0, the second"))
    judging.verdicts.told("b", Members(workers=(successor, a_worker("d1"))))
    assert judging.replaced == []


def test_silent_worker_is_replaced_after_a_grace() -> None:
    judging = Judging("a")
    judging.removes("a", "d0", is_hung=False)
    judging.passes(SILENCE_GRACE_S - 0.1)
    assert judging.replaced == []
    judging.passes(0.1)
    assert judging.replaced == [("d0", SILENCE_GRACE_S)]


def test_silent_worker_that_comes_back_within_its_grace_is_kept() -> None:
    judging = Judging("a")
    judging.removes("a", "d0", is_hung=False)
    judging.passes(1.0)
    judging.lists("a", "d0", "d1")
    judging.passes(SILENCE_GRACE_S)
    assert judging.replaced == []


def test_worker_that_hangs_in_its_grace_is_replaced_at_once() -> None:
    judging = Judging("a", "b")
    judging.removes("a", "d0", is_hung=False)
    judging.passes(1.0)
    judging.removes("b", "d0")
    assert judging.replaced == [("d0", 1.0)]


def test_order_of_an_operator_is_passed_on() -> None:
    judging = Judging("a")
    judging.verdicts.told("a", Undrain(worker="d0"))
    assert (judging.orders, judging.replaced) == ([Undrain(worker="d0")], [])
