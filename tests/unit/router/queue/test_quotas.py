import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.request import Request
from baton.router.in_flight import EXPECTED_OUTPUT_TOKENS
from baton.router.queue.quotas import (
    LEAST_GAIN,
    MAX_IDLE,
    MAX_TENANTS,
    AttemptRefusal,
    Bucket,
    RequestWork,
    TenantQuotas,
    WorkEstimator,
)
from baton.tenants import Quotas, Refusal
from tests.unit.router.queue_cases import asked

RATE = 10.0


def quotas_at(now_s: float = 100.0) -> tuple[TenantQuotas, ManualClock]:
    clock = ManualClock(now_s)
    return TenantQuotas(clock), clock


def refused_by(refused: AttemptRefusal | None) -> Refusal | None:
    return refused.refusal if refused is not None else None


def test_without_quotas_no_request_is_refused() -> None:
    quotas, _ = quotas_at()
    for _ in range(100):
        assert quotas.refusal("a", Quotas(), 1e9) is None
        quotas.enter("a", Quotas(), 1e9)
    assert not quotas.is_full("a") and quotas.queue_refusal("a", Quotas(), 10**6) is None


def test_request_larger_than_the_burst_needs_a_full_bucket_and_leaves_it_in_debt() -> None:
    quotas, clock = quotas_at()
    limit = Quotas(tokens_per_s=RATE, burst_tokens=100)
    assert quotas.refusal("a", limit, 1000) is None
    quotas.enter("a", limit, 1000)
    refused = quotas.refusal("a", limit, 1)
    assert refused is not None and refused.retry_after_s == pytest.approx(90.1)
    clock.advance(90.2)
    assert quotas.refusal("a", limit, 1) is None


@pytest.mark.parametrize(
    ("limit", "num_queued", "named"),
    [
        (Quotas(max_queued=2), 2, None),
        (Quotas(max_queued=2), 3, Refusal.MAX_QUEUED),
        (Quotas(max_queued=0, max_active_sequences=1), 1, Refusal.MAX_ACTIVE_SEQUENCES),
        (Quotas(max_queued=0, max_active_sequences=2), 1, Refusal.MAX_QUEUED),
        (Quotas(max_queued=2, max_active_sequences=1), 3, Refusal.MAX_QUEUED),
    ],
)
def test_queue_is_bounded_and_the_refusal_names_the_quota(
    limit: Quotas, num_queued: int, named: Refusal | None
) -> None:
    quotas, _ = quotas_at()
    quotas.enter("a", limit, 1)
    quotas.activate("a")
    assert refused_by(quotas.queue_refusal("a", limit, num_queued)) is named


def test_changed_quotas_hold_at_once_and_keep_the_level_of_the_bucket() -> None:
    quotas, _ = quotas_at()
    quotas.enter("a", Quotas(tokens_per_s=RATE, burst_tokens=100), 90)
    wider = Quotas(tokens_per_s=RATE, burst_tokens=1000)
    assert quotas.refusal("a", wider, 10) is None
    assert quotas.refusal("a", wider, 11) is not None
    assert quotas.refusal("a", Quotas(), 10**9) is None


def test_clock_that_jumps_back_fills_no_bucket() -> None:
    bucket = Bucket(RATE, 100.0, 50.0)
    bucket.take(100.0)
    assert bucket.level(10.0) == 0.0
    assert bucket.level(51.0) == 10.0


@given(
    steps=st.lists(st.tuples(st.floats(0, 20), st.integers(1, 150)), min_size=1, max_size=60),
    burst=st.integers(1, 120),
)
def test_quota_is_never_exceeded(steps: list[tuple[float, int]], burst: int) -> None:
    """In any span of time, at most the rate's tokens and the burst, or one larger request."""
    quotas, clock = quotas_at(0.0)
    limit = Quotas(tokens_per_s=RATE, burst_tokens=burst)
    admitted: list[tuple[float, int]] = []
    for wait_s, work in steps:
        clock.advance(wait_s)
        if quotas.refusal("a", limit, work) is None:
            quotas.enter("a", limit, work)
            admitted.append((clock.now_s(), work))
    for first in range(len(admitted)):
        total = 0
        for at_s, work in admitted[first:]:
            total += work
            most = max(burst, *(each for _, each in admitted))
            assert total <= RATE * (at_s - admitted[first][0]) + most + 1e-6


def test_idle_tenants_with_full_buckets_are_forgotten() -> None:
    quotas, clock = quotas_at()
    limit = Quotas(tokens_per_s=RATE, burst_tokens=10)
    for number in range(MAX_IDLE + 2):
        quotas.enter(str(number), limit, 5)
        quotas.leave(str(number), was_active=False)
    quotas.enter("here", limit, 5)
    quotas.enter("owes", limit, 500)
    quotas.leave("owes", was_active=False)
    clock.advance(10)
    quotas.forget_idle()
    assert len(quotas._tenants) == 2 and quotas.num_requests("here") == 1
    assert refused_by(quotas.refusal("owes", limit, 1)) is Refusal.TOKENS_PER_S


def a_request(tenant: str = "a", num_tokens: int = 100, max_tokens: int = 1000) -> Request:
    return asked("r", tenant, num_tokens=num_tokens, max_tokens=max_tokens).request


def test_expected_answer_follows_the_answers_of_the_tenant() -> None:
    estimator = WorkEstimator()
    assert estimator.expect(a_request()) == RequestWork(100.0, float(EXPECTED_OUTPUT_TOKENS))
    for _ in range(40):
        estimator.learn_answer("a", 10)
    assert estimator.expect(a_request()).answer == 10.0
    assert estimator.expect(a_request(max_tokens=4)).answer == 4.0
    assert estimator.expect(a_request("b")).answer == EXPECTED_OUTPUT_TOKENS


def test_expected_prompt_follows_the_cache_hits_of_the_tenant() -> None:
    estimator = WorkEstimator()
    for _ in range(40):
        estimator.learn_prompt("a", 25, 100)
    assert estimator.expect(a_request(num_tokens=1000)).prompt == 250.0
    assert estimator.expect(asked("r", attempt=1).request, is_begun=True).prompt == 0.0


def test_estimates_are_bounded_and_the_least_recent_is_forgotten() -> None:
    estimator = WorkEstimator()
    estimator.learn_answer("first", 10)
    for number in range(MAX_TENANTS):
        estimator.learn_answer(str(number), 20)
    assert estimator.expect(a_request(str(MAX_TENANTS - 1))).answer == 20.0
    assert estimator.expect(a_request("first")).answer == EXPECTED_OUTPUT_TOKENS


def test_one_unusual_answer_changes_an_estimate_little() -> None:
    estimator = WorkEstimator()
    for _ in range(100):
        estimator.learn_answer("a", 100)
    estimator.learn_answer("a", 0)
    assert abs(estimator.expect(a_request()).answer - 100 * (1 - LEAST_GAIN)) < 1e-9
