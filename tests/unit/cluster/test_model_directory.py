import os
import time
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.model_directory import FOLDERS, LONGEST_S, are_compiled_now, resolve_model
from baton.errors import ModelError
from baton.kernels import native


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


@pytest.mark.parametrize("model", [None, 5, "", b"tiny"])
def test_value_that_is_no_model_name_is_refused(model: Any) -> None:
    with pytest.raises(ModelError, match='^model: expected "tiny" or a directory, got '):
        resolve_model(model)


def test_kernels_are_compiled_while_their_folder_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "none"))
    assert not are_compiled_now()
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    (tmp_path / "kernels-0.so").touch()
    assert not are_compiled_now()
    folder = tmp_path / f"{native.COMPILING}x"
    folder.mkdir()
    assert folder.match(FOLDERS) and are_compiled_now()
    left_s = time.time() - LONGEST_S - 1
    os.utime(folder, (left_s, left_s))
    assert not are_compiled_now()
