"""The health check, over a service that follows a script."""

import asyncio

import msgspec
import pytest
from fastapi import FastAPI

from baton.clock import ManualClock
from baton.errors import BatonError, InvalidRequest, Overloaded, WorkerLost
from baton.gateway.api.body import CompletionBody
from baton.gateway.api.body_reader import ServedModels
from baton.gateway.api.health import FRESH_S, Canary, add_health_routes
from baton.messages.workers import WorkerRole
from tests.event_loop import on_loop
from tests.scripted_service import ScriptedService, answer_at_once, worker
from tests.unit.gateway.calls import ask, served_model


@on_loop
async def test_result_of_a_check_is_good_for_a_second() -> None:
    service, clock = ScriptedService(answer_at_once([1, 2])), ManualClock()
    canary = Canary(service, clock)
    await canary.check()
    clock.advance(FRESH_S / 2)
    await canary.check()
    assert len(service.requests) == 1
    clock.advance(FRESH_S)
    await canary.check()
    first, second = service.requests
    assert first.token_ids != second.token_ids  # no prefix cache answers for a worker


@on_loop
async def test_prompt_of_the_canary_is_longer_than_two_pages() -> None:
    service = ScriptedService(answer_at_once([1, 2]))
    service.workers = (worker(page_size=64), worker(page_size=16))
    await Canary(service, ManualClock()).check()
    assert len(service.requests[0].token_ids) == 129
    service.workers = (worker(page_size=64, max_model_len=40),)
    await Canary(service, ManualClock()).check()
    assert len(service.requests[1].token_ids) == 38


@on_loop
async def test_concurrent_checks_share_one_request() -> None:
    service = ScriptedService()
    canary = Canary(service, ManualClock())
    asking = [asyncio.create_task(canary.check()) for _ in range(5)]
    while not service.requests:
        await asyncio.sleep(0)
    answer_at_once([1, 2])(service, service.requests[0])
    await asyncio.gather(*asking)
    assert len(service.requests) == 1


@pytest.mark.parametrize("error", [WorkerLost("x"), InvalidRequest("x")])
@on_loop
async def test_failure_is_raised_and_not_kept(error: BatonError) -> None:
    service = ScriptedService(lambda service, request: service.fail(request.request_id, error))
    canary = Canary(service, ManualClock())
    with pytest.raises(type(error)):
        await canary.check()
    service.play = answer_at_once([1, 2])
    await canary.check()


@on_loop
async def test_silence_is_a_failure() -> None:
    service = ScriptedService()
    with pytest.raises(WorkerLost, match="no answer within 0.01 s"):
        await Canary(service, ManualClock(), timeout_s=0.01).check()
    assert len(service.cancelled) == 1


PREFILL = msgspec.structs.replace(worker(), id="b" * 32, name="prefill-0", role=WorkerRole.PREFILL)


def apart() -> ScriptedService:
    """A prefill and a decode worker, that answer."""
    service = ScriptedService(answer_at_once([1, 2]))
    service.workers = (worker(), PREFILL)
    return service


@on_loop
async def test_prefill_worker_that_has_left_is_missed() -> None:
    service, clock = apart(), ManualClock()
    canary = Canary(service, clock)
    await canary.check()
    assert service.requests[0].is_probe
    service.workers = (worker(),)
    clock.advance(FRESH_S)
    with pytest.raises(Overloaded, match="no prefill worker"):
        await canary.check()
    assert len(service.requests) == 1


@on_loop
async def test_configured_prefill_worker_is_missed_from_the_beginning() -> None:
    service = apart()
    service.workers = (worker(),)
    with pytest.raises(Overloaded, match="no prefill worker"):
        await Canary(service, ManualClock(), expects_prefill=True).check()


@on_loop
async def test_prefill_worker_that_sleeps_beside_an_awake_decode_worker_is_not_probed() -> None:
    """As after a kill of the decode worker while both slept: it is started awake."""
    service = apart()
    service.workers = [
        msgspec.structs.replace(each, is_asleep=each.role is WorkerRole.PREFILL) for each in service.workers
    ]
    await Canary(service, ManualClock(), expects_prefill=True).check()
    (request,) = service.requests
    assert not request.is_probe


@pytest.mark.parametrize("model", ["", "one of several"])
@on_loop
async def test_probe_goes_before_all_requests_of_clients(model: str) -> None:
    """A long queue must not make a healthy gateway leave its load balancer."""
    service = ScriptedService(answer_at_once([1, 2]))
    service.workers = (msgspec.structs.replace(worker(), model=model),)
    await Canary(service, ManualClock(), model=model, expects_prefill=False).check()
    (request,) = service.requests
    assert request.is_health_check
    with pytest.raises(msgspec.ValidationError, match="priority"):
        msgspec.convert({"prompt": "", "priority": request.priority}, CompletionBody)


@on_loop
async def test_models_are_checked_at_once() -> None:
    services = {"a": ScriptedService(), "b": ScriptedService()}
    for name, service in services.items():
        service.workers = (msgspec.structs.replace(worker(), model=name),)
    models = [served_model(service, name=name, key=name) for name, service in services.items()]
    canaries = [Canary(service, ManualClock(), model=name) for name, service in services.items()]
    app = FastAPI()
    add_health_routes(app, ServedModels(models), canaries)
    asked = asyncio.create_task(ask(app, "/health"))
    while not all(service.requests for service in services.values()):
        await asyncio.sleep(0)
    answer_at_once([1, 2])(services["a"], services["a"].requests[0])
    services["b"].fail(services["b"].requests[0].request_id, WorkerLost("x"))
    assert await asked == (503, "unhealthy")
