"""The routes of sleep and wake, over a service that keeps the orders."""

import asyncio
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI

from baton.gateway.api.body_reader import ServedModels
from baton.gateway.api.sleep import LOOK_EVERY_S, add_sleep_routes
from baton.messages.operations import Status
from baton.messages.orders import Sleep, Wake
from baton.messages.workers import Worker, WorkerRole
from tests.event_loop import on_loop
from tests.node_peers import a_worker
from tests.scripted_service import ScriptedService
from tests.unit.gateway import calls


class Cluster(ScriptedService):
    """Workers of two models that follow an order when it comes, or `deaf` to the first orders."""

    def __init__(self, num_deaf: int = 0) -> None:
        super().__init__()
        self.num_deaf = num_deaf
        self.numbers: list[int] = []  # of `orders`, which are kept without
        self.workers = [a_worker(f"{role}{model}", model=model) for model in "ab" for role in "pd"]

    def send_order(self, order: Sleep | Wake) -> None:
        super().send_order(msgspec.structs.replace(order, number=0))
        self.numbers.append(order.number)
        if len(self.orders) > self.num_deaf:
            self.workers = [self.after(each, order) for each in self.workers]

    def after(self, worker: Worker, order: Sleep | Wake) -> Worker:
        is_asleep = isinstance(order, Sleep) if worker.serves(order.model) else worker.is_asleep
        return a_worker(worker.name, model=worker.model, is_asleep=is_asleep)


async def call(service: ScriptedService, method: str, path: str, *, is_one: bool = False) -> tuple[int, Any]:
    app, keys = FastAPI(), [""] if is_one else ["a", "b"]
    models = [calls.served_model(service, name=key or "a", key=key) for key in keys]
    add_sleep_routes(app, ServedModels(models))
    return await calls.ask(app, path, method)


@on_loop
async def test_model_sleeps_and_wakes_and_the_other_does_neither() -> None:
    service = Cluster()
    assert await call(service, "POST", "/sleep?model=b&level=2") == (200, None)
    assert service.orders == [Sleep(model="b", level=2)]
    assert await call(service, "GET", "/is_sleeping?model=b") == (200, {"is_sleeping": True})
    assert await call(service, "GET", "/is_sleeping?model=a") == (200, {"is_sleeping": False})
    assert await call(service, "POST", "/wake_up?model=b") == (200, None)
    assert service.orders[1:] == [Wake(model="b")]
    assert await call(service, "GET", "/is_sleeping?model=b") == (200, {"is_sleeping": False})


@on_loop
async def test_order_is_repeated_until_it_is_carried_out() -> None:
    service = Cluster(num_deaf=1)
    assert await call(service, "POST", "/sleep?model=a") == (200, None)
    assert service.orders == [Sleep(model="a")] * 2 and len(set(service.numbers)) == 1


@on_loop
async def test_only_model_need_not_be_named() -> None:
    service = Cluster()
    assert await call(service, "POST", "/sleep", is_one=True) == (200, None)
    assert service.orders == [Sleep()]


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/sleep", (400, "invalid_value")),
        ("/sleep?model=a&level=0", (400, "invalid_value")),
        ("/sleep?model=a&mode=abort", (400, "invalid_value")),
        ("/sleep?model=c", (404, "model_not_found")),
        ("/wake_up?model=a&tags=weights", (400, "invalid_value")),
    ],
)
@on_loop
async def test_wrong_parameter_is_refused_and_nothing_is_ordered(path: str, answer: tuple[int, str]) -> None:
    service = Cluster()
    assert await call(service, "POST", path) == answer
    assert not service.orders


@on_loop
async def test_cluster_without_workers_cannot_be_put_to_sleep() -> None:
    service = Cluster()
    service.workers = []
    assert await call(service, "POST", "/sleep?model=a") == (503, "no_worker")


class SlowCluster(Cluster):
    """Workers that follow no order by themselves, in one application with its open orders."""

    def __init__(self) -> None:
        super().__init__(num_deaf=10**6)
        self.model = calls.served_model(self, name="a", key="a")
        self.app = FastAPI()
        add_sleep_routes(self.app, ServedModels([self.model]))

    async def post(self, path: str) -> int:
        return (await calls.ask(self.app, path, "POST"))[0]

    def begin(self, path: str) -> "asyncio.Task[int]":
        return asyncio.ensure_future(self.post(path))

    async def until_ordered(self, kind: type[Sleep | Wake]) -> None:
        while not self.orders or not isinstance(self.orders[-1], kind):
            await asyncio.sleep(0.01)

    def follow(self, *, are_asleep: bool) -> None:
        order: Sleep | Wake = Sleep(model="a") if are_asleep else Wake(model="a")
        self.workers = [self.after(each, order) for each in self.workers]


@on_loop
async def test_later_order_of_another_gateway_ends_the_opposite_one() -> None:
    service = SlowCluster()
    falls_asleep = service.begin("/sleep")
    await service.until_ordered(Sleep)
    service.status = Status(orders=(Wake(model="a", number=service.numbers[-1] - 1),))
    service.follow(are_asleep=False)
    await asyncio.sleep(3 * LOOK_EVERY_S)
    assert not falls_asleep.done(), "that order was given before"
    service.status = Status(orders=(Wake(model="a", number=service.numbers[-1] + 1),))
    assert await falls_asleep == 409


@on_loop
async def test_new_order_has_a_higher_number_than_all_that_are_known() -> None:
    service = Cluster()
    service.status = Status(orders=(Sleep(model="b", number=2**52), Wake(model="a", number=7)))
    assert await call(service, "POST", "/sleep?model=a") == (200, None)
    assert service.numbers == [2**52 + 1]


@on_loop
async def test_worker_that_is_absent_while_it_wakes_is_put_to_sleep_too() -> None:
    service = SlowCluster()
    service.follow(are_asleep=True)
    wakes = service.begin("/wake_up")
    await service.until_ordered(Wake)
    all_workers, service.workers = service.workers, service.workers[:1]
    falls_asleep = service.begin("/sleep")
    assert await wakes == 409
    await service.until_ordered(Sleep)
    await asyncio.sleep(1.1)
    assert not falls_asleep.done(), "one worker still loads the model"
    service.workers = all_workers
    service.follow(are_asleep=True)
    assert await falls_asleep == 200


@on_loop
async def test_worker_that_drains_to_fall_asleep_is_not_yet_woken() -> None:
    service = SlowCluster()
    service.draining = [worker.id for worker in service.workers if worker.model == "a"]
    wakes = service.begin("/wake_up")
    await service.until_ordered(Wake)
    assert not wakes.done()
    service.draining = ()
    assert await wakes == 200


@on_loop
async def test_model_does_not_sleep_while_a_worker_that_has_joined_again_is_listed_twice() -> None:
    service = SlowCluster()
    falls_asleep, awake = service.begin("/sleep"), service.workers
    await service.until_ordered(Sleep)
    service.follow(are_asleep=True)
    asleep, service.workers = service.workers, [*awake, *service.workers]
    await asyncio.sleep(3 * LOOK_EVERY_S)
    assert not falls_asleep.done() and not service.model.view.is_asleep
    service.workers = asleep
    assert await falls_asleep == 200 and service.model.view.is_asleep


@on_loop
async def test_model_changes_from_an_order_until_all_have_followed() -> None:
    """Health checks leave a model alone that changes."""
    service = SlowCluster()

    def state() -> tuple[bool, bool]:
        return service.model.is_changing, service.model.view.is_asleep

    assert state() == (False, False)
    falls_asleep = service.begin("/sleep")
    await service.until_ordered(Sleep)
    assert state() == (True, False)
    service.follow(are_asleep=True)
    assert await falls_asleep == 200
    assert state() == (True, True)


@pytest.mark.parametrize("drains", [True, False])
def test_model_changes_once_one_worker_sleeps_and_no_decode_worker_takes_requests(drains: bool) -> None:
    """As by an order that another gateway, or a command, has given."""
    service = SlowCluster()
    prefill, decode = (
        a_worker("p", model="a", role=WorkerRole.PREFILL, is_asleep=True),
        a_worker("d", model="a", role=WorkerRole.DECODE),
    )
    service.workers, service.draining = [prefill, decode], [decode.id] if drains else []
    assert service.model.is_changing is drains
