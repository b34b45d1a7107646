"""The order in which attempts start, and the pages that they are granted."""

from pathlib import Path
from typing import Any

import pytest

from baton.decode_worker.attempt import Attempt, DecodeAdmission
from baton.engine.engine import Engine
from baton.engine.replica import Replica
from baton.messages.control import Dispatch, Failure, Prefill
from baton.request import Request
from baton.tenants import Quotas, SchedulingKey, Sla
from tests.tiny_models import tiny_engine
from tests.worker_pair import GATEWAY, PREFILL, WorkerPair
from tests.worker_pair_cases import PROMPT, MakePair, a_request, answer_alone, said

NUM_PAGES = 30


def an_attempt(number: int, num_pages: int = 5, **fields: Any) -> Attempt:
    """An attempt that takes so many pages, none of which is cached."""
    request = a_request(number, (number, *range(1, 4 * num_pages)), **fields)
    return Attempt.of(Dispatch(request=request, gateway=GATEWAY.id, prefill=PREFILL), 0.0)


@pytest.fixture
def admission(tiny_model: Path) -> DecodeAdmission:
    return DecodeAdmission(tiny_engine(tiny_model, cache={"kv_cache_memory_bytes": NUM_PAGES * 4 * 512}))


def test_the_most_urgent_are_first_and_of_these_the_earliest(admission: DecodeAdmission) -> None:
    attempts = [an_attempt(number, priority=priority) for number, priority in enumerate((1, 0, 2, 0, 1))]
    for attempt in attempts:
        admission.wait(attempt)
    order = []
    while (first := admission.first()) is not None:
        order.append(attempts.index(first))
        admission.leave(first)
    assert order == [1, 3, 0, 4, 2]
    assert not len(admission)


def test_attempt_that_finds_no_room_is_tried_again_once_there_is(admission: DecodeAdmission) -> None:
    attempt, ledger = an_attempt(0, 21), admission._engine.pages
    pages = ledger.allocate(10, "another")
    assert admission.claim(attempt, 1) is None and attempt.num_expected_pages == 0
    ledger.release(pages, "another")
    assert admission.claim(attempt, 1) is not None and attempt.num_expected_pages == 21


def compute(engine: Replica, request: Request) -> None:
    engine.add(request)
    while engine.has_work():
        engine.step()


def test_attempt_is_not_looked_up_again_before_pages_are_free(
    admission: DecodeAdmission, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cached prefix counts as free until it is claimed, so the pages for the rest seem to be there."""
    engine = admission._engine
    compute(engine, a_request(0, tuple(range(41)), max_tokens=1))
    pages = engine.pages.allocate(10, "another")
    attempt = Attempt.of(Dispatch(request=a_request(1, tuple(range(84))), gateway=GATEWAY.id), 0.0)
    assert engine.num_available_pages > 11 and admission.claim(attempt, 1) is None
    with monkeypatch.context() as patch:
        patch.setattr(engine, "claim_prefix", None)
        assert admission.claim(attempt, 1) is None
    engine.pages.release(pages[:1], "another")
    claim = admission.claim(attempt, 1)
    assert claim is not None and claim.num_tokens == 40


def test_attempt_with_a_cached_prefix_over_its_quota_delays_its_tenant_alone(
    admission: DecodeAdmission,
) -> None:
    """The pages of its prefix count as well, which the tenant does not hold while the attempt waits."""
    engine, quotas = admission._engine, Quotas(max_kv_pages=12)
    compute(engine, a_request(0, tuple(range(21)), max_tokens=1))
    first = of_tenant(1, "a", quotas=quotas)
    assert admission.claim(first, 1) is not None
    limited = a_request(2, tuple(range(32)), tenant="a", scheduling_key=SchedulingKey(quotas=quotas))
    second = Attempt.of(Dispatch(request=limited, gateway=GATEWAY.id), 0.0)
    admission.wait(second)
    assert admission.claim(second, 1) is None and admission.first() is None
    admission.arrived(first)
    assert admission.first() is second and admission.claim(second, 1) is not None


def order_of(admission: DecodeAdmission, attempts: list[Attempt]) -> list[int]:
    """The numbers of the attempts in the order in which they start; each expects its pages."""
    order = []
    while (first := admission.first()) is not None:
        order.append(attempts.index(first))
        assert admission.claim(first, 1) is not None
        admission.leave(first)
    return order


def of_tenant(number: int, tenant: str, num_pages: int = 5, **scheduling_key: Any) -> Attempt:
    return an_attempt(number, num_pages, tenant=tenant, scheduling_key=SchedulingKey(**scheduling_key))


def test_better_scheduling_class_is_first(admission: DecodeAdmission) -> None:
    attempts = [of_tenant(0, "low", rank=1), of_tenant(1, "high"), of_tenant(2, "high")]
    for attempt in attempts:
        admission.wait(attempt)
    assert order_of(admission, attempts) == [1, 2, 0]


def test_tenant_with_fewest_pages_for_its_weight_is_first_in_its_class(
    admission: DecodeAdmission,
) -> None:
    attempts = [of_tenant(number, "noisy", 10 if not number else 5) for number in range(3)]
    attempts += [of_tenant(number, "quiet", weight=2.0) for number in range(3, 5)]
    for attempt in attempts[1:]:
        admission.wait(attempt)
    assert admission.claim(attempts[0], 1) is not None
    assert order_of(admission, attempts) == [3, 4, 1, 2]


def test_more_weight_has_more_pages_before_others_are_first(admission: DecodeAdmission) -> None:
    attempts = [of_tenant(number, "light") for number in range(3)]
    attempts += [of_tenant(number, "heavy", weight=3.0) for number in range(3, 6)]
    for attempt in attempts:
        admission.wait(attempt)
    assert order_of(admission, attempts) == [0, 3, 4, 5, 1, 2]


def test_a_tenant_of_one_orders_its_own_by_priority_and_by_when_they_are_due(
    admission: DecodeAdmission,
) -> None:
    slack, due = a_request(0, arrival_s=5.0), a_request(1, arrival_s=6.0, sla=Sla(ttft_ms=100.0))
    first = a_request(2, arrival_s=9.0, priority=-1)
    attempts = [Attempt.of(Dispatch(request=each, gateway=GATEWAY.id), 0.0) for each in (slack, due, first)]
    for attempt in attempts:
        admission.wait(attempt)
    assert order_of(admission, attempts) == [2, 1, 0]


def test_tenant_over_its_quota_does_not_delay_other_tenants(admission: DecodeAdmission) -> None:
    quotas = Quotas(max_kv_pages=12)
    first, second, other = (of_tenant(n, name, 10, quotas=quotas) for n, name in enumerate(("a", "a", "b")))
    assert admission.claim(first, 1) is not None
    admission.wait(second)
    assert admission.claim(second, 1) is None
    assert admission.first() is None
    admission.wait(other)
    assert admission.first() is other
    admission.leave(other)
    assert admission.first() is None  # the pages are on their way
    admission.arrived(first)
    admission.arrived(first)
    assert admission.first() is second and admission.claim(second, 1) is not None


def test_a_tenant_never_holds_more_than_its_quota_and_every_answer_comes(
    make_pair: MakePair, alone: Engine
) -> None:
    """Each prompt takes 11 pages at first: two of the noisy tenant's go on beside each other, not three."""
    pair = make_pair(num_pages=(96, 96))
    limited = SchedulingKey(quotas=Quotas(max_kv_pages=26))
    noisy = [a_request(n, (n, *PROMPT[1:]), tenant="noisy", scheduling_key=limited) for n in range(5)]
    quiet = a_request(9, (9, *PROMPT[1:]), tenant="quiet")
    for request in (*noisy, quiet):
        pair.dispatch(request)
    most = 0

    def is_over() -> bool:
        nonlocal most
        for host in (pair.prefill, pair.decode):
            most = max(most, host.engine.pages.accounts.num_pages.get("noisy", 0))
        return all(pair.is_answered(request) for request in (*noisy, quiet))

    pair.turns_until(is_over)
    assert 13 < most <= 26
    for request in (*noisy, quiet):
        assert said(pair.heard(request)) == answer_alone(alone, request)


def test_a_prompt_that_its_quota_can_never_hold_is_refused_by_name(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.dispatch(a_request(0, tenant="t", scheduling_key=SchedulingKey(quotas=Quotas(max_kv_pages=10))))
    failed = pair.failure()
    assert failed.failure is Failure.INVALID and "quota max_kv_pages is 10" in failed.reason


def num_granted(pair: WorkerPair) -> int:
    return pair.decode.endpoint.num_open


def test_decode_worker_grants_no_more_pages_than_it_has(make_pair: MakePair, alone: Engine) -> None:
    """Each prompt takes 11 pages of 30."""
    pair = make_pair(num_pages=(96, NUM_PAGES))
    requests = [a_request(number, (number, *PROMPT[1:])) for number in range(5)]
    pair.hold(Prefill)
    for request in requests:
        pair.dispatch(request)
    pair.turn()
    pair.turn()
    assert num_granted(pair) == 2
    assert pair.decode_worker.load().num_waiting == 3
    pair.hold()
    pair.turns_until(lambda: all(pair.is_answered(request) for request in requests))
    for request in requests:
        assert said(pair.heard(request)) == answer_alone(alone, request)
    assert not pair.decode_worker.counters["recomputed_prefills"]


def test_attempt_that_waits_for_pages_counts_as_one_query_of_the_cache(make_pair: MakePair) -> None:
    pair = make_pair(num_pages=(96, NUM_PAGES))
    pair.answer(a_request(0))
    pair.quiet_down()
    pair.hold(Prefill)
    for request in (first := a_request(1, tuple(range(55))), second := a_request(2, (*PROMPT, *range(40)))):
        pair.dispatch(request)
        pair.turn()
    assert pair.decode_worker.load().num_waiting == 1
    before = pair.decode_worker.load().prefix_queries_tokens
    for _ in range(20):
        pair.turn()
    assert pair.decode_worker.load().prefix_queries_tokens == before
    pair.hold()
    pair.turns_until(lambda: pair.is_answered(first) and pair.is_answered(second))
    load = pair.decode_worker.load()
    assert load.prefix_queries_tokens == before + first.num_tokens + 1 + second.num_tokens + 1
    assert load.prefix_hits_tokens == 40


def two_granted_of_four(make_pair: MakePair) -> tuple[WorkerPair, list[Request]]:
    """Requests 0 and 1 have pages, 2 and 3 wait for them, and no prompt is computed."""
    pair = make_pair(num_pages=(96, NUM_PAGES))
    requests = [a_request(number, (number, *PROMPT[1:])) for number in range(4)]
    pair.hold(Prefill)
    for request in requests:
        pair.dispatch(request)
    pair.turn()
    assert pair.decode_worker.load().num_waiting == 2
    return pair, requests


def test_cancelled_grant_makes_room(make_pair: MakePair) -> None:
    pair, requests = two_granted_of_four(make_pair)
    pair.cancel(requests[0])
    pair.turns_until(lambda: pair.decode_worker.load().num_waiting == 1)
    pair.cancel(requests[3])  # which waits
    assert pair.decode_worker.load().num_waiting == 0
    pair.hold()
    pair.turns_until(lambda: all(pair.is_answered(request) for request in requests[1:3]))


def test_waiting_attempt_whose_prompt_goes_with_the_link_is_retried_at_once(make_pair: MakePair) -> None:
    """A grant after the link is back would wait for the prompt that the prefill worker has dropped."""
    pair, _ = two_granted_of_four(make_pair)
    for host, other in ((pair.decode, pair.prefill), (pair.prefill, pair.decode)):
        pair.leave(host, other.hello)
        pair.join(host, other.hello)
    assert pair.decode_worker.load().num_waiting == 0 and not pair.decode_worker.attempts
    pair.turns_until(lambda: len(pair.failures()) == 4)
    assert {(failed.failure, failed.worker) for failed in pair.failures()} == {(Failure.LOST, PREFILL)}


def has_started(pair: WorkerPair, request: Request) -> bool:
    """True when the decode worker has answered: the first token is the prefill worker's."""
    return len(pair.heard(request)) > 1


def test_short_prompts_do_not_overtake_a_long_one_that_waits(make_pair: MakePair) -> None:
    pair = make_pair(num_pages=(96, NUM_PAGES))
    running = a_request(0, (9, *PROMPT[:39]), max_tokens=50)
    pair.dispatch(running)
    pair.turns_until(lambda: bool(pair.heard(running)))
    long, *short = [a_request(1, tuple(range(1, 91)), max_tokens=2)] + [
        a_request(number, (number, 5, 6), max_tokens=2) for number in range(2, 6)
    ]
    pair.dispatch(long)
    for request in short:
        pair.dispatch(request)
    pair.turns_until(lambda: pair.is_answered(running))
    assert not any(has_started(pair, request) for request in (long, *short))
    pair.turns_until(lambda: all(pair.is_answered(request) for request in (long, *short)))


def test_the_urgent_overtake_those_that_wait(make_pair: MakePair) -> None:
    pair = make_pair(num_pages=(96, NUM_PAGES))
    requests = [a_request(number, (number, *PROMPT[1:])) for number in range(4)]
    urgent = a_request(8, (8, *PROMPT[1:]), priority=-1)
    for request in (*requests, urgent):
        pair.dispatch(request)
    pair.turns_until(lambda: pair.is_answered(urgent))
    assert not has_started(pair, requests[3])
    pair.turns_until(lambda: pair.is_answered(requests[3]))


def test_two_attempts_at_a_request_have_different_names_in_the_engine() -> None:
    first, second = (
        Attempt.of(Dispatch(request=a_request(attempt=attempt), gateway=GATEWAY.id), 0.0)
        for attempt in range(2)
    )
    assert first.request_id == second.request_id and first.engine_id != second.engine_id
