"""`baton rehearse` and `baton advise`: their options, their exit status, and the settings that they write."""

from pathlib import Path

import msgspec
import pytest
import yaml

from baton.bench.sim.suite import usual_times
from baton.cluster.cli.commands.rehearse import serve_yaml, sla_of
from baton.cluster.cli.main import main
from baton.config.cluster import ServeConfig
from baton.config.engine import CacheConfig, EngineSettings, SchedulerConfig
from baton.config.loader import build
from baton.errors import ConfigError
from baton.sim.rehearsal import Layout
from baton.sim.timed.times import TimeModel


@pytest.fixture
def times(tmp_path: Path) -> str:
    msgspec.structs.replace(usual_times(), model="tiny").save(tmp_path / "times.json")
    return str(tmp_path / "times.json")


def test_rehearsal_prints_figures_and_the_time_of_a_request(
    times: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ("--rate", "10", "--duration", "2", "--lengths", "64-128,8-16")
    status = main(["rehearse", "--times", times, "--workers", "1P1D", *load, "--slo", "ttft=1,tpot=0.1"])
    told = capsys.readouterr().out
    assert status == 0
    assert "ttft_p50_ms" in told and "attainment" in told and "prefill_computing" in told


def test_load_beyond_the_calibration_has_no_figures(times: str, capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--rate", "2", "--duration", "2", "--lengths", "9000-9000,4-4")
    status = main(
        ["rehearse", "--times", times, "--fast", "--workers", "1M", *load, "--max-num-batched-tokens", "9000"]
    )
    told = capsys.readouterr().out
    assert status == 1
    assert "no figures" in told and "new: up to" in told and "ttft" not in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "2X", "--rate", "1"], "2P6D"),
        (["--workers", "1M"], "--trace FILE, or --rate"),
        (["--workers", "1M", "--rate", "1", "--slo", "speed=1"], "--slo"),
        (["--workers", "1M", "--rate", "1", "--lengths", "5"], "P50-P90"),
        (["--workers", "1M", "--rate", "1", "--fast", "--block-size", "7"], "expected a power of two, got 7"),
        (["--workers", "1M", "--rate", "1", "--max-num-batched-tokens", "0"], "at least 1, at most"),
        (["--workers", f"{10**20}M", "--rate", "1"], "2P6D"),
        (["--workers", "1M", "--trace", "none.jsonl"], "none.jsonl cannot be read: No such file"),
    ],
)
def test_wrong_options_are_one_line(
    times: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rehearse", "--times", times, *words]) == 2
    assert message in capsys.readouterr().err


def test_model_that_is_far_off_says_what_to_do(
    times: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    msgspec.structs.replace(TimeModel.read(Path(times)), drift=0.5).save(tmp_path / "drifted.json")
    load = ("--rate", "10", "--duration", "2", "--lengths", "64-128,8-16", "--workers", "1P1D")
    told = []
    for file in (times, str(tmp_path / "drifted.json")):
        assert main(["rehearse", "--times", file, "--fast", *load]) == 0
        told.append(capsys.readouterr().out)
    assert "baton calibrate" not in told[0].splitlines()[-1]
    assert "50.0 % off: for narrower figures run `baton calibrate` again" in told[1]


def test_folder_that_cannot_be_made_is_told_before_the_search(
    times: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", f"{times}/folder")
    assert main(["advise", "tiny", "--times", times, "--rate", "1", "--slo", "ttft=1", *out]) == 2
    assert f"{times}/folder: the folder cannot be made: Not a directory" in capsys.readouterr().err


def test_objectives_are_seconds() -> None:
    assert (sla_of("ttft=0.5,tpot=0.05").ttft_ms, sla_of("tpot=0.05").tpot_ms) == (500.0, 50.0)
    with pytest.raises(ConfigError, match="--slo"):
        sla_of("ttft=-1")


def test_advice_writes_settings_that_serve_reads(
    times: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ("--rate", "4", "--duration", "2", "--lengths", "64-128,8-16", "--slo", "ttft=1,tpot=0.1")
    options = ("--times", times, "--devices", "1", "--processes", "1", "--out", str(tmp_path))
    assert main(["advise", "tiny", *options, *load]) == 0
    assert "do not disaggregate" in capsys.readouterr().out
    settings = build(ServeConfig, yaml.safe_load((tmp_path / "serve.yaml").read_text()))
    assert (settings.prefill.num_workers, settings.decode.num_workers) == (0, 1)
    assert "1M" in (tmp_path / "advise.html").read_text()


def test_advice_for_another_model_than_the_calibrated_one_is_refused(
    times: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ("--rate", "4", "--duration", "2", "--slo", "ttft=1,tpot=0.1", "--out", str(tmp_path))
    assert main(["advise", "organization/large", "--times", times, *load]) == 2
    assert "is of tiny, not of organization/large" in capsys.readouterr().err


def test_settings_have_those_of_the_calibrated_workers() -> None:
    engine = EngineSettings(
        quantization="int8",
        max_model_len=4096,
        tensor_parallel_size=2,
        logits_processors=("a.b:C",),
        cache=CacheConfig(kv_cache_dtype="int8", page_size=32),
        scheduler=SchedulerConfig(max_num_seqs=128, max_num_batched_tokens=1024),
    )
    layout = Layout(num_prefill=0, num_decode=3, decode_tp=2, step_tokens=512)
    settings = build(ServeConfig, yaml.safe_load(serve_yaml("tiny", layout, engine)))
    served = settings.decode.engine(settings.engine)
    scheduler = msgspec.structs.replace(engine.scheduler, max_num_batched_tokens=512)
    assert served == msgspec.structs.replace(engine, scheduler=scheduler)
    assert settings.prefill.engine(settings.engine).tensor_parallel_size == 1


def test_settings_have_all_of_a_layout() -> None:
    layout = Layout(num_prefill=2, num_decode=3, prefill_tp=4, step_tokens=512, page_size=32)
    settings = build(ServeConfig, yaml.safe_load(serve_yaml("tiny", layout, EngineSettings())))
    assert (settings.prefill.num_workers, settings.prefill.tensor_parallel_size) == (2, 4)
    assert settings.engine.scheduler.max_num_batched_tokens == 512
    assert settings.engine.cache.page_size == 32
