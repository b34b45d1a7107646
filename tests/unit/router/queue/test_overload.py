"""The overload level: pressure, its escalation and recovery, and its effect on requests and workers."""

import math
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.messages.control import Dispatch, Measured, Pressure, Rejected, Routed
from baton.messages.status import OverloadLevel
from baton.messages.workers import StepTimes
from baton.request import Request, SamplingParams, TokenIds
from baton.router.policies.cost_model import CostModel
from baton.router.queue.admission import degraded
from baton.router.queue.objectives import Forecast
from baton.router.queue.overload import (
    CLIMB_S,
    DESCEND_S,
    HIGH,
    LOW,
    OverloadController,
    OverloadManager,
    PressureReading,
)
from baton.router.queue.quotas import RequestWork
from baton.router.queue.tenant_queues import QueuedAttempt, TenantQueues
from baton.tenants import Degradation, Refusal, SchedulingKey, Sla
from tests.node_peers import a_request, id_of
from tests.unit.router.queue_cases import (
    LONG,
    Fleet,
    a_cluster,
    answers,
    asked,
    fill,
    names,
    run_while_filled,
    submit,
    tenant_of,
)
from tests.unit.router.router_cluster import Cluster

TICK_S = 0.5
CALM = PressureReading(has_waiting=False, has_objectives=False, lateness=0.0, pages=0.0, itl=0.0)


def reading(
    lateness: float = 0.0, pages: float = 0.0, itl: float = 0.0, *, waits: bool = True
) -> PressureReading:
    return PressureReading(waits, True, lateness, pages, itl)


def levels(
    controller: OverloadController, read: PressureReading, seconds: float, since_s: float = 0.0
) -> list[OverloadLevel]:
    """The levels that the controller reached, in order."""
    found = []
    for tick in range(math.ceil(seconds / TICK_S)):
        if controller.update(read, since_s + tick * TICK_S):
            found.append(controller.level)
    return found


def test_level_rises_one_by_one_under_pressure() -> None:
    controller = OverloadController(0.0)
    assert levels(controller, reading(lateness=1.0), 10) == list(OverloadLevel)[1:]
    assert controller.escalations == dict.fromkeys(list(OverloadLevel)[1:], 1)


def test_level_falls_one_by_one_without_pressure() -> None:
    controller = OverloadController(0.0)
    levels(controller, reading(lateness=1.0), 10)
    found = levels(controller, CALM._replace(has_objectives=True), 10, since_s=10)
    assert found == [*reversed(list(OverloadLevel)[1:-1]), OverloadLevel.CALM]
    assert DESCEND_S * len(found) < 10


def test_short_peak_raises_the_level_to_queue_only() -> None:
    controller = OverloadController(0.0)
    assert levels(controller, reading(lateness=1.0), CLIMB_S) == [OverloadLevel.QUEUE]
    assert levels(controller, reading(lateness=0.5), 5, since_s=CLIMB_S) == []


def test_level_stays_between_low_and_high_pressure() -> None:
    controller = OverloadController(0.0)
    levels(controller, reading(pages=1.0), 3)
    level = controller.level
    assert level > OverloadLevel.QUEUE
    assert levels(controller, reading(pages=(HIGH + LOW) / 2), 60, since_s=3) == []
    assert controller.level is level


def test_only_lateness_leads_to_shedding() -> None:
    for read in (reading(pages=1.0), reading(itl=2.0)):
        controller = OverloadController(0.0)
        levels(controller, read, 60)
        assert controller.level is OverloadLevel.CLIP


def test_without_objectives_requests_only_wait() -> None:
    controller = OverloadController(0.0)
    levels(controller, reading(lateness=1.0, pages=1.0)._replace(has_objectives=False), 60)
    assert controller.level is OverloadLevel.QUEUE


def test_clock_that_jumps_back_changes_no_level() -> None:
    controller = OverloadController(100.0)
    levels(controller, reading(lateness=1.0), 5, since_s=100)
    level = controller.level
    assert not controller.update(reading(lateness=1.0), 10.0)
    assert controller.level is level
    assert controller.update(reading(lateness=1.0), 10.0 + CLIMB_S)


@given(pressures=st.lists(st.floats(0, 2), max_size=200))
def test_level_changes_by_one_at_most_once_in_its_time(pressures: list[float]) -> None:
    """Except down from SHED, which only lateness leads to."""
    controller, moved_s = OverloadController(0.0), -math.inf
    for tick, pressure in enumerate(pressures):
        before = controller.level
        if controller.update(reading(lateness=pressure), tick * TICK_S):
            is_rise = controller.level > before
            assert abs(controller.level - before) == 1
            if before > OverloadLevel.QUEUE or (is_rise and controller.level > OverloadLevel.QUEUE):
                is_from_shed = before is OverloadLevel.SHED and not is_rise
                assert is_from_shed or tick * TICK_S - moved_s >= min(CLIMB_S, DESCEND_S)
            moved_s = tick * TICK_S


class OverloadCase(Fleet):
    """An overload manager with one decode worker, and the queues that the manager reads."""

    def __init__(self) -> None:
        super().__init__()
        self.queues = TenantQueues()
        self.join("d0", num_pages=100)
        forecast = Forecast(self.clock, self.members, self.in_flight, CostModel())
        self.overload = OverloadManager(self.members, forecast, 100.0)

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

    def lateness(self) -> float:
        return self.reading().lateness

    def reading(self) -> PressureReading:
        return self.overload.read(self.queues, self.clock.now_s())


def test_lateness_is_the_wait_as_a_share_of_the_objective() -> None:
    case = OverloadCase()
    case.wait("r", sla=Sla(ttft_ms=10_000))
    case.clock.advance(5.0)
    case.wait("s", sla=Sla(ttft_ms=10_000))
    assert case.lateness() == pytest.approx(0.5)


def test_request_that_waits_for_its_own_quota_is_not_late() -> None:
    case = OverloadCase()
    case.wait("r", sla=Sla(ttft_ms=1000))
    case.queues.hold("a")
    case.clock.advance(5.0)
    assert case.lateness() == 0.0


def test_cached_pages_are_not_in_use() -> None:
    case = OverloadCase()
    case.beat("d0", active=40, cached=50, leased=5, quarantined=5, free=0)
    reading = case.reading()
    assert reading.pages == 0.5 and not reading.has_waiting and reading.itl == 0.0


def test_objectives_of_ended_requests_do_not_count() -> None:
    case = OverloadCase()
    waiting = case.wait("r", sla=Sla(tpot_ms=50))
    assert case.reading().has_objectives
    case.queues.remove(waiting)
    case.overload.closed(waiting.request)
    assert not case.reading().has_objectives and case.reading().itl == 0.0


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
    request = Request(
        request_id=id_of("r"), token_ids=TokenIds.of((1,)), sampling=sampling, scheduling_key=scheduling_key
    )
    found = degraded(request)
    assert found.sampling == expected and (found is request) == (sampling == expected)


def test_begun_answer_is_not_degraded() -> None:
    scheduling_key = SchedulingKey(degradation=Degradation(clip_max_tokens_to=2))
    request = Request(
        request_id=id_of("r"),
        token_ids=TokenIds.of((1,)),
        generated_token_ids=(5, 6, 7),
        attempt=1,
        sampling=SamplingParams(max_tokens=100),
        scheduling_key=scheduling_key,
    )
    assert degraded(request) is request


# The router under overload.


@pytest.fixture
def c() -> Iterator[Cluster]:
    yield from a_cluster()


def overload(c: Cluster, level: OverloadLevel) -> None:
    """Let hopeless requests raise the level, while the prompts of `fill`, if any, are being computed."""
    manager = c.router.admission_queue.overload
    for _ in range(40):
        if manager.level < level:
            manager.count_hopeless()
            run_while_filled(c, 1)
    assert manager.level is level


def test_answers_are_clipped_where_the_tenant_allows_it(c: Cluster) -> None:
    overload(c, OverloadLevel.CLIP)
    clips = Degradation(clip_max_tokens_to=3)
    submit(c, asked("r", degradation=clips), asked("s"), asked("t", attempt=1, degradation=clips))
    limits = [each.request.sampling.max_tokens for each in c["d0"].take(Dispatch)]
    assert limits == [3, 10, 10]
    assert tenant_of(c, "a").num_degraded == 1


def test_lowest_class_is_shed_for_higher_classes_only(c: Cluster) -> None:
    overload(c, OverloadLevel.SHED)
    assert isinstance(submit(c, asked("only", rank=2))[0], Routed)
    submit(c, asked("high", rank=0))
    must = asked("must", rank=2, degradation=Degradation(may_shed=False))
    shed, kept = submit(c, asked("low", rank=2), must)
    assert isinstance(shed, Rejected) and shed.refusal is Refusal.SHED and shed.retry_after_s > 0
    assert isinstance(kept, Routed)


def test_waiting_requests_of_the_lowest_class_are_shed(c: Cluster) -> None:
    fill(c, rank=0, sla=Sla(ttft_ms=60_000))
    may_not = Degradation(may_shed=False)
    submit(
        c,
        asked("high", num_tokens=LONG, sla=Sla(ttft_ms=60_000)),
        *(asked(name, "b", num_tokens=LONG, rank=2) for name in ("low", "lower")),
        asked("must", "b", num_tokens=LONG, rank=2, degradation=may_not),
        asked("begun", "b", num_tokens=LONG, rank=2, attempt=1),
    )
    overload(c, OverloadLevel.SHED)
    refused = answers(c)
    assert names(refused) == ["low", "lower"]
    kinds = {(each.refusal, each.retry_after_s > 0) for each in refused if isinstance(each, Rejected)}
    assert kinds == {(Refusal.SHED, True)} and len(c.router.admission_queue) == 3
    assert tenant_of(c, "b").refused == {Refusal.SHED: 2}


def test_workers_hear_the_levels_that_change_their_work(c: Cluster) -> None:
    overload(c, OverloadLevel.CLIP)
    rising = list(OverloadLevel)[OverloadLevel.SMALL_CHUNKS : OverloadLevel.CLIP + 1]
    assert [each.level for each in c["d0"].take(Pressure)] == rising
    assert c.add("d1").only(Pressure).level is OverloadLevel.CLIP
    run_while_filled(c, 20)
    assert [each.level for each in c["d0"].take(Pressure)][-1] is OverloadLevel.CALM


def test_short_prompt_is_computed_locally_under_pressure_though_slots_are_taken(c: Cluster) -> None:
    fill(c)
    overload(c, OverloadLevel.SMALL_CHUNKS)
    (routed,) = submit(c, asked("r", num_tokens=200))
    assert isinstance(routed, Routed) and routed.prefill == ""


@pytest.mark.parametrize("policy", ["least-loaded", "cost"])
def test_all_short_prompts_are_computed_locally_under_pressure(policy: str) -> None:
    c = next(a_cluster(policy=policy))
    overload(c, OverloadLevel.LOCAL_PREFILL)
    routed = submit(c, *(asked(f"r{n}", num_tokens=200) for n in range(20)))
    assert [each.prefill for each in routed if isinstance(each, Routed)] == [""] * 20
    probe = c.submit(a_request("probe", is_probe=True))
    assert isinstance(probe, Routed) and probe.prefill == id_of("p0"), "probes test prefill workers"


@pytest.mark.parametrize(
    ("is_unpromised", "level"), [(True, OverloadLevel.QUEUE), (False, OverloadLevel.CLIP)]
)
def test_unpromised_objective_raises_no_level(c: Cluster, is_unpromised: bool, level: OverloadLevel) -> None:
    steps = tuple(StepTimes(number, 0, 100 * number, 0.01) for number in range(1, 33))
    c["d0"].say(Measured(steps=steps))
    fill(c)
    rights = Degradation(may_shed=False)
    wish = asked("w", sla=Sla(tpot_ms=0.001), degradation=rights, has_unpromised_sla=is_unpromised)
    submit(c, wish, asked("x"))
    run_while_filled(c, 60, "w", "x")
    assert c.router.admission_queue.overload.level is level
    escalations = c.router.status().routers[0].queue.escalations
    assert list(escalations) == [each.name.lower() for each in list(OverloadLevel)[1 : level + 1]]


@pytest.mark.parametrize("age_s", [0.0, 600.0])
def test_repeated_attempt_is_not_late_at_once(c: Cluster, age_s: float) -> None:
    fill(c)
    again = asked("again", num_tokens=LONG, attempt=1, sla=Sla(ttft_ms=60_000))
    assert submit(c, msgspec.structs.replace(again, age_s=age_s)) == []
    run_while_filled(c, 12)
    assert c.router.admission_queue.overload.level is OverloadLevel.QUEUE
