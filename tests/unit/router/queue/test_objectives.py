"""Objectives of requests, and the forecast that checks them."""

import pytest

from baton.messages.control import Measured
from baton.messages.workers import PrefillTimes, StepTimes
from baton.request import Request
from baton.router.in_flight import InFlightAttempt, NewPrompt, SchedulingClass, scheduling_class_of
from baton.router.policies.cost_model import CostModel
from baton.router.queue.objectives import (
    HEADROOM,
    KNOWN,
    MOST_RETRY_S,
    PROMISED_S,
    TRIAL_S,
    Forecast,
    ObjectiveChecker,
    Prediction,
    objective_of,
)
from baton.router.queue.quotas import RequestWork
from baton.tenants import Degradation, Refusal, Sla
from tests.node_peers import id_of
from tests.unit.router.queue_cases import Fleet, asked

TOKEN_S = 1e-3  # of a prompt
WORK = RequestWork(100.0, 10.0)
SOON = Prediction(ttft_s=0.1, tpot_s=0.01, queue_s=0.05, alone_s=0.05, alone_tpot_s=0.005)


class MeasuredWorkers(Fleet):
    """Two prefill workers and a decode worker whose times are known."""

    def __init__(self) -> None:
        super().__init__()
        self.model = CostModel()
        for name in ("p0", "p1", "d0"):
            self.join(name, max_num_seqs=64, num_pages=4096)
        self.forecast = Forecast(self.clock, self.members, self.in_flight, self.model)
        self.admission = ObjectiveChecker(self.clock, self.forecast)

    def teach(self, num: int = 64) -> "MeasuredWorkers":
        for number in range(num):
            size = 50 + 37 * (number % 20)
            prefill = PrefillTimes(id_of("r"), 0, 0.0, TOKEN_S * size, size, size)
            for name in ("p0", "p1"):
                self.model.learn(id_of(name), Measured(prefills=(prefill,)))
            running = 1 + number % 16
            step = StepTimes(running, 0, running * 100, 0.01 + 0.001 * running)
            self.model.learn(id_of("d0"), Measured(steps=(step,)))
        return self

    def enter(self, name: str, prefill: str, num_tokens: int, tenant: str = "") -> None:
        entry = InFlightAttempt(
            "g",
            id_of("d0"),
            id_of(prefill),
            num_tokens,
            num_tokens,
            TOKEN_S * num_tokens,
            SchedulingClass(tenant),
        )
        self.in_flight.enter((id_of(name), 0), entry)

    def predict(self, num_tokens: int = 100, before: float = 0.0, tenant: str = "") -> Prediction:
        self.clock.advance(1.0)  # what was known of the workers is out of date
        prompt = NewPrompt(SchedulingClass(tenant), num_tokens)
        return self.forecast.predict(prompt, 10.0, before, before / 100)


def request(sla: Sla | None = None, **fields: object) -> Request:
    return asked("r", sla=sla, **fields).request  # type: ignore[arg-type]


def test_forecast_follows_the_measured_prompts() -> None:
    found = MeasuredWorkers().teach().predict(500)
    assert found.ttft_s == found.alone_s == pytest.approx(0.5, rel=0.15)
    assert found.queue_s == 0.0
    assert found.tpot_s == pytest.approx(0.011, rel=0.15)


def test_unmeasured_work_takes_no_time() -> None:
    assert MeasuredWorkers().teach(KNOWN - 1).predict(10**6).ttft_s == 0.0
    assert MeasuredWorkers().teach(KNOWN - 1).predict().tpot_s == 0.0


def test_wait_is_that_of_the_worker_with_the_least_work() -> None:
    fleet = MeasuredWorkers().teach()
    fleet.enter("a", "p0", 1000)
    fleet.enter("b", "p0", 1000)
    assert fleet.predict().ttft_s == pytest.approx(0.1, rel=0.2)
    fleet.enter("c", "p1", 500)
    fleet.enter("d", "p1", 500)
    assert fleet.predict().ttft_s > 0.5


def test_prompts_of_another_tenant_count_up_to_its_share() -> None:
    fleet = MeasuredWorkers().teach()
    for name, prefill in (("a", "p0"), ("b", "p0"), ("c", "p1"), ("d", "p1")):
        fleet.enter(name, prefill, 1000, tenant="noisy")
    assert fleet.predict(100, tenant="noisy").ttft_s > 1.0
    assert fleet.predict(100, tenant="quiet").ttft_s < 0.25


def test_queued_work_leaves_at_the_measured_rate() -> None:
    fleet = MeasuredWorkers().teach()
    fleet.forecast.rate.observe(100.0, 0.0, is_busy=True)
    fleet.forecast.rate.observe(105.0, 5000.0, is_busy=True)
    assert fleet.predict(before=3000.0).queue_s == pytest.approx(3.0, rel=0.01)


def test_queued_work_leaves_at_the_workers_speeds_until_a_rate_is_known() -> None:
    assert MeasuredWorkers().teach().predict(100, before=2000.0).queue_s == pytest.approx(1.0, rel=0.2)


def test_forecast_batch_is_that_of_the_first_token() -> None:
    """Present requests have ended by then; requests before it in the queue have joined."""
    fleet = MeasuredWorkers().teach()
    for number in range(32):
        fleet.enter(f"r{number}", "p0", 10)
        fleet.in_flight.started((id_of(f"r{number}"), 0))
    full = fleet.predict(1)
    later = fleet.predict(5000)
    assert full.tpot_s > 0.035 and later.tpot_s < 0.015
    assert fleet.predict(5000, before=3200.0).tpot_s > later.tpot_s + 0.01


OBJECTIVES = [
    (Sla(ttft_ms=1000), Prediction(2.0, 0.01, 1.9, 0.1, 0.01), Refusal.SLO),
    (Sla(ttft_ms=3000), Prediction(2.0, 0.01, 1.9, 0.1, 0.01), None),
    (Sla(ttft_ms=2000 / HEADROOM + 1), Prediction(2.0, 0.01, 1.9, 0.1, 0.01), None),
    (Sla(tpot_ms=20), Prediction(0.1, 0.03, 0.1, 0.1, 0.01), Refusal.SLO),
    (Sla(deadline_ms=1000), Prediction(2.0, 0.01, 1.9, 0.1, 0.01), Refusal.DEADLINE),
    (Sla(), Prediction(1e6, 1e6, 1e6, 1e6, 1e6), None),
]


@pytest.mark.parametrize(("sla", "found", "expected"), OBJECTIVES)
def test_request_is_refused_for_the_objective_that_it_would_miss(
    sla: Sla, found: Prediction, expected: Refusal | None
) -> None:
    refused = MeasuredWorkers().admission.refusal(request(sla), WORK, 0.0, found)
    assert (refused and refused.refusal) == expected
    if refused is not None:
        assert 0 < refused.retry_after_s <= MOST_RETRY_S


def test_request_that_may_not_be_shed_is_never_refused() -> None:
    admission, late = MeasuredWorkers().admission, SOON._replace(ttft_s=99.0)
    sla = Sla(ttft_ms=1000)
    assert admission.refusal(request(sla, degradation=Degradation(may_shed=False)), WORK, 0.0, late) is None


def test_objective_that_idle_workers_would_miss_is_tried_now_and_then() -> None:
    fleet = MeasuredWorkers()
    hopeless = Prediction(ttft_s=5.0, tpot_s=0.01, queue_s=0.0, alone_s=5.0, alone_tpot_s=0.01)
    first, second = (asked(name, sla=Sla(ttft_ms=1000)).request for name in ("first", "second"))
    assert fleet.admission.refusal(first, WORK, 0.0, hopeless) is None
    refused = fleet.admission.refusal(second, WORK, 0.0, hopeless)
    assert refused is not None and not refused.should_retry
    assert fleet.admission.refusal(first, WORK, 0.2, hopeless) is None, "it is on trial at its turn too"
    fleet.clock.advance(TRIAL_S)
    assert fleet.admission.refusal(second, WORK, 0.0, hopeless) is None


def test_refused_clients_return_one_after_the_other() -> None:
    fleet = MeasuredWorkers()
    fleet.forecast.rate.observe(100.0, 0.0, is_busy=True)
    fleet.forecast.rate.observe(102.0, 2000.0, is_busy=True)  # 1000 a second, of which a quarter is kept
    times = [fleet.admission.invite(Refusal.SLO, "", 250.0, 2.0) for _ in range(100)]
    returning = [each.retry_after_s for each in times if each.should_retry]
    assert returning == pytest.approx([2.0 + number for number in range(len(returning))])
    assert PROMISED_S - 2 <= len(returning) <= PROMISED_S
    others = [each.retry_after_s for each in times if not each.should_retry]
    assert min(others) >= PROMISED_S and max(others) <= MOST_RETRY_S
    assert len({round(each) for each in others}) > 30  # they do not come all at once either


def test_objectives_are_those_of_the_request() -> None:
    found = objective_of(request(Sla(ttft_ms=500, deadline_ms=200), max_queue_delay_ms=50.0))
    assert (found.ttft_s, found.deadline_s, found.delay_s, found.due_s) == (0.5, 0.2, 0.05, 0.2)
    assert objective_of(request(max_queue_delay_ms=50.0)).due_s == 0.05
    assert not objective_of(request()).is_promised
    assert scheduling_class_of(request()).tenant == "a"
