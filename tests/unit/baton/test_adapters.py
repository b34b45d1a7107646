"""The files of LoRA adapters: a fault in them is told by name, and is never another exception."""

import json
from pathlib import Path

import pytest

from baton.adapters import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from baton.errors import ModelError


def write(folder: Path, **keys: object) -> str:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **keys}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    (folder / WEIGHTS_FILE).write_bytes(b"weights")
    return str(folder)


def test_digest_is_of_both_files(tmp_path: Path) -> None:
    first = read_adapter(write(tmp_path))
    assert first.config == (4, 2.0) and first.weights == b"weights"
    assert read_adapter(str(tmp_path)).digest == first.digest
    assert read_adapter(write(tmp_path, lora_alpha=9)).digest != first.digest
    (tmp_path / WEIGHTS_FILE).write_bytes(b"others")
    assert read_adapter(str(tmp_path)).digest != first.digest


@pytest.mark.parametrize(
    ("path", "why"),
    [("/nowhere", "no such file"), ("/" + "a" * 300, "cannot be read"), ("a\0b", "cannot be read")],
)
def test_path_that_cannot_be_read_is_named(path: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        read_adapter(path)


@pytest.mark.parametrize("alpha", [10**400, -(10**400), 1e300, "8", None])
def test_alpha_beyond_any_scale_is_refused(alpha: object, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="lora_alpha"):
        read_adapter(write(tmp_path, lora_alpha=alpha))


@pytest.mark.parametrize("start", ["pissa", "PiSSA_niter_4", "olora", "corda", "loftq", "lora_ga"])
def test_adapter_of_other_base_weights_is_refused(start: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"'init_lora_weights' '{start}' is not supported"):
        read_adapter(write(tmp_path, init_lora_weights=start))


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_start_of_training_on_the_base_weights_is_accepted(start: object, tmp_path: Path) -> None:
    assert read_adapter(write(tmp_path, init_lora_weights=start)).config == (4, 2.0)
