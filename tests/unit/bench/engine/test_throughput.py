"""The engine suite: which model it loads. A whole run takes minutes and is done by hand."""

from pathlib import Path

import pytest

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
