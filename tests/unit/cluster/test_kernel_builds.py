import os
import time
from pathlib import Path

import pytest

from baton.cluster.model_directory import FOLDERS, LONGEST_S, are_compiled_now
from baton.kernels import native


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
