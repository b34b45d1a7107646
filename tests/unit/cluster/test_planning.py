"""The host of the planner, with routers and workers that are fakes."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest

from baton.bench.sim.suite import usual_times
from baton.clock import ManualClock
from baton.cluster.planning import Planning, read_plans
from baton.config.cluster import ServeConfig, WorkersConfig
from baton.config.engine import CacheConfig, EngineSettings, SchedulerConfig
from baton.config.planner import PlannerConfig
from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.messages.operations import GatewayStatus, PlanSummary, Status
from baton.messages.status import StreamCounts, cell_of
from baton.messages.workers import WorkerRole, WorkerStatus
from baton.planner import layouts
from baton.planner.layouts import QueueModel, Room, SimRehearser, linear
from baton.planner.planner import ScalingPlan
from baton.sim.timed.times import FittedTimes, Machine, TimeModel
from baton.tenants import Sla
from tests.event_loop import on_loop
from tests.node_peers import a_worker, a_worker_status
from tests.waiting import until


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearse a few requests: the host of the planner is tested here, not the quality of its plans."""
    monkeypatch.setattr(layouts, "REHEARSED", {"fast": 20, "full": 6})


class FakeRouters:
    """Routers whose gateway has had so many requests."""

    def __init__(self) -> None:
        self.num = 0
        self.is_gone = False
        self.workers: tuple[WorkerStatus, ...] = ()
        self.told: tuple[PlanSummary, ...] = ()

    def tell(self, *, plans: tuple[PlanSummary, ...]) -> None:
        self.told = plans

    async def status_or_none(self) -> Status | None:
        if self.is_gone:
            return None
        counts = StreamCounts(arrived={40: self.num}, ended={cell_of(1000, 0, 180): self.num})
        gateway = GatewayStatus(id="a" * 32, demand=(counts,))
        return Status(gateways=(gateway,), workers=self.workers, num_watchers=1)

    async def flip(self, worker: str, role: WorkerRole) -> None:
        raise AssertionError("nothing is to flip")


class Ranks(NamedTuple):
    """The ranks of each worker."""

    tp_size: int = 1
    num_stages: int = 1


ONE: Final = Ranks()


class FakeWorkers:
    """One worker of each role."""

    def __init__(self) -> None:
        self.scaled: list[tuple[int, int]] = []
        self.obstacle: Exception | None = None

    def ordered(self) -> dict[WorkerRole, list[str]]:
        return {WorkerRole.PREFILL: ["prefill-0"], WorkerRole.DECODE: ["decode-0"]}

    def startups(self) -> tuple[float, ...]:
        return ()

    def flipped(self, name: str, role: WorkerRole) -> None:
        raise AssertionError("nothing is to flip")

    async def scale(self, num_prefill: int, num_decode: int) -> None:
        self.scaled.append((num_prefill, num_decode))
        if self.obstacle is not None:
            raise self.obstacle


def test_settings_need_times_and_an_objective() -> None:
    with pytest.raises(ConfigError, match="objective"):
        PlannerConfig(mode="advise", times="times.json")
    with pytest.raises(ConfigError, match="calibrate"):
        PlannerConfig(mode="advise", ttft_ms=1000)


def test_times_that_are_linear_are_found_again() -> None:
    given = Machine()
    found = linear(given)
    for name in ("prefill_token_s", "prefill_pair_s", "step_base_s", "step_sequence_s", "step_context_s"):
        assert getattr(found, name) == pytest.approx(getattr(given, name), rel=1e-3), name


def test_missing_times_are_an_error(tmp_path: Path) -> None:
    planner = PlannerConfig(mode="advise", ttft_ms=1000, times=str(tmp_path / "none.json"))
    config = ServeConfig(model="tiny", planner=planner)
    with pytest.raises(ConfigError):
        Host(tmp_path, config)


def test_log_whose_folder_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    usual_times().save(tmp_path / "times.json")
    planner = PlannerConfig(mode="advise", ttft_ms=1000, times=str(tmp_path / "times.json"))
    log = tmp_path / "times.json" / "plans.jsonl"
    with pytest.raises(ConfigError, match=r"planner.log: .*times.json cannot be made: File exists"):
        Planning(ServeConfig(model="tiny", planner=planner), ManualClock(), FakeWorkers(), log)


def test_log_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are no plans in .*: does `baton serve` run with --planner"):
        read_plans(tmp_path / "plans.jsonl", 3)
    (tmp_path / "plans.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="no log of plans"):
        read_plans(tmp_path / "plans.jsonl", 3)


class Host:
    """The host of a planner, with its fakes."""

    def __init__(self, folder: Path, config: ServeConfig) -> None:
        self.routers, self.workers = FakeRouters(), FakeWorkers()
        self.log = folder / "plans.jsonl"
        self._clock = ManualClock()
        self.planning = Planning(config, self._clock, self.workers, self.log)

    @classmethod
    def of(
        cls,
        folder: Path,
        mode: str = "apply",
        ranks: Ranks = ONE,
        calibrated: Ranks | None = None,
        **calibrated_settings: Any,
    ) -> "Host":
        """Plan for a cluster whose objective one prefill worker cannot meet.

        calibrated: the ranks of the workers that the times are of; None: those of the cluster.
        calibrated_settings: of their engine.
        """
        tp_size, num_stages = calibrated or ranks
        times = msgspec.structs.replace(usual_times(), engine=EngineSettings(**calibrated_settings))
        replica = msgspec.structs.replace(times.replicas[1], num_stages=num_stages)
        msgspec.structs.replace(times, replicas={tp_size: replica}).save(folder / "times.json")
        planner = msgspec.convert(
            {"mode": mode, "ttft_ms": 60_000.0, "max_workers": 8, "times": str(folder / "times.json")},
            PlannerConfig,
        )
        engine = EngineSettings(tensor_parallel_size=ranks.tp_size, pipeline_parallel_size=ranks.num_stages)
        return cls(folder, ServeConfig(model="tiny", planner=planner, engine=engine))

    def run(self, num: int, rate: int) -> None:
        """Let so many ticks pass, at so many requests a second."""
        for _ in range(num):
            self._clock.advance(30.0)
            self.routers.num += 30 * rate
            asyncio.run(self.planning.tick(self.routers))

    def plans(self, num: int) -> list[ScalingPlan]:
        """Return the latest plans of the log."""
        return read_plans(self.log, num)


@pytest.mark.parametrize(("mode", "is_applied"), [("advise", False), ("apply", True)])
def test_plans_are_written_and_applied_if_asked_for(tmp_path: Path, mode: str, is_applied: bool) -> None:
    host = Host.of(tmp_path, mode)
    host.run(8, rate=200)
    plans = host.plans(8)
    assert len(plans) == 8
    assert plans[0].outcome == "hold"
    assert plans[-1].target.num_workers > 2
    assert bool(host.workers.scaled) is is_applied
    assert [each.id for each in host.routers.told] == [each.decision_id for each in reversed(plans)]
    assert any(each.actions.startswith("add ") for each in host.routers.told)
    scored = {score.decision_id: score.attainment for plan in plans for score in plan.scores}
    assert {each.id: each.came for each in host.routers.told if each.id in scored} == scored


@pytest.mark.parametrize("ranks", [Ranks(2, 1), Ranks(2, 2)], ids=str)
def test_workers_of_several_ranks_are_added_whole(tmp_path: Path, ranks: Ranks) -> None:
    host = Host.of(tmp_path, "apply", ranks)
    host.run(5, rate=200)
    target = host.plans(1)[-1].target
    assert target.num_workers > 2 and host.workers.scaled[-1] == (target.num_prefill, target.num_decode)


@pytest.mark.parametrize(
    ("ranks", "calibrated", "message"),
    [
        (Ranks(1, 2), Ranks(1, 1), "prefill workers have 2 pipeline stages, the calibrated ones have 1"),
        (Ranks(1, 1), Ranks(1, 2), "prefill workers have 1 pipeline stages, the calibrated ones have 2"),
        (Ranks(2, 1), Ranks(1, 1), "tensor parallel size 2 was not calibrated, only 1 was"),
    ],
)
def test_workers_that_were_not_calibrated_are_an_error(
    tmp_path: Path, ranks: Ranks, calibrated: Ranks, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Host.of(tmp_path, "advise", ranks, calibrated)


@pytest.mark.parametrize(
    "settings",
    [{"dtype": "float32"}, {"quantization": "int8"}, {"cache": CacheConfig(kv_cache_dtype="int8")}],
    ids=str,
)
def test_times_of_other_types_are_an_error(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="calibrate with the options of the cluster"):
        Host.of(tmp_path, "advise", **settings)


def test_workers_of_another_model_hold(tmp_path: Path) -> None:
    host = Host.of(tmp_path)
    host.routers.workers = (a_worker_status(a_worker("decode-0", fingerprint="another")),)
    host.run(8, rate=200)
    plan = host.plans(1)[-1]
    assert (plan.outcome, plan.reason) == ("hold", "1 workers have another model than those of planner.times")
    assert not host.workers.scaled


def test_rehearsals_have_the_settings_of_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[EngineSettings, str]] = []

    def made(times: TimeModel, sla: Sla, sizes: dict[WorkerRole, int], policy: str) -> SimRehearser:
        given.append((times.engine, policy))
        return SimRehearser(times, sla, sizes, policy)

    monkeypatch.setattr("baton.cluster.planning.SimRehearser", made)
    usual_times().save(tmp_path / "times.json")
    config = ServeConfig(
        model="tiny",
        planner=PlannerConfig(mode="advise", ttft_ms=1000, times=str(tmp_path / "times.json")),
        engine=EngineSettings(scheduler=SchedulerConfig(max_num_batched_tokens=512)),
        router=RouterConfig(policy="round-robin"),
    )
    Host(tmp_path, config)
    assert given == [(config.engine, "round-robin")]


def test_each_role_is_predicted_by_the_times_of_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines: list[Machine | None] = []

    def made(machine: Machine, room: Room, sla: Sla, prefill: Machine | None = None) -> QueueModel:
        machines.extend((machine, prefill))
        return QueueModel(machine, room, sla, prefill)

    monkeypatch.setattr("baton.cluster.planning.QueueModel", made)
    replica = usual_times().replicas[1]
    steps = msgspec.structs.replace(replica.steps, fixed_s=10 * replica.steps.fixed_s)
    replicas = {1: msgspec.structs.replace(replica, steps=steps), 2: replica}
    times = msgspec.structs.replace(usual_times(), replicas=replicas)
    times.save(tmp_path / "times.json")
    config = ServeConfig(
        model="tiny",
        planner=PlannerConfig(mode="advise", ttft_ms=1000, times=str(tmp_path / "times.json")),
        prefill=WorkersConfig(tensor_parallel_size=2),
    )
    Host(tmp_path, config)
    assert machines == [linear(FittedTimes(times, size)) for size in (1, 2)]


def test_routers_that_do_not_answer_hold(tmp_path: Path) -> None:
    host = Host.of(tmp_path)
    host.run(6, rate=1)
    host.workers.scaled.clear()
    host.routers.is_gone = True
    host.run(2, rate=1000)
    assert [plan.outcome for plan in host.plans(2)] == ["hold", "hold"]
    assert not host.workers.scaled


@pytest.mark.parametrize("obstacle", [ConfigError("no room"), TimeoutError(), RuntimeError("Ray is lost")])
def test_change_that_fails_is_tried_again(tmp_path: Path, obstacle: Exception) -> None:
    host = Host.of(tmp_path)
    host.workers.obstacle = obstacle
    for _ in range(8):
        with suppress(RuntimeError):
            host.run(1, rate=200)
    assert len(host.workers.scaled) >= 3
    assert "manual" not in {plan.outcome for plan in host.plans(8)}


def test_plan_is_carried_out_although_it_cannot_be_written(tmp_path: Path) -> None:
    host = Host.of(tmp_path)
    (tmp_path / "plans.jsonl").symlink_to("/dev/full")
    host.run(8, rate=200)
    assert len(host.workers.scaled) >= 3


@on_loop
async def test_planner_goes_on_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host.of(tmp_path)
    num_calls = 0

    async def fails() -> Status:
        nonlocal num_calls
        num_calls += 1
        raise RuntimeError("this was not foreseen")

    monkeypatch.setattr(host.routers, "status_or_none", fails)
    monkeypatch.setattr(
        host.planning, "_settings", msgspec.structs.replace(host.planning._settings, interval_s=0.001)
    )
    keeping = asyncio.create_task(host.planning.keep_planning(host.routers))
    await until(lambda: num_calls >= 3)
    keeping.cancel()
