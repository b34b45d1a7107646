from pathlib import Path
from typing import Any

import pytest

from baton.cluster.model_directory import resolve_model
from baton.errors import ModelError


def test_tiny_comes_with_baton() -> None:
    assert (resolve_model("tiny") / "model.safetensors").is_file()


def test_a_directory_of_yours_may_be_called_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("./tiny").resolve() == tmp_path / "tiny"


@pytest.mark.parametrize("name", ["nonsense", "meta-llama/Llama-3.1-8B"])
def test_unknown_model_name_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f'{name}\'.*"tiny".*config.json.*nothing is downloaded'):
        resolve_model(name)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="got a file"):
        resolve_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("model", [None, 5, ""])
def test_value_that_is_no_model_name_is_refused(model: Any) -> None:
    with pytest.raises(ModelError, match='^model: expected "tiny" or a directory, got '):
        resolve_model(model)
