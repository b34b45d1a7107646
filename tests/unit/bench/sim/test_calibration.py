"""Calibration: timed steps have the work that their shapes say; transfers at once are all timed."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from baton.bench.engine.replica import TOY_LLAMA, load_replica
from baton.bench.report import Progress
from baton.bench.serve.figures import Sample
from baton.bench.serve.load import Model
from baton.bench.sim import calibration
from baton.bench.sim.calibration import (
    Loaded,
    Stepper,
    StepShape,
    calibrate,
    measure_overheads,
    measure_transfers,
    of_rank,
    shapes_of,
)
from baton.bench.sim.suite import usual_times
from baton.config.cluster import ServeConfig, WorkersConfig
from baton.config.engine import EngineConfig, EngineSettings, SchedulerConfig, SpeculativeConfig
from baton.errors import ConfigError
from baton.pages import PageLayout
from baton.sim.rehearsal import Layout, rehearse
from baton.sim.timed.times import (
    Cost,
    Overheads,
    StepSample,
    StepWork,
    TimeModel,
    TransferSample,
    fit_transfers,
)
from baton.sim.timed.workload import TraceRequest
from tests.event_loop import on_loop
from tests.layouts import a_layout

LAYOUT = a_layout(num_kv_heads=1, head_dim=16, dtype="bfloat16")
TWO_HEADS = msgspec.structs.replace(LAYOUT, num_kv_heads=2)


@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize("num_stages", [1, 2])
def test_steps_have_the_work_of_their_shape(num_stages: int) -> None:
    settings = {
        "device": "cpu",
        "max_model_len": 512,
        "cache": {"kv_cache_memory_bytes": 2**24},
        "pipeline_parallel_size": num_stages,
    }
    engine = load_replica(TOY_LLAMA, settings)
    with closing(engine):
        check_steps(Stepper(engine))


def check_steps(stepper: Stepper) -> None:
    decodes = [each for each in stepper.measure(StepShape(3, 40)) if not each.work.num_new]
    assert len(decodes) == 12 and {each.work.num_sequences for each in decodes} == {3}
    assert 3 * 41 < decodes[0].work.num_context < 3 * 60 and len({each.work for each in decodes}) == 1
    assert all(each.seconds > 0 for each in decodes)
    prompts = stepper.measure(StepShape(0, 0, 64))
    assert [each.work for each in prompts] == [StepWork(1, 0, 64, 64 * 32.0)] * 3
    mixed = [each.work for each in stepper.measure(StepShape(2, 40, 64))[-3:]]
    assert all(work.num_new == 64 and work.num_sequences == 3 and work.num_context > 80 for work in mixed)


@pytest.mark.parametrize(("longest", "step_tokens"), [(1000, 512), (1024, 2048)])
def test_shapes_stay_within_the_engine(longest: int, step_tokens: int) -> None:
    loaded = Loaded("f", LAYOUT, 400, max_model_len=longest, step_tokens=step_tokens, max_num_seqs=8)
    shapes = shapes_of(loaded)
    assert max(each.num_decodes for each in shapes) <= 16
    assert max(each.context for each in shapes) < longest and max(each.num_new for each in shapes) < longest
    assert all(each.num_decodes * each.context <= 200 * 16 for each in shapes if not each.num_new)


class MadeWorker:
    """A worker whose steps take a second for each new token, and with several ranks longer each time."""

    start_s = 1.0

    def __init__(self, config: EngineConfig, num_threads: int) -> None:
        layout = of_rank(msgspec.structs.replace(TWO_HEADS, tp_size=config.tensor_parallel_size))
        self.num_asked, self.is_steady = 0, config.tensor_parallel_size == 1
        self.loaded = Loaded("f", layout, 400, max_model_len=1000, step_tokens=512, max_num_seqs=8)

    def measure(self, shapes: Sequence[StepShape], seconds: float) -> list[StepSample]:
        works = [StepWork(each.num_decodes + 1, each.context, each.num_new, 99.0) for each in shapes]
        self.num_asked += 1
        multiple = 1.0 if self.is_steady else 0.5 * self.num_asked
        return [StepSample(work, multiple * (1e-3 + work.num_new)) for work in works]

    def keep_busy(self, shapes: Sequence[StepShape]) -> None:
        """See WorkerChild."""

    def close(self) -> None:
        """See WorkerChild."""


def made_transfers(
    layout: PageLayout, max_tokens: int, seconds: float, transport: str
) -> list[TransferSample]:
    return [TransferSample(layout.page_bytes * num, 1, 1e-3 * num) for num in range(1, 9)]


async def made_overheads(config: ServeConfig, model: TimeModel, num_threads: int) -> Overheads:
    return Overheads()


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured: see MadeWorker."""
    monkeypatch.setattr(calibration, "WorkerChild", MadeWorker)
    monkeypatch.setattr(calibration, "measure_transfers", made_transfers)
    monkeypatch.setattr(calibration, "measure_overheads", made_overheads)


def calibrated(num_neighbours: int = 3, **settings: Any) -> TimeModel:
    with Progress() as tell:
        return calibrate(ServeConfig(model="tiny", **settings), 10.0, num_neighbours, tell)


@pytest.mark.usefixtures("measuring")
def test_times_keep_the_model_and_the_settings_of_the_workers() -> None:
    engine = EngineSettings(quantization="int8", max_model_len=512)
    times = calibrated(engine=engine, served_model_name="other")
    assert (times.model, times.engine) == ("tiny", engine)


@pytest.mark.usefixtures("measuring")
@pytest.mark.parametrize(
    "engine",
    [
        EngineSettings(scheduler=SchedulerConfig(policy="static")),
        EngineSettings(scheduler=SchedulerConfig(max_queue_delay_ms=5.0)),
        EngineSettings(speculative=SpeculativeConfig(method="ngram")),
    ],
    ids=["policy", "delay", "speculative"],
)
def test_settings_that_rehearsals_do_not_know_are_refused(engine: EngineSettings) -> None:
    with pytest.raises(ConfigError, match="rehearsals"):
        calibrated(engine=engine)


@pytest.mark.usefixtures("measuring")
def test_workers_of_several_ranks_have_no_figures_beside_others_on_their_machine() -> None:
    times = calibrated(engine=EngineSettings(tensor_parallel_size=2))
    layouts = [Layout(num_prefill=0, num_decode=number, decode_tp=2) for number in (1, 2)]
    trace = [TraceRequest(arrival_s=0.0, input_tokens=8, output_tokens=2)]
    alone, together = (rehearse(trace, layout, times) for layout in layouts)
    assert alone.is_valid and together.complaints == ("2 workers share the machine, calibrated to 1",)
    apart = calibrated(0, engine=EngineSettings(tensor_parallel_size=2))
    assert rehearse(trace, layouts[1], apart).is_valid


@pytest.mark.usefixtures("measuring")
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_workers_of_two_sizes_are_all_in_the_times(prefill: int, decode: int) -> None:
    times = calibrated(
        prefill=WorkersConfig(tensor_parallel_size=prefill), decode=WorkersConfig(tensor_parallel_size=decode)
    )
    assert set(times.replicas) == {1, 2}
    assert times.neighbours == (1.0,)
    assert times.kv_token_bytes == TWO_HEADS.token_bytes  # of one rank: it moves the most
    assert times.drift == pytest.approx(0.5)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_layout_of_a_rank_has_the_bytes_of_one_rank(tp_size: int) -> None:
    layout = msgspec.structs.replace(TWO_HEADS, tp_size=tp_size)
    assert of_rank(layout).num_ranks == 1 and of_rank(layout).page_bytes == layout.page_bytes


@pytest.mark.usefixtures("measuring")
def test_neighbours_of_workers_of_one_rank_are_measured() -> None:
    assert len(calibrated(2).neighbours) == 3 and not calibrated(0).neighbours


@on_loop
async def test_overheads_are_those_of_workers_with_the_ranks_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[EngineSettings] = []

    @asynccontextmanager
    async def cluster(*words: object, engine: EngineSettings, **more: object) -> AsyncIterator[Any]:
        served.append(engine)
        yield SimpleNamespace(url="http://127.0.0.1:9")

    async def model(client: object) -> Model:
        return Model("tiny", 100)

    async def ask(client: object, name: str, lengths: Sequence[tuple[int, int]], *more: object) -> Any:
        return SimpleNamespace(samples=[Sample(num, 1.0, 1.0 + num, ()) for _, num in lengths])

    async def costs(*more: object) -> tuple[Cost, Cost]:
        return Cost(), Cost()

    for name, made in {"served_cluster": cluster, "model_of": model, "_ask": ask, "_costs": costs}.items():
        monkeypatch.setattr(calibration, name, made)
    times = msgspec.structs.replace(usual_times(), replicas={2: usual_times().replicas[1]})
    config = ServeConfig(model="tiny", decode=WorkersConfig(tensor_parallel_size=2))
    overheads = await measure_overheads(config, times, 1)
    assert overheads.step_s > 0.9 and [each.tensor_parallel_size for each in served] == [2]


@pytest.mark.slow
def test_transfers_are_timed_alone_and_together() -> None:
    samples = measure_transfers(LAYOUT, 256, 0.1)
    assert fit_transfers(samples).most_bytes == 256 * LAYOUT.page_bytes // LAYOUT.page_size
    assert {each.num_transfers for each in samples} == {1, 2, 4, 8, 16}
    assert all(each.seconds > 0 and each.num_bytes % LAYOUT.page_bytes == 0 for each in samples)
