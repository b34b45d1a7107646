"""The planner of one `baton serve`: gathers figures, asks for a plan, writes the plan down, acts.

Each tick is one line of JSON in the log, which `baton explain plan` shows. With `advise` the plans are only
written. With `apply` the workers that a plan orders are ordered from the cluster.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from baton.clock import Clock
from baton.config.cluster import ServeConfig
from baton.config.environment import cache_directory
from baton.errors import PeerGone
from baton.messages.operations import Status
from baton.messages.status import StreamCounts
from baton.messages.workers import WorkerRole
from baton.planner.demand import Stream
from baton.planner.layouts import Objectives, ProductionRehearser, QueueModel, Room, linear
from baton.planner.planner import Figures, Plan, Planner
from baton.sim.rehearsal import Layout
from baton.sim.times import FittedTimes, TimeModel, Validity

MAX_LOG_BYTES: Final = 2**26  # then the log begins anew, and the former one stays beside it

logger = logging.getLogger(__name__)


class Ordered(NamedTuple):
    """The workers that the cluster is told to run, and the start-ups that have ended."""

    layout: Layout
    startups_s: tuple[float, ...]  # since the last call


class PlanLog:
    """The file of plans."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, plan: Plan) -> None:
        """Append one plan."""
        if self.path.exists() and self.path.stat().st_size > MAX_LOG_BYTES:
            self.path.replace(self.path.with_suffix(".old.jsonl"))
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(plan) + b"\n")


def log_path(setting: str | None, port: int) -> Path:
    """Return the file of the plans of the cluster with its API at `port`."""
    return Path(setting) if setting is not None else cache_directory() / "plans" / f"plans-{port}.jsonl"


class Planning:
    """The ticks of one planner."""

    def __init__(
        self,
        config: ServeConfig,
        clock: Clock,
        status: Callable[[], Awaitable[Status]],
        ordered: Callable[[], Ordered],
        scale: Callable[[int, int], Awaitable[None]] | None,
        log: PlanLog,
    ) -> None:
        """status: of all routers. scale: orders workers; None: plans are only written.

        Raises ConfigError for the file of times.
        """
        settings = config.planner
        assert settings.times is not None, "PlannerConfig checks"
        times = TimeModel.read(Path(settings.times))
        objectives = Objectives(
            ttft_s=math.inf if settings.ttft_ms is None else settings.ttft_ms / 1e3,
            tpot_s=math.inf if settings.tpot_ms is None else settings.tpot_ms / 1e3,
            attainment=settings.attainment,
        )
        size = config.decode.engine(config.engine).tensor_parallel_size
        replica = times.replicas.get(size) or next(iter(times.replicas.values()))
        room = Room(
            num_seqs=config.engine.scheduler.max_num_seqs, num_tokens=replica.num_pages * times.page_size
        )
        model = QueueModel(linear(FittedTimes(times, size, Validity(), 1.0)), room, objectives)
        self._planner = Planner(settings, model, ProductionRehearser(times, objectives, room))
        self._settings = settings
        self._num_gateways = config.gateways
        self._clock = clock
        self._status = status
        self._ordered = ordered
        self._scale = scale if settings.mode == "apply" else None
        self._log = log

    async def keep_planning(self) -> None:
        """Plan every `interval_s` seconds until cancelled."""
        while True:
            await asyncio.sleep(self._settings.interval_s)
            try:
                await self.tick()
            except OSError as error:  # of the log; the planner goes on
                logger.warning("a plan cannot be written to %s: %s", self._log.path, error)

    async def tick(self) -> Plan:
        """Make one plan, write it, and act on it."""
        figures = await self._figures()
        plan = await asyncio.to_thread(self._planner.plan, self._clock.now_s(), figures)
        self._log.write(plan)
        target, ordered = plan.target, figures.ordered
        if (target.num_prefill, target.num_decode) != (ordered.num_prefill, ordered.num_decode):
            logger.warning("planner: %s (%s)", plan.reason, plan.decision_id)
            if self._scale is None:
                self._planner.not_applied(ordered)
            else:
                await self._scale(target.num_prefill, target.num_decode)
        return plan

    async def _figures(self) -> Figures:
        ordered = self._ordered()
        try:
            status = await self._status()
        except (PeerGone, TimeoutError):
            status = Status()
        serving = [each.worker.role for each in status.workers if not each.is_draining]
        return Figures(
            counts=dict(_counts(status)),
            num_gateways=self._num_gateways,
            ordered=ordered.layout,
            ready=Layout(
                num_prefill=serving.count(WorkerRole.PREFILL), num_decode=serving.count(WorkerRole.DECODE)
            ),
            startups_s=ordered.startups_s,
            num_queued=status.queue.num_queued,
            num_planners=max(1, status.num_watchers),
        )


def _counts(status: Status) -> Iterator[tuple[str, dict[Stream, StreamCounts]]]:
    for gateway in status.gateways:
        yield gateway.id, {Stream(each.tenant, each.priority): each for each in gateway.demand}
