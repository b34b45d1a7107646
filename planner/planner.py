"""The planner: decides how many workers of each role a cluster shall have.

Each call of `Planner.plan` is one tick:

1. Missing or contradictory figures: hold. A change that the planner did not order counts as an operator's:
   the planner holds for `manual_hold_s`, then plans from the new layout.
2. The rates of all streams are forecast for now, and for when a worker that is ordered now would serve.
3. Layouts are rehearsed against all quantiles of both forecasts. The cheapest that meets the objectives is
   the target. Where no layout could meet them, however small the load, the outcome is "infeasible", and
   nothing changes.
4. Workers are added at once. They are removed when no tick within the last start-up time needed them: each
   tick counts the workers that would meet stricter objectives, or all workers while more requests wait than
   arrive in a forecast's window. This is the switching cost.
5. The plan has the actions, the fastest first, and two predictions: with the actions and without them. A
   later plan has the score of this one.

Pure: the clock and the figures are arguments.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from baton.config.planner import PlannerConfig
from baton.planner.demand import Contradiction, Counts, DemandHistory, Mix, Stream, predict, without_chance
from baton.planner.layouts import Demand, LayoutPrediction, Outlook, QueueModel, Rehearser
from baton.sim.rehearsal import Layout

FEWEST_ROWS: Final = 4  # intervals before the first forecast
STRICTER: Final = 0.5  # share of the allowed misses that a smaller layout may have
LEAST_RELEASE: Final = 4  # intervals without need of a worker before it may be removed, at least
BUDGET_S: Final = 3600.0  # after which a request counts half in the budget of misses
MEASURED: Final = 100.0  # requests; with fewer there is no budget
# Share of the allowed misses that a plan may expect: with no miss lately, and after too many.
MOST_MISSES, FEWEST_MISSES = 5.0, 0.5
EASING: Final = 0.05  # a fast action must raise the attainment by this much
# Fast actions for the time until added workers serve: kind, argument of `QueueModel.rehearse`, shares to try.
EASINGS: Final = (
    ("local_prefill", "local_share", (0.1, 0.2, 0.4)),
    ("shed", "shed_share", (0.05, 0.1, 0.2, 0.4)),
)
STARTUP_QUANTILE: Final = 0.9
FLIP_S: Final = 2.0
CONFIRMATIONS: Final = 3  # rehearsals of one plan
SPLITS: Final = 3  # numbers of decode workers that are tried: the least that can meet the goal, and more
WINDOW: Final = 2  # intervals; a forecast is their mean
KEPT_PLANS: Final = 512

Outcome: TypeAlias = Literal["hold", "manual", "keep", "change", "bounded", "infeasible"]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """All that the planner learns of a cluster at one tick."""

    counts: Counts  # of the gateways that have reported
    num_gateways: int  # that should report
    ordered: Layout  # the workers that the cluster is told to run
    ready: Layout  # the workers that serve
    startups_s: tuple[float, ...] = ()  # start-ups of workers since the last figures
    num_queued: int = 0  # requests at the routers
    num_planners: int = 1  # processes that plan for this cluster
    num_strangers: int = 0  # workers of another model than the calibrated one


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One change. `delay_s`: until it takes effect."""

    kind: Annotated[str, Meta(max_length=16)]  # "local_prefill", "flip", "add", "remove", "shed"
    delay_s: float
    role: str = ""  # that workers get or leave: prefill or decode
    number: float = 1  # of workers; for "local_prefill" and "shed" the share of requests


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The measured course of the window that a plan predicted."""

    decision_id: str
    rate: float  # requests/s
    is_rate_inside: bool  # within the outer quantiles of the forecast
    attainment: float | None  # None: no request ended
    predicted: float  # attainment


class PlanInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The figures and the forecast that a plan follows from."""

    ordered: Layout
    ready: Layout
    num_queued: int = 0
    startup_s: float = 0.0
    horizon_s: float = 0.0
    method: str = ""  # of the forecast
    rates: Mapping[str, float] = {}  # requests/s at the horizon: of all, and by stream
    quantiles: tuple[float, ...] = ()  # requests/s of all at demand.LEVELS


class ScalingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, as it is written to the log."""

    decision_id: str
    at_s: float
    outcome: Outcome
    reason: str
    target: Layout
    actions: tuple[Action, ...] = ()
    causes: Mapping[str, float] = {}  # when workers are added: each stream's share of the growth of work
    inputs: PlanInputs
    prediction: LayoutPrediction | None = None  # of the target, at the horizon
    counterfactual: LayoutPrediction | None = None  # of the ordered layout, at the horizon
    scores: tuple[Score, ...] = ()  # of earlier plans


class _Pending(NamedTuple):
    """A plan that waits for its score."""

    plan: ScalingPlan
    due_s: float
    num_met: float
    num_missed: float


class Planner:
    """Sizes one cluster."""

    def __init__(self, config: PlannerConfig, model: QueueModel, rehearser: Rehearser | None = None) -> None:
        """model: predicts the layouts of the search. rehearser: confirms the layout that was found; None: the
        model.
        """
        self._config = config
        self._model = model
        self._rehearser = rehearser or model
        self._history = DemandHistory(config.interval_s)
        self._num_plans = 0
        self._ordered: Layout | None = None  # at the last tick; another layout since then is an operator's
        self._manual_until_s = -math.inf
        self._startups_s: deque[float] = deque(maxlen=32)
        self._needs: deque[tuple[float, int, int]] = deque()  # moment, prefill and decode workers needed
        self._pending: deque[_Pending] = deque(maxlen=KEPT_PLANS)
        self._max_workers = config.max_workers
        self._goal = config.attainment  # of this tick, see `_goal_after_misses`
        self._lately = np.zeros(2)  # requests that met and that missed their objectives, faded
        self._seen = np.zeros(2)  # the same, not faded, up to the last tick
        self._possible: Mapping[str, float] = {}  # attainment without load, by stream, of this tick
        self._calm: dict[str, float] = {}  # busy workers by stream, at the last tick that added no workers
        self._known: dict[tuple[int, int], float] = {}  # workers -> attainment, of this tick

    @property
    def startup_s(self) -> float:
        """The expected time until a new worker serves: a high quantile of the latest ones."""
        if not self._startups_s:
            return self._config.startup_s
        return float(np.quantile(np.array(self._startups_s), STARTUP_QUANTILE))

    def plan(self, now_s: float, figures: Figures) -> ScalingPlan:
        """Return the decision of this tick. The caller carries out its actions, or none of them."""
        self._num_plans += 1
        self._startups_s.extend(figures.startups_s)
        if self._max_workers is None:
            self._max_workers = figures.ordered.num_workers
        if reason := self._missing(now_s, figures):
            return self._unchanged(now_s, figures, "hold", reason)
        manual = self._manual(now_s, figures)
        scores = tuple(self._scores(now_s))
        self._goal = self._goal_after_misses()
        mixes = self._mixes()
        if self._history.num_rows < FEWEST_ROWS or not mixes:
            return self._unchanged(now_s, figures, "hold", "too few requests are known", scores)
        now, later = self._outlooks(figures, mixes)
        if not self._is_feasible(later):
            reason = "no layout meets the objectives, not even without load"
            plan = self._unchanged(now_s, figures, "infeasible", reason, scores)
            return self._predicted(plan, later)
        target, reason, outcome = self._target(now_s, figures.ordered, now, later)
        if manual:
            return self._predicted(self._unchanged(now_s, figures, "manual", manual, scores), later)
        confirmed, prediction = self._confirm(target, later)
        if confirmed != target:
            target = confirmed
            outcome, reason = "change", f"{figures.ordered.name} becomes {target.name}, as the rehearsal asks"
        if target == figures.ordered and outcome == "change":
            outcome, reason = "keep", "the rehearsal asks for the present layout"
        self._ordered = target
        plan = ScalingPlan(
            decision_id=self._id(),
            at_s=now_s,
            outcome=outcome,
            reason=reason,
            target=target,
            actions=tuple(self._actions(figures, target, now)),
            causes=self._causes(later, target.num_workers > figures.ordered.num_workers),
            inputs=self._inputs(figures),
            prediction=prediction,
            scores=scores,
        )
        return self._predicted(plan, later)

    def carried_out(self, ordered: Layout) -> None:
        """Note the workers that were ordered after the last plan; they may differ from its target."""
        self._ordered = ordered

    # Figures.

    def _missing(self, now_s: float, figures: Figures) -> str:
        """Return why these figures cannot be trusted; "" when they can."""
        if figures.num_planners > 1:
            return f"{figures.num_planners} processes plan for this cluster"
        if figures.num_strangers:
            return f"{figures.num_strangers} workers have another model than those of planner.times"
        if len(figures.counts) < figures.num_gateways or not figures.counts:
            return f"{len(figures.counts)} of {figures.num_gateways} gateways have reported"
        try:
            self._history.add(now_s, figures.counts)
        except Contradiction as error:
            return str(error)
        return ""

    def _manual(self, now_s: float, figures: Figures) -> str:
        """Return why an operator's change is respected now; "" without one."""
        ordered = figures.ordered
        if self._ordered is not None and ordered != self._ordered:
            self._manual_until_s = now_s + self._config.manual_hold_s
            self._needs.clear()
        self._ordered = ordered
        left_s = self._manual_until_s - now_s
        return f"an operator has scaled: no change for {left_s:.0f} s" if left_s > 0 else ""

    def _mixes(self) -> dict[Stream, Mix]:
        streams, _, _ = self._history.matrix()
        found = ((stream, self._history.mix(stream)) for stream in streams)
        return {stream: mix for stream, mix in found if mix is not None}

    def _outlooks(self, figures: Figures, mixes: Mapping[Stream, Mix]) -> tuple[Outlook, Outlook]:
        """Return the outlook for now, and for the time when a worker that is ordered now would serve."""
        interval_s = self._config.interval_s
        streams, rates, tokens = self._history.matrix()
        outlooks = []
        for wait_s, backlog in ((0.0, float(figures.num_queued)), (self.startup_s, 0.0)):
            horizon = math.ceil(wait_s / interval_s) + WINDOW
            method, medians, _ = predict(rates, horizon, WINDOW, interval_s)
            _, sums, factors = predict(tokens, horizon, WINDOW, interval_s)  # tokens are the work
            means = sums / np.maximum(1e-9, medians)
            grown = {
                stream: mixes[stream].with_prompts(mean)
                for stream, mean in zip(streams, means.tolist(), strict=True)
                if stream in mixes
            }
            demand = Demand.of(dict(zip(streams, medians.tolist(), strict=True)), grown)
            num_requests = demand.total_rate * WINDOW * interval_s
            factors = without_chance(factors, num_requests / demand.spread)
            outlook = Outlook(
                demand=demand,
                factors=tuple(factors.tolist()),
                backlog=backlog,
                method=method,
                horizon_s=horizon * interval_s,
            )
            outlooks.append(outlook)
        return outlooks[0], outlooks[1]

    # The decision.

    def _is_feasible(self, outlook: Outlook) -> bool:
        """Return whether a large cluster would meet the objectives without any load."""
        if not outlook.demand.total_rate:
            return True
        idle = Layout(num_prefill=1, num_decode=1)
        no_load = Outlook(demand=outlook.demand, factors=(1e-6,), weights=(1.0,))
        calm = self._model.rehearse(no_load, idle)
        self._possible = calm.by_stream
        return calm.attainment >= self._config.attainment

    def _goal_after_misses(self) -> float:
        """Return the attainment to plan for: the fewer requests have missed lately, the more may miss now."""
        counts = np.array([self._history.num_met, self._history.num_missed])
        self._lately = self._lately * 0.5 ** (self._config.interval_s / BUDGET_S) + counts - self._seen
        self._seen = counts
        allowed, total = 1 - self._config.attainment, float(self._lately.sum())
        if total < MEASURED:
            return self._config.attainment
        spent = float(self._lately[1]) / total / allowed
        return 1 - allowed * min(MOST_MISSES, max(FEWEST_MISSES, MOST_MISSES - (MOST_MISSES - 1) * spent))

    def _causes(self, outlook: Outlook, is_more: bool) -> dict[str, float]:
        """Return each stream's share of the work that has grown since no more workers were needed."""
        work = self._model.work(outlook.demand)
        if not is_more:
            self._calm = work
            return {}
        grown = {name: value - self._calm.get(name, 0.0) for name, value in work.items()}
        growth = {name: value for name, value in grown.items() if value > 0} or work
        return {name: value / max(sum(growth.values()), 1e-12) for name, value in growth.items()}

    def _target(
        self, now_s: float, ordered: Layout, now: Outlook, later: Outlook
    ) -> tuple[Layout, str, Outcome]:
        """Return the layout to order, why, and the outcome."""
        self._known.clear()
        goal = self._goal
        safe = 1 - STRICTER * (1 - goal)
        needed, is_met = self._cheapest((now, later), goal)
        roomy, _ = self._cheapest((now, later), safe)
        self._needs.append((now_s, roomy.num_prefill, roomy.num_decode))
        # Rehearsals measure the requests that arrive: they say little when more requests wait.
        if now.backlog > now.demand.total_rate * WINDOW * self._config.interval_s:
            self._needs.append((now_s, ordered.num_prefill, ordered.num_decode))
        unneeded_s = max(self.startup_s, LEAST_RELEASE * self._config.interval_s)
        while self._needs[0][0] < now_s - unneeded_s:
            self._needs.popleft()
        held_prefill = max(prefill for _, prefill, _ in self._needs)
        held_decode = max(decode for _, _, decode in self._needs)
        wanted = Layout(
            num_prefill=_between(needed.num_prefill, ordered.num_prefill, held_prefill),
            num_decode=_between(needed.num_decode, ordered.num_decode, held_decode),
        )
        target = self._within_bounds(wanted, ordered)
        if not is_met:
            return target, "the objectives need more workers than are allowed", "bounded"
        if target == ordered:
            return ordered, "the present layout meets the objectives", "keep"
        return (
            target,
            f"{ordered.name} becomes {target.name}, the cheapest that meets the objectives",
            "change",
        )

    def _cheapest(self, outlooks: Sequence[Outlook], goal: float) -> tuple[Layout, bool]:
        """Return the smallest layout that meets the goal in all outlooks; else the best one, and False."""
        config, most = self._config, self._max_workers or 1
        low = config.min_prefill
        decodes = range(config.min_decode, max(config.min_decode, most - low) + 1)
        met = partial(self._met, outlooks)
        least = _least(lambda number: met(most, number), decodes[0], decodes[-1], goal)
        found = []
        for decode in decodes[least - decodes[0] :][:SPLITS]:
            prefill = _least(partial(met, num_decode=decode), low, max(low, most - decode), goal)
            if met(prefill, decode) >= goal:
                found.append(Layout(num_prefill=prefill, num_decode=decode))
        if found:
            return min(found, key=lambda layout: layout.num_workers), True
        decode = max(decodes, key=lambda decode: met(most - decode, decode))
        return Layout(num_prefill=most - decode, num_decode=decode), False

    def _met(self, outlooks: Sequence[Outlook], num_prefill: int, num_decode: int) -> float:
        if (met := self._known.get((num_prefill, num_decode))) is None:
            layout = Layout(num_prefill=num_prefill, num_decode=num_decode)
            met = min(self._attainment(self._model.rehearse(each, layout)) for each in outlooks)
            self._known[num_prefill, num_decode] = met
        return met

    def _attainment(self, prediction: LayoutPrediction) -> float:
        """Return the attainment of all requests or of one stream, whichever is less.

        A stream that misses the objectives even without load counts by what is possible for it.
        """
        possible, goal = self._possible, 1 - STRICTER * (1 - self._config.attainment)
        streams = (
            met / (1.0 if possible.get(name, 1.0) > goal else max(possible[name], 1e-9))
            for name, met in prediction.by_stream.items()
        )
        return min([prediction.attainment, *streams])

    def _confirm(self, target: Layout, later: Outlook) -> tuple[Layout, LayoutPrediction | None]:
        """Rehearse the target; while it misses the goal that the model expects it to meet, add a worker.

        Returns the target with its rehearsal; None: the load leaves the calibrated ranges.
        """
        most, prediction = self._max_workers or 1, None
        for _ in range(CONFIRMATIONS):
            prediction = self._rehearser.rehearse(later, target)
            if prediction is None or prediction.attainment >= self._goal:
                break
            if target.num_workers >= most or self._model.rehearse(later, target).attainment < self._goal:
                break
            prefill, decode = target.num_prefill, target.num_decode
            is_prefill = prediction.prefill_use > prediction.decode_use
            target = Layout(num_prefill=prefill + is_prefill, num_decode=decode + (not is_prefill))
        return target, prediction

    def _within_bounds(self, wanted: Layout, ordered: Layout) -> Layout:
        """Limit the workers that one plan changes. Workers that are added come before those removed."""
        config, left = self._config, self._config.max_change
        num_prefill, num_decode = ordered.num_prefill, ordered.num_decode
        changes = [wanted.num_prefill - num_prefill, wanted.num_decode - num_decode]
        taken = [0, 0]
        for role in sorted((0, 1), key=lambda role: -changes[role]):
            taken[role] = max(-left, min(left, changes[role]))
            left -= abs(taken[role]) if changes[0] * changes[1] > 0 else 0
        num_prefill = max(config.min_prefill, num_prefill + taken[0])
        num_decode = max(config.min_decode, num_decode + taken[1])
        return Layout(num_prefill=num_prefill, num_decode=num_decode)

    def _actions(self, figures: Figures, target: Layout, now: Outlook) -> Iterator[Action]:
        """Yield the actions, the fastest first."""
        ordered = figures.ordered
        changes = {
            "prefill": target.num_prefill - ordered.num_prefill,
            "decode": target.num_decode - ordered.num_decode,
        }
        yield from self._easing(figures, target, now)
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            if changes[role] > 0 > changes[other]:
                number = min(changes[role], -changes[other])
                yield Action(kind="flip", delay_s=FLIP_S, role=role, number=number)
                changes[role] -= number
                changes[other] += number
        for role, change in changes.items():
            if change > 0:
                yield Action(kind="add", delay_s=self.startup_s, role=role, number=change)
        for role, change in changes.items():
            if change < 0:
                yield Action(kind="remove", delay_s=0.0, role=role, number=-change)

    def _easing(self, figures: Figures, target: Layout, now: Outlook) -> Iterator[Action]:
        """Yield the best fast action until added workers serve. Routers take it without an order."""
        ready = figures.ready
        if target.num_workers <= ready.num_workers or not ready.num_decode:
            return

        def reached(**measure: float) -> float:
            return self._model.rehearse(now, ready, **measure).attainment

        least = reached() + EASING
        for kind, name, shares in EASINGS:
            best = max(shares, key=lambda share: reached(**{name: share}))
            if reached(**{name: best}) > least:
                yield Action(kind=kind, delay_s=0.0, number=best)
                return

    # What the plan says.

    def _predicted(self, plan: ScalingPlan, later: Outlook) -> ScalingPlan:
        """Add the predictions, both by the rehearser or both by the model, and remember the plan."""
        target, ordered = plan.target, plan.inputs.ordered
        prediction = other = plan.prediction
        if prediction is not None and target != ordered:
            other = self._rehearser.rehearse(later, ordered)
        if prediction is None or other is None:
            prediction, other = (self._model.rehearse(later, each) for each in (target, ordered))
        plan = msgspec.structs.replace(
            plan, prediction=prediction, counterfactual=other, inputs=_with_outlook(plan.inputs, later)
        )
        history = self._history
        due_s = plan.at_s + later.horizon_s
        self._pending.append(_Pending(plan, due_s, history.num_met, history.num_missed))
        return plan

    def _scores(self, now_s: float) -> Iterator[Score]:
        """Yield the score of each plan after the end of its window."""
        history = self._history
        _, rates, _ = history.matrix()
        while self._pending and self._pending[0].due_s <= now_s:
            plan, _, num_met, num_missed = self._pending.popleft()
            assert plan.prediction is not None
            rate = float(rates[:, -WINDOW:].sum(axis=0).mean())
            met, missed = history.num_met - num_met, history.num_missed - num_missed
            quantiles = plan.inputs.quantiles
            yield Score(
                decision_id=plan.decision_id,
                rate=rate,
                is_rate_inside=bool(quantiles) and quantiles[0] <= rate <= quantiles[-1],
                attainment=met / (met + missed) if met + missed else None,
                predicted=plan.prediction.attainment,
            )

    def _inputs(self, figures: Figures) -> PlanInputs:
        return PlanInputs(
            ordered=figures.ordered,
            ready=figures.ready,
            num_queued=figures.num_queued,
            startup_s=self.startup_s,
        )

    def _unchanged(
        self, now_s: float, figures: Figures, outcome: Outcome, reason: str, scores: tuple[Score, ...] = ()
    ) -> ScalingPlan:
        return ScalingPlan(
            decision_id=self._id(),
            at_s=now_s,
            outcome=outcome,
            reason=reason,
            target=figures.ordered,
            inputs=self._inputs(figures),
            scores=scores,
        )

    def _id(self) -> str:
        return f"plan-{self._num_plans}"


def _with_outlook(inputs: PlanInputs, outlook: Outlook) -> PlanInputs:
    demand, total = outlook.demand, outlook.demand.total_rate
    return msgspec.structs.replace(
        inputs,
        horizon_s=outlook.horizon_s,
        method=outlook.method,
        rates={"all": total, **demand.by_stream(demand.rate)},
        quantiles=tuple(total * factor for factor in outlook.factors),
    )


def _least(met: Callable[[int], float], low: int, high: int, goal: float) -> int:
    """Return the least number in [low, high] with met(number) >= goal; `high` when there is none."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if met(middle) >= goal else (middle + 1, high)
    return low


def _between(needed: int, ordered: int, held: int) -> int:
    """Return `needed` when it is more than `ordered`; else at least `held`, but no more than `ordered`."""
    return needed if needed > ordered else min(ordered, max(needed, held))
