"""The engine suite: which model it loads. A whole run takes minutes and is done by hand."""

import json
from pathlib import Path

import pytest

from baton.bench import machine
from baton.bench.engine import throughput as bench
from baton.config.engine import EngineConfig


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
