"""The planner's decisions: on slices of the bench's workloads, and on figures that are made."""

from typing import Any, Final

import msgspec
import numpy as np
import pytest

from baton.bench.planner import GOAL, Planned, Workload, made, simulate
from baton.bench.sim.suite import usual_times
from baton.config.engine import EngineSettings, SchedulerConfig
from baton.config.planner import PlannerConfig
from baton.messages.status import StreamCounts, bucket, cell_of
from baton.messages.workers import WorkerRole
from baton.planner.demand import DemandHistory, Stream
from baton.planner.layouts import (
    WEIGHTS,
    Demand,
    LayoutPrediction,
    Outlook,
    QueueModel,
    Room,
    SimRehearser,
)
from baton.planner.planner import Figures, Planner
from baton.sim.rehearsal import Layout
from baton.sim.timed.times import Machine
from baton.tenants import Sla

MACHINE: Final = Machine()
USUAL: Final = Sla(ttft_ms=15_000.0, tpot_ms=50.0)


def workload(hours: float = 0.5, rate: float = 5.0) -> Workload:
    return made("steady", hours, lambda at_s: rate, seed=3)


def planner(sla: Sla = USUAL, machine: Machine = MACHINE, **settings: object) -> Planner:
    given = {"ttft_ms": 15_000.0, "max_workers": 32, **settings}
    config = PlannerConfig(**given)  # type: ignore[arg-type]
    return Planner(config, QueueModel(machine, Room(), sla))


def figures(
    tick: int, ordered: tuple[int, int] = (6, 2), rate: float = 3.0, prompt: int = 16_000, **more: object
) -> Figures:
    """The figures of a steady load after so many ticks of 30 s."""
    layout = Layout(num_prefill=ordered[0], num_decode=ordered[1])
    num = round(rate * 30 * tick)
    ended = {cell_of(prompt, 0, 600): num}
    counts = StreamCounts(arrived={bucket(prompt): num}, ended=ended, num_met=num)
    given = {"counts": {"gateway": {Stream(): counts}}, "num_gateways": 1, "ordered": layout, "ready": layout}
    return Figures(**given | more)  # type: ignore[arg-type]


def warm(
    one: Planner, ordered: tuple[int, int] = (9, 2), prompt: int = 16_000, ticks: int = 12
) -> tuple[int, int]:
    """Let it plan a steady load; return what it has ordered."""
    for tick in range(1, ticks + 1):
        target = one.plan(30.0 * tick, figures(tick, ordered)).target
        ordered = target.num_prefill, target.num_decode
    return ordered


def test_steady_load_is_served_with_few_actions() -> None:
    steady = workload(hours=1.0)
    result = simulate(steady, (11, 3), Planned(steady))
    assert result.attainment >= GOAL
    assert result.worker_h <= 1.25 * 13
    late = [plan for plan in result.plans if plan.at_s > 1800 and plan.outcome == "change"]
    assert len(late) <= 3


def test_load_needs_half_as_many_workers_of_two_stages() -> None:
    staged = msgspec.structs.replace(MACHINE, num_stages=2)
    plain, staged_workers = warm(planner(), ticks=40), warm(planner(machine=staged), ticks=40)
    for of_role, of_role_staged in zip(plain, staged_workers, strict=True):
        assert 0 <= of_role_staged - of_role / 2 < 1.5, (plain, staged_workers)


def prediction(decode: Machine, prefill: Machine | None) -> LayoutPrediction:
    """Return what is predicted of four prefill and two decode workers with three prompts a second."""
    demand = demand_of(3.0, 4000.0, 0.0, 200.0)
    model = QueueModel(decode, Room(), USUAL, prefill)
    return model.rehearse(
        Outlook(demand=demand, factors=(1.0,), weights=(1.0,)), Layout(num_prefill=4, num_decode=2)
    )


def demand_of(rate: float, prompt: float, cached: float, output: float) -> Demand:
    cell = {"rate": rate, "prompt_tokens": prompt, "cached_tokens": cached, "output_tokens": output}
    arrays = {name: np.array([value]) for name, value in cell.items()}
    return Demand(**arrays, stream=np.zeros(1, np.int64), streams=(Stream(),))


def rehearsed(demand: Demand, policy: str = "cost", **settings: Any) -> LayoutPrediction:
    """Rehearse two prefill workers and a decode worker with these settings of the scheduler."""
    engine = EngineSettings(scheduler=SchedulerConfig(**settings))
    times = msgspec.structs.replace(usual_times(), engine=engine)
    sizes = dict.fromkeys(WorkerRole, 1)
    rehearser = SimRehearser(times, Sla(ttft_ms=1000.0, tpot_ms=100.0), sizes, policy)
    found = rehearser.rehearse(
        Outlook(demand=demand, factors=(1.0,) * len(WEIGHTS)), Layout(num_prefill=2, num_decode=1)
    )
    assert found is not None
    return found


def test_rehearsal_attends_to_cached_tokens_and_computes_them_not() -> None:
    cached = rehearsed(demand_of(2.0, 4096.0, 3840.0, 60.0))
    new, short = (rehearsed(demand_of(2.0, prompt, 0.0, 60.0)) for prompt in (4096.0, 256.0))
    assert 1.05 * short.tpot_s < cached.tpot_s < new.tpot_s
    assert 1.05 * short.ttft_s < cached.ttft_s < 0.1 * new.ttft_s
    assert cached.attainment == 1.0


def test_rehearsal_has_the_steps_and_the_policy_of_the_cluster() -> None:
    demand = demand_of(8.0, 1024.0, 960.0, 60.0)
    usual = rehearsed(demand)
    assert rehearsed(demand, max_num_batched_tokens=16).ttft_s > 1.2 * usual.ttft_s
    assert rehearsed(demand, max_num_seqs=1).tpot_s > 1.2 * usual.tpot_s
    assert rehearsed(demand, policy="round-robin").decode_use != usual.decode_use


class MadeRehearser:
    """Predicts a TTFT of 123 s, which is good enough; nothing of a layout that it does not know."""

    def __init__(self, unknown: Layout | None = None) -> None:
        self.unknown = unknown

    def rehearse(self, outlook: Outlook, layout: Layout) -> LayoutPrediction | None:
        if layout == self.unknown:
            return None
        return LayoutPrediction(
            attainment=1.0,
            attainment_low=1.0,
            attainment_high=1.0,
            ttft_s=123.0,
            tpot_s=0.0,
            prefill_use=0.5,
            decode_use=0.5,
        )


@pytest.mark.parametrize("is_known", [True, False])
def test_both_predictions_are_of_one_rehearser(is_known: bool) -> None:
    ordered = Layout(num_prefill=2, num_decode=1)
    one = Planner(
        PlannerConfig(ttft_ms=15_000.0, max_workers=32),
        QueueModel(MACHINE, Room(), USUAL),
        MadeRehearser(None if is_known else ordered),
    )
    for tick in range(1, 20):
        plan = one.plan(30.0 * tick, figures(tick, (2, 1)))
        if plan.outcome == "change":
            break
    assert plan.prediction is not None and plan.counterfactual is not None
    assert (plan.prediction.ttft_s == 123.0) is (plan.counterfactual.ttft_s == 123.0) is is_known


def test_prompts_take_the_times_of_prefill_workers() -> None:
    twice = msgspec.structs.replace(
        MACHINE,
        prefill_s=MACHINE.prefill_s / 2,
        prefill_token_s=MACHINE.prefill_token_s / 2,
        prefill_pair_s=MACHINE.prefill_pair_s / 2,
    )
    plain, unlike = prediction(MACHINE, None), prediction(MACHINE, twice)
    assert unlike.prefill_use == pytest.approx(plain.prefill_use / 2)
    assert unlike.ttft_s < 0.6 * plain.ttft_s
    assert (unlike.decode_use, unlike.tpot_s) == (plain.decode_use, plain.tpot_s)
    staged = prediction(MACHINE, msgspec.structs.replace(MACHINE, num_stages=2))
    assert staged.prefill_use == pytest.approx(plain.prefill_use / 2) and staged.tpot_s == plain.tpot_s


@pytest.mark.slow
def test_growing_load_gets_workers_before_it_misses() -> None:
    ramp = made("ramp", 1.0, lambda at_s: 2.0 + at_s / 1200, seed=1)
    result = simulate(ramp, (6, 2), Planned(ramp))
    assert result.attainment >= 0.97
    assert result.plans[-1].target.num_workers > 10


def test_lost_metrics_hold() -> None:
    one = planner()
    ordered = warm(one, ticks=40)
    for tick in range(41, 61):
        plan = one.plan(30.0 * tick, figures(tick, ordered, counts={}))
        assert (plan.outcome, plan.actions) == ("hold", ())
    plan = one.plan(30.0 * 61, figures(61, ordered))
    assert plan.outcome == "keep"
    assert plan.inputs.rates["all"] == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize(
    "more",
    [{"num_gateways": 2}, {"num_planners": 2}],
    ids=["gateway", "two planners"],
)
def test_figures_that_cannot_be_trusted_hold(more: dict[str, Any]) -> None:
    one = planner()
    ordered = warm(one)
    assert one.plan(400.0, figures(13, ordered, **more)).outcome == "hold"


def test_count_that_falls_holds() -> None:
    one = planner()
    ordered = warm(one)
    plan = one.plan(400.0, figures(5, ordered))
    assert plan.outcome == "hold" and "fell" in plan.reason


def test_operators_change_is_respected_for_a_while() -> None:
    one = planner(manual_hold_s=300.0)
    prefill, decode = warm(one)
    by_hand = prefill + 5, decode
    outcomes = []
    for tick in range(13, 60):
        plan = one.plan(30.0 * tick, figures(tick, by_hand))
        outcomes.append(plan.outcome)
        if plan.outcome == "change":
            break
    assert outcomes[:10] == ["manual"] * 10
    assert outcomes[-1] == "change"
    assert plan.target.num_prefill < by_hand[0]


def test_infeasible_objective_scales_nothing() -> None:
    one = planner(Sla(ttft_ms=500.0, tpot_ms=50.0))
    for tick in range(1, 20):
        plan = one.plan(30.0 * tick, figures(tick, (2, 1)))
    assert plan.outcome == "infeasible"
    assert plan.target.num_workers == 3 and not plan.actions
    assert plan.prediction is not None and plan.prediction.attainment < GOAL


def test_bounds_and_rate_are_kept() -> None:
    one = planner(max_workers=5, max_change=1)
    for tick in range(1, 20):
        plan = one.plan(30.0 * tick, figures(tick, (2, 1)))
        if tick > 4:
            break
    assert plan.outcome == "bounded"
    assert plan.target.num_workers == 4


def test_lost_workers_are_left_to_the_supervisor() -> None:
    one = planner()
    ordered = warm(one, ticks=40)
    for tick in range(41, 45):
        plan = one.plan(30.0 * tick, figures(tick, ordered, ready=Layout(num_prefill=1, num_decode=1)))
        assert plan.target.num_workers == sum(ordered)
        assert not any(action.role for action in plan.actions)


def test_surplus_of_one_role_flips() -> None:
    one = planner()
    for tick in range(1, 20):
        plan = one.plan(30.0 * tick, figures(tick, (2, 14)))
        if plan.actions:
            break
    kinds = [action.kind for action in plan.actions if action.role]
    assert kinds[0] == "flip"


def counts_of(num: int, prompt: int = 16_000, num_missed: int = 0) -> StreamCounts:
    ended = {cell_of(prompt, 0, 600): num}
    met = num - num_missed
    return StreamCounts(arrived={bucket(prompt): num}, ended=ended, num_met=met, num_missed=num_missed)


def test_requests_that_missed_make_the_planner_careful() -> None:
    ordered = {}
    for share in (0.0, 0.05):
        one, ordered[share] = planner(), (9, 2)
        for tick in range(1, 60):
            num = 90 * tick
            counts = counts_of(num, num_missed=round(share * num))
            plan = one.plan(
                30.0 * tick, figures(tick, ordered[share], counts={"gateway": {Stream(): counts}})
            )
            ordered[share] = plan.target.num_prefill, plan.target.num_decode
    assert sum(ordered[0.05]) > sum(ordered[0.0])


def test_more_workers_are_due_to_the_tenant_that_grew() -> None:
    one, ordered, num = planner(), (9, 2), [0, 0]
    for tick in range(1, 40):
        num = [num[0] + 45, num[1] + (45 if tick < 20 else 135)]
        streams = {Stream("acme", "batch"): counts_of(num[0]), Stream("bulk", "batch"): counts_of(num[1])}
        plan = one.plan(30.0 * tick, figures(tick, ordered, counts={"gateway": streams}))
        ordered = plan.target.num_prefill, plan.target.num_decode
        if tick > 20 and plan.causes:
            break
    assert plan.causes["bulk/batch"] > 0.8
    assert sum(plan.causes.values()) == pytest.approx(1.0)


def test_tenant_with_longer_prompts_is_not_outvoted() -> None:
    """It has one of a hundred requests, whose prompts take most of their TTFT to compute."""
    ordered = {}
    for share in (0.0, 0.01):
        one, ordered[share] = planner(Sla(ttft_ms=9000.0, tpot_ms=50.0)), (9, 2)
        for tick in range(1, 13):
            num = 90 * tick
            many = counts_of(num, num_missed=round(0.01 * num))  # as many as may miss
            streams = {Stream("many"): many, Stream("few"): counts_of(round(num * share), 48_000)}
            plan = one.plan(30.0 * tick, figures(tick, ordered[share], counts={"gateway": streams}))
            ordered[share] = plan.target.num_prefill, plan.target.num_decode
    assert plan.prediction is not None and plan.prediction.by_stream["few/"] >= 0.99
    assert ordered[0.01][0] > ordered[0.0][0]


def test_stream_that_pauses_asks_for_no_workers() -> None:
    one, ordered = planner(), (9, 2)
    for tick in range(1, 40):
        nums = 45 * tick, 45 * min(tick, 20)
        streams = {Stream("acme"): counts_of(nums[0]), Stream("bulk"): counts_of(nums[1])}
        plan = one.plan(30.0 * tick, figures(tick, ordered, counts={"gateway": streams}))
        if tick == 21:
            busy = sum(ordered)
        assert plan.outcome != "bounded"
        ordered = plan.target.num_prefill, plan.target.num_decode
    assert 2 < sum(ordered) < busy


@pytest.mark.parametrize("rehearses", [False, True])
def test_load_that_stops_gives_its_workers_back(rehearses: bool) -> None:
    sizes = dict.fromkeys(WorkerRole, 1)
    one = Planner(
        PlannerConfig(ttft_ms=15_000.0, max_workers=32),
        QueueModel(MACHINE, Room(), USUAL),
        SimRehearser(usual_times(), USUAL, sizes, "cost") if rehearses else None,
    )
    ordered, outcomes = (3, 1), []
    for tick in range(1, 40):
        plan = one.plan(30.0 * tick, figures(min(tick, 8), ordered, rate=0.3))
        outcomes.append(plan.outcome)
        ordered = plan.target.num_prefill, plan.target.num_decode
    assert "bounded" not in outcomes
    assert ordered == (1, 1)


@pytest.mark.parametrize(("num_queued", "left"), [(0, (1, 1)), (5, (3, 1))])
def test_requests_that_wait_keep_their_workers_when_no_more_arrive(
    num_queued: int, left: tuple[int, int]
) -> None:
    one, ordered = planner(), (3, 1)
    for tick in range(1, 40):
        num_now = num_queued if tick > 8 else 0
        plan = one.plan(30.0 * tick, figures(min(tick, 8), ordered, rate=0.3, num_queued=num_now))
        ordered = plan.target.num_prefill, plan.target.num_decode
    assert plan.outcome == "keep"
    assert ordered == left


def test_requests_that_wait_keep_their_workers_when_hardly_any_arrive() -> None:
    one, targets = planner(), []
    ordered = warm(one, ticks=40)
    for tick in range(41, 80):  # the forecast is 0 at first, and a little more than that later
        target = one.plan(30.0 * tick, figures(40, ordered, num_queued=50)).target
        ordered = target.num_prefill, target.num_decode
        targets.append(ordered)
    assert set(targets) == {targets[0]}


def test_plan_is_scored_when_its_window_has_passed() -> None:
    one = planner()
    ordered = warm(one)
    plan = one.plan(390.0, figures(13, ordered))
    for tick in range(14, 22):
        scores = one.plan(30.0 * tick, figures(tick, ordered)).scores
        mine = [score for score in scores if score.decision_id == plan.decision_id]
        if mine:
            break
    assert mine[0].is_rate_inside
    assert mine[0].attainment == 1.0


@pytest.mark.slow  # test_lost_metrics_hold needs no load
def test_metrics_lost_for_ten_minutes_under_load() -> None:
    steady = workload(hours=0.8)
    planned = Planned(steady, lost_s=(1200.0, 1800.0))
    result = simulate(steady, (11, 3), planned)
    lost = [plan for plan in result.plans if 1200 <= plan.at_s < 1800]
    assert {plan.outcome for plan in lost} == {"hold"}
    assert result.attainment >= 0.98


def test_counts_at_the_moment_0_of_a_clock_are_those_that_the_next_grow_from() -> None:
    history = DemandHistory(30.0)
    for tick in range(3):
        history.add(30.0 * tick, figures(tick, rate=3.0).counts)
    assert history.num_rows == 2
    assert history.matrix()[1].tolist() == [[3.0, 3.0]]
