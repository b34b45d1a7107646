"""Calibration: timed steps have the work that their shapes say; transfers at once are all timed."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import msgspec
import pytest

from baton.bench.engine.replica import TOY_LLAMA, load_replica
from baton.bench.report import Progress
from baton.bench.sim import calibration
from baton.bench.sim.calibration import (
    Loaded,
    Stepper,
    StepShape,
    calibrate,
    measure_transfers,
    shapes_of,
)
from baton.config.cluster import ServeConfig
from baton.config.engine import EngineConfig, EngineSettings, SchedulerConfig, SpeculativeConfig
from baton.errors import ConfigError
from baton.pages import PageLayout
from baton.sim.timed.times import Overheads, StepSample, StepWork, TimeModel, TransferSample, fit_transfers

LAYOUT = PageLayout(tp_size=1, page_size=16, num_layers=2, num_kv_heads=1, head_dim=16, dtype="bfloat16")


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
    """A worker whose steps take a second for each new token and a millisecond beside it."""

    start_s = 1.0

    def __init__(self, config: EngineConfig, num_threads: int) -> None:
        layout = msgspec.structs.replace(LAYOUT, tp_size=config.tensor_parallel_size)
        self.loaded = Loaded("f", layout, 400, max_model_len=1000, step_tokens=512, max_num_seqs=8)

    def measure(self, shapes: Sequence[StepShape], seconds: float) -> list[StepSample]:
        works = [StepWork(each.num_decodes + 1, each.context, each.num_new, 1.0) for each in shapes]
        return [StepSample(work, 1e-3 + work.num_new) for work in works]

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


@pytest.mark.slow
def test_transfers_are_timed_alone_and_together() -> None:
    samples = measure_transfers(LAYOUT, 256, 0.1)
    assert fit_transfers(samples).most_bytes == 256 * LAYOUT.page_bytes // LAYOUT.page_size
    assert {each.num_transfers for each in samples} == {1, 2, 4}
    assert all(each.seconds > 0 and each.num_bytes % LAYOUT.page_bytes == 0 for each in samples)
