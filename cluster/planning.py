"""The planner of one `baton serve`: gathers figures, asks for a plan, writes the plan down, acts.

Each tick is one line of JSON in the log, which `baton explain plan` shows. With `advise` the plans are only
written. With `apply` the workers that a plan orders are ordered from the cluster.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import msgspec

from baton.clock import Clock
from baton.config.cluster import ServeConfig
from baton.config.environment import cache_directory
from baton.errors import BatonError, ConfigError, reason_of
from baton.messages.bounds import MAX_REASON_CHARS, MAX_SECONDS
from baton.messages.operations import MAX_PLANS, PlanSummary, Status
from baton.messages.workers import WorkerRole
from baton.planner.demand import Stream
from baton.planner.layouts import QueueModel, Room, SimRehearser, linear
from baton.planner.planner import Action, Figures, Planner, ScalingPlan, Score
from baton.sim.rehearsal import Layout
from baton.sim.timed.times import FittedTimes, TimeModel
from baton.tenants import Sla

MAX_LOG_BYTES: Final = 2**26  # then the log begins anew, and the former one stays beside it

logger = logging.getLogger(__name__)


class Workers(Protocol):
    """The workers of a cluster, as its supervisor keeps them."""

    def ordered(self) -> dict[WorkerRole, list[str]]:
        """Return the names of the workers that are to run, by role."""
        ...

    def startups(self) -> tuple[float, ...]:
        """Return the seconds of all start-ups since the last call."""
        ...

    def flipped(self, name: str, role: WorkerRole) -> None:
        """Note that a worker takes another role."""
        ...

    async def scale(self, num_prefill: int, num_decode: int) -> None:
        """Start missing workers, and drain those that are too many."""
        ...


class Routers(Protocol):
    """The routers of a cluster, as an operator asks them."""

    async def status_or_none(self) -> Status | None:
        """Return the joined status of all routers that answer; None when none does."""
        ...

    async def flip(self, worker: str, role: WorkerRole) -> None:
        """Have a worker take another role."""
        ...

    def tell(self, *, plans: tuple[PlanSummary, ...]) -> None:
        """Tell all routers the latest plans, the latest first."""
        ...


def log_path(setting: str | None, port: int) -> Path:
    """Return the file of the plans of the cluster with its API at `port`."""
    return Path(setting) if setting is not None else cache_directory() / "plans" / f"plans-{port}.jsonl"


def _write_plan(path: Path, plan: ScalingPlan) -> None:
    """Append a plan to the log. One that cannot be written is carried out all the same."""
    try:
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_suffix(".old.jsonl"))
        with path.open("ab") as file:
            file.write(msgspec.json.encode(plan) + b"\n")
    except OSError as error:
        logger.warning("a plan cannot be written to %s: %s", path, reason_of(error))


def read_plans(path: Path, number: int) -> list[ScalingPlan]:
    """Return the latest plans of a log, the latest last. ConfigError: there is no such log."""
    try:
        lines = path.read_bytes().splitlines()[-number:]
        return [msgspec.json.decode(line, type=ScalingPlan) for line in lines]
    except FileNotFoundError:
        raise ConfigError(
            f"there are no plans in {path}: does `baton serve` run with --planner advise or apply?"
        ) from None
    except OSError as error:
        raise ConfigError(f"the log of plans {path} cannot be read: {reason_of(error)}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no log of plans: {error}") from error


def _calibrated_sizes(config: ServeConfig, times: TimeModel) -> dict[WorkerRole, int]:
    """Return the tensor parallel size of each role's workers.

    Raises ConfigError when such workers were not calibrated.
    """
    sizes = {}
    for role, pool in config.pools.items():
        settings = pool.engine(config.engine)
        size, num_stages = settings.tensor_parallel_size, settings.pipeline_parallel_size
        calibrated = FittedTimes(times, size).num_stages
        if calibrated != num_stages:
            raise ConfigError(
                f"planner.times: {role} workers have {num_stages} pipeline stages, the calibrated ones have "
                f"{calibrated}; calibrate with the options of the cluster"
            )
        sizes[role] = size
    return sizes


def _check_settings(config: ServeConfig, times: TimeModel) -> None:
    """Raise ConfigError when the calibrated workers compute in other types than the cluster's."""
    ours, theirs = (
        (each.dtype, each.quantization, each.cache.kv_cache_dtype) for each in (config.engine, times.engine)
    )
    if ours != theirs:
        raise ConfigError(
            f"planner.times: dtype, quantization and kv_cache_dtype of the calibrated workers are {theirs}, "
            f"of the cluster's {ours}; calibrate with the options of the cluster"
        )


class Planning:
    """The ticks of one planner."""

    def __init__(
        self,
        config: ServeConfig,
        clock: Clock,
        workers: Workers,
        log: Path,
    ) -> None:
        """Raises ConfigError for the file of times, or for a log without a folder."""
        settings = config.planner
        assert settings.times is not None, "PlannerConfig has checked that"
        times = TimeModel.read(Path(settings.times))
        _check_settings(config, times)
        times = msgspec.structs.replace(times, engine=config.engine)  # its workers are those to rehearse
        self._fingerprint = times.fingerprint
        sla = Sla(ttft_ms=settings.ttft_ms, tpot_ms=settings.tpot_ms)
        sizes = _calibrated_sizes(config, times)
        size = sizes[WorkerRole.DECODE]
        room = Room(
            num_seqs=config.engine.scheduler.max_num_seqs,
            num_tokens=times.replicas[size].num_pages * times.page_size,
        )
        machines = {role: linear(FittedTimes(times, each)) for role, each in sizes.items()}
        model = QueueModel(machines[WorkerRole.DECODE], room, sla, prefill=machines[WorkerRole.PREFILL])
        rehearser = SimRehearser(times, sla, sizes, config.router.policy)
        self._planner = Planner(settings, model, rehearser)
        self._settings = settings
        self._num_gateways = config.gateways
        self._clock = clock
        self._workers = workers
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"planner.log: {log.parent} cannot be made: {reason_of(error)}") from None
        self._log = log
        self._latest: deque[ScalingPlan] = deque(maxlen=MAX_PLANS)  # the latest first
        self._came: deque[Score] = deque(maxlen=2 * MAX_PLANS)

    async def keep_planning(self, routers: Routers) -> None:
        """Plan every `interval_s` seconds until cancelled."""
        while True:
            await asyncio.sleep(self._settings.interval_s)
            try:
                await self.tick(routers)
            except Exception:  # of the runtime, which carries out the plan: the planner goes on
                logger.exception("the planner has failed, and goes on")

    async def tick(self, routers: Routers) -> ScalingPlan:
        """Make one plan, write it, and act on it."""
        figures = await self._figures(routers)
        plan = await asyncio.to_thread(self._planner.plan, self._clock.now_s(), figures)
        _write_plan(self._log, plan)
        self._latest.appendleft(plan)
        self._came.extend(plan.scores)
        routers.tell(plans=tuple(self._summaries()))
        if plan.target.name == figures.ordered.name:
            return plan
        logger.warning("planner, %s: %s", plan.decision_id, plan.reason)
        try:
            if self._settings.mode == "apply":
                await self._apply(plan, routers)
        except (BatonError, TimeoutError) as error:  # such as no room for a worker
            logger.error("planner, %s: cannot be carried out: %s", plan.decision_id, error)
        finally:
            self._planner.carried_out(self._layout())
        return plan

    def _summaries(self) -> Iterator[PlanSummary]:
        came = {score.decision_id: score.attainment for score in self._came}
        for plan in self._latest:
            yield PlanSummary(
                id=plan.decision_id,
                before_s=min(self._latest[0].at_s - plan.at_s, MAX_SECONDS),
                outcome=plan.outcome,
                workers=plan.target.name,
                actions=", ".join(map(_in_words, plan.actions)),
                reason=plan.reason[:MAX_REASON_CHARS],
                predicted=None if plan.prediction is None else min(1.0, plan.prediction.attainment),
                came=came.get(plan.decision_id),
            )

    async def _apply(self, plan: ScalingPlan, routers: Routers) -> None:
        """Flip workers, then add and remove the others."""
        ordered = self._workers.ordered()
        for action in plan.actions:
            if action.kind == "flip":
                role = WorkerRole(action.role)
                others = ordered[WorkerRole.DECODE if role is WorkerRole.PREFILL else WorkerRole.PREFILL]
                for name in others[-int(action.number) :]:
                    await routers.flip(name, role)
                    self._workers.flipped(name, role)
        await self._workers.scale(plan.target.num_prefill, plan.target.num_decode)

    def _layout(self) -> Layout:
        ordered = self._workers.ordered()
        return Layout(
            num_prefill=len(ordered[WorkerRole.PREFILL]), num_decode=len(ordered[WorkerRole.DECODE])
        )

    async def _figures(self, routers: Routers) -> Figures:
        status = await routers.status_or_none() or Status()
        serving = [each.worker.role for each in status.workers if not each.is_draining]
        return Figures(
            counts={
                gateway.id: {Stream(each.tenant, each.priority): each for each in gateway.demand}
                for gateway in status.gateways
            },
            num_gateways=self._num_gateways,
            ordered=self._layout(),
            ready=Layout(
                num_prefill=serving.count(WorkerRole.PREFILL), num_decode=serving.count(WorkerRole.DECODE)
            ),
            startups_s=self._workers.startups(),
            num_queued=status.queue.num_queued,
            num_planners=max(1, status.num_watchers),
            num_strangers=sum(each.worker.fingerprint != self._fingerprint for each in status.workers),
        )


def _in_words(action: Action) -> str:
    number = f"{action.number:.0%}" if action.number < 1 else f"{action.number:g}"
    return " ".join(filter(None, (action.kind.replace("_", " "), number, action.role)))
