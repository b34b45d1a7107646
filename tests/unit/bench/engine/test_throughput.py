"""The engine suite: which model it loads. A whole run takes minutes and is done by hand."""

import json
from pathlib import Path

import pytest

from baton.bench import machine
from baton.bench.engine import throughput as bench
from baton.config.engine import EngineConfig
from baton.kernels import native
from tests.tiny_models import write_config


class Loaded(Exception):
    """Ends the bench where it would load the model."""


@pytest.mark.parametrize("name", ["tiny", "."])
def test_models_are_named_as_for_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[str] = []

    def load(config: EngineConfig) -> None:
        models.append(config.model)
        raise Loaded

    monkeypatch.setattr(bench, "load_engine", load)
    with pytest.raises(Loaded):
        bench.measure.main(None, [name])
    assert (Path(models[0]) / "model.safetensors").is_file() == (name == "tiny")


def test_quantised_engines_are_compared_with_the_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "DECODE_BARS", {1: {"int4": 1e-6}, 3: {}})
    write_config(tmp_path)
    options = ["--quantization", "int4", "--rounds", "1", "--output", str(tmp_path)]
    bench.measure.main(None, [str(tmp_path), *options])
    rows = json.loads((tmp_path / "engine.json").read_text())["rows"]
    names = ["plain", "int4", "int4 / plain"]
    assert [row["name"] for row in rows] == [f"{name}, batch {batch}" for batch in (1, 3) for name in names]
    assert all(row["value"] > 0 for row in rows)


def test_throughput_beside_a_rival_is_of_the_same_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "NUM_REQUESTS", 2)
    monkeypatch.setitem(machine.MATMUL_SIZE, "cpu", 64)
    monkeypatch.setitem(machine.BUFFER_BYTES, "cpu", 2**20)
    options = [
        "--quantization",
        "int8",
        "--rival",
        "openvino=echo out tok/s 1",
        "--rounds",
        "1",
        "--pairs",
        "0",
    ]
    bench.measure.main(None, ["tiny", *options, "--output", str(tmp_path)])
    rows = {row["name"]: row for row in json.loads((tmp_path / "engine.json").read_text())["rows"]}
    assert rows["Baton / openvino"]["value"] == rows["Baton"]["value"] > 1
    assert rows["Baton / limit"]["value"] > 0
    parts = [row["value"] for name, row in rows.items() if name.startswith("  ")]
    assert sum(parts) == pytest.approx(100)


def test_stages_are_compared_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PIPELINE_TOKENS", 4)
    write_config(tmp_path)
    num_threads = native.num_threads()
    bench.measure.main(None, [str(tmp_path), "--pipeline", "2", "--rounds", "1", "--output", str(tmp_path)])
    native.set_num_threads(num_threads)
    rows = {row["name"]: row for row in json.loads((tmp_path / "engine.json").read_text())["rows"]}
    assert rows["1 stages of 1 thread"]["value"] > 0 and rows["2 stages / 1"]["value"] > 0
    assert [rows[f"  stage {stage} is busy"]["note"] for stage in (0, 1)] == ["1 layers"] * 2
    assert rows["bubble of 2 stages, batch 16"]["limit"] == "<= 10"
