import asyncio

import msgspec
import pytest

from baton.clock import ManualClock
from baton.errors import BatonError, InvalidRequest, Overloaded, WorkerLost
from baton.gateway.api.admin import FRESH_S, PROVED_S, Canary
from baton.messages.workers import WorkerRole
from tests.scripted_service import ScriptedService, answer_at_once, worker


def check(canary: Canary) -> None:
    asyncio.run(canary.check())


def test_an_answer_is_good_for_a_second() -> None:
    service, clock = ScriptedService(answer_at_once([1, 2])), ManualClock()
    canary = Canary(service, clock)
    check(canary)
    clock.advance(FRESH_S / 2)
    check(canary)
    assert len(service.requests) == 1
    clock.advance(FRESH_S)
    check(canary)
    first, second = service.requests
    assert first.token_ids != second.token_ids  # no prefix cache answers for a worker


def test_two_gateways_never_ask_the_same() -> None:
    service = ScriptedService(answer_at_once([1, 2]))
    for _ in range(2):
        check(Canary(service, ManualClock()))
    first, second = service.requests
    assert first.token_ids != second.token_ids  # else the first one's pages would answer the second


def test_its_prompt_is_too_long_for_a_decode_worker_alone() -> None:
    service = ScriptedService(answer_at_once([1, 2]))
    service.workers = (worker(page_size=64), worker(page_size=16))
    check(Canary(service, ManualClock()))
    assert len(service.requests[0].token_ids) == 129
    service.workers = (worker(page_size=64, max_model_len=40),)
    check(Canary(service, ManualClock()))
    assert len(service.requests[1].token_ids) == 38


def test_concurrent_checks_share_one_request() -> None:
    service = ScriptedService()

    async def ask() -> None:
        canary = Canary(service, ManualClock())
        asking = [asyncio.create_task(canary.check()) for _ in range(5)]
        while not service.requests:
            await asyncio.sleep(0)
        answer_at_once([1, 2])(service, service.requests[0])
        await asyncio.gather(*asking)

    asyncio.run(ask())
    assert len(service.requests) == 1


@pytest.mark.parametrize("error", [WorkerLost("x"), InvalidRequest("x")])
def test_a_failure_is_told_and_not_kept(error: BatonError) -> None:
    service = ScriptedService(lambda service, request: service.fail(request.request_id, error))
    canary = Canary(service, ManualClock())
    with pytest.raises(type(error)):
        check(canary)
    service.play = answer_at_once([1, 2])
    check(canary)


def test_silence_is_a_failure() -> None:
    service = ScriptedService()
    with pytest.raises(WorkerLost, match="no answer within 0.01 s"):
        check(Canary(service, ManualClock(), timeout_s=0.01))
    assert len(service.cancelled) == 1


def test_without_workers_nothing_is_asked() -> None:
    service = ScriptedService()
    service.workers = ()
    with pytest.raises(Overloaded):
        check(Canary(service, ManualClock()))
    assert not service.requests


PREFILL = msgspec.structs.replace(worker(), id="b" * 32, name="prefill-0", role=WorkerRole.PREFILL)


def apart() -> ScriptedService:
    """A prefill and a decode worker, that answer."""
    service = ScriptedService(answer_at_once([1, 2]))
    service.workers = (worker(), PREFILL)
    return service


def test_once_a_prefill_worker_was_seen_one_has_to_compute() -> None:
    service, clock = apart(), ManualClock()
    canary = Canary(service, clock)
    check(canary)
    assert service.requests[0].is_probe
    service.workers = (worker(),)
    clock.advance(FRESH_S)
    with pytest.raises(Overloaded, match="no prefill worker"):
        check(canary)
    assert len(service.requests) == 1


def test_a_configured_prefill_worker_is_missed_from_the_beginning() -> None:
    service = apart()
    service.workers = (worker(),)
    with pytest.raises(Overloaded, match="no prefill worker"):
        check(Canary(service, ManualClock(), expects_prefill=True))


def test_where_none_is_configured_decode_workers_are_enough() -> None:
    service = apart()
    check(Canary(service, ManualClock(), expects_prefill=False))
    service.workers = (worker(),)
    check(Canary(service, ManualClock()))
    assert [request.is_probe for request in service.requests] == [False, False]


def test_what_clients_requests_have_shown_lately_is_proof_enough() -> None:
    service, clock = apart(), ManualClock(100.0)
    canary = Canary(service, clock)
    service.prefill_seen_s = clock.now_s()
    clock.advance(PROVED_S - 0.1)
    check(canary)
    assert not service.requests
    clock.advance(0.2)
    check(canary)
    assert len(service.requests) == 1
    # Where there are no prefill workers they show nothing.
    canary = Canary(service, clock, expects_prefill=False)
    service.prefill_seen_s = clock.now_s()
    check(canary)
    assert len(service.requests) == 2


def test_a_prefill_worker_that_computes_nothing_is_named() -> None:
    service = apart()
    service.play = None
    with pytest.raises(WorkerLost, match="computed by a prefill worker and transferred within 0.01 s"):
        check(Canary(service, ManualClock(), timeout_s=0.01))
