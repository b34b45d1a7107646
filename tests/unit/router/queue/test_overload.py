"""What is read of the cluster's strain, and what is done about it."""

import pytest

from baton.clock import ManualClock
from baton.messages.control import Heartbeat
from baton.messages.status import OverloadLevel
from baton.messages.workers import Load
from baton.request import Request, SamplingParams
from baton.router.in_flight import InFlight
from baton.router.membership import Membership
from baton.router.policies.cost_model import CostModel
from baton.router.queue.admission import degraded
from baton.router.queue.objectives import Forecast
from baton.router.queue.overload import OverloadManager, PressureReading
from baton.router.queue.quotas import RequestWork
from baton.router.queue.tenant_queues import QueuedAttempt, TenantQueues
from baton.tenants import Degradation, SchedulingKey, Sla
from tests.node_peers import TestPeer, a_worker, id_of
from tests.unit.router.queue_cases import asked
from tests.unit.router.router_cluster import cluster


class Site:
    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.members = Membership(self.clock)
        self.queues = TenantQueues()
        self.forecast = Forecast(self.clock, self.members, InFlight(self.clock), CostModel())
        worker = a_worker("d0", num_pages=100)
        peer = TestPeer.worker(cluster().router, worker)
        self.members.join(worker, peer)
        self.overload = OverloadManager(self.members, self.forecast, 100.0)

    def wait(
        self, name: str, tenant: str = "a", *, due_in_s: float = 10.0, sla: Sla | None = None
    ) -> QueuedAttempt:
        submit = asked(name, tenant, sla=sla)
        now_s = self.clock.now_s()
        waiting = QueuedAttempt(
            id_of("g"), submit, since_s=now_s, due_s=now_s + due_in_s, work=RequestWork(0.0, 1.0)
        )
        self.queues.add(waiting)
        self.overload.opened(submit.request)
        return waiting

    def beat(self, **pages: int) -> None:
        member = self.members.get(id_of("d0"))
        assert member is not None
        self.members.beat(member, Heartbeat(load=Load(pages=pages)))

    def lateness(self) -> float:
        return self.reading().lateness

    def reading(self) -> PressureReading:
        return self.overload.read(self.queues, self.clock.now_s())


def test_lateness_is_the_wait_by_what_may_be_waited() -> None:
    site = Site()
    site.wait("r", sla=Sla(ttft_ms=10_000))
    site.clock.advance(5.0)
    site.wait("s", sla=Sla(ttft_ms=10_000))
    assert site.lateness() == pytest.approx(0.5)


def test_what_was_promised_nothing_is_never_late() -> None:
    site = Site()
    site.wait("r")
    site.clock.advance(1000.0)
    assert site.lateness() == 0.0
    assert not site.reading().has_objectives


def test_who_waits_for_its_own_quota_strains_nobody() -> None:
    site = Site()
    site.wait("r", sla=Sla(ttft_ms=1000))
    site.queues.hold("a")
    site.clock.advance(5.0)
    assert site.lateness() == 0.0


def test_pages_in_use_are_those_that_nobody_else_may_have() -> None:
    site = Site()
    site.beat(active=40, cached=50, leased=5, quarantined=5, free=0)
    reading = site.reading()
    assert reading.pages == 0.5 and not reading.has_waiting and reading.itl == 0.0


def test_objectives_of_requests_that_ended_count_no_more() -> None:
    site = Site()
    waiting = site.wait("r", sla=Sla(tpot_ms=50))
    assert site.reading().has_objectives
    site.queues.remove(waiting.key)
    site.overload.closed(waiting.request)
    assert not site.reading().has_objectives and site.reading().itl == 0.0


def test_hopeless_requests_climb_the_ladder_and_it_is_climbed_down_without() -> None:
    site = Site()
    overload = site.overload
    levels = []
    for tick in range(60):
        if tick < 30:
            overload.count_hopeless()
        site.clock.advance(0.5)
        overload.update(site.queues, site.clock.now_s())
        levels.append(overload.level)
    assert max(levels) is OverloadLevel.SHED and levels[-1] is OverloadLevel.CALM
    assert levels.index(OverloadLevel.SHED) < 16 and levels[30 + 20] is OverloadLevel.CALM


RIGHTS = [
    (Degradation(), SamplingParams(max_tokens=100, logprobs=20), SamplingParams(max_tokens=100, logprobs=20)),
    (Degradation(clip_max_tokens_to=10), SamplingParams(max_tokens=100), SamplingParams(max_tokens=10)),
    (Degradation(clip_max_tokens_to=10), SamplingParams(max_tokens=None), SamplingParams(max_tokens=10)),
    (Degradation(clip_max_tokens_to=10), SamplingParams(max_tokens=5), SamplingParams(max_tokens=5)),
    (
        Degradation(clip_max_tokens_to=10),
        SamplingParams(max_tokens=100, min_tokens=50),
        SamplingParams(max_tokens=10, min_tokens=10),
    ),
    (
        Degradation(may_reduce_logprobs=True),
        SamplingParams(max_tokens=100, logprobs=20, prompt_logprobs=0),
        SamplingParams(max_tokens=100, logprobs=1, prompt_logprobs=0),
    ),
]


@pytest.mark.parametrize(("rights", "sampling", "expected"), RIGHTS)
def test_requests_are_degraded_as_far_as_their_tenant_allows(
    rights: Degradation, sampling: SamplingParams, expected: SamplingParams
) -> None:
    scheduling_key = SchedulingKey(degradation=rights)
    request = Request(request_id=id_of("r"), token_ids=(1,), sampling=sampling, scheduling_key=scheduling_key)
    found = degraded(request)
    assert found.sampling == expected and (found is request) == (sampling == expected)


def test_answer_that_has_begun_goes_on_as_it_began() -> None:
    scheduling_key = SchedulingKey(degradation=Degradation(clip_max_tokens_to=2))
    request = Request(
        request_id=id_of("r"),
        token_ids=(1,),
        generated_token_ids=(5, 6, 7),
        attempt=1,
        sampling=SamplingParams(max_tokens=100),
        scheduling_key=scheduling_key,
    )
    assert degraded(request) is request
