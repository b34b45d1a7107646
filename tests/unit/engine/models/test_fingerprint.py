from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.models.checkpoint import fingerprint


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.zeros(64, 64), "v": torch.zeros(3)}, tmp_path / "model.safetensors")
    return tmp_path


def test_it_is_stable_and_128_bits(directory: Path) -> None:
    assert fingerprint(directory) == fingerprint(directory)
    assert len(bytes.fromhex(fingerprint(directory))) == 16


def test_another_config_is_another_model(directory: Path) -> None:
    before = fingerprint(directory)
    (directory / "config.json").write_text('{"rope_theta": 1}')
    assert fingerprint(directory) != before


def test_fine_tuned_weights_are_another_model(directory: Path) -> None:
    before = fingerprint(directory)
    save_file({"w": torch.zeros(64, 64), "v": torch.ones(3)}, directory / "model.safetensors")
    assert fingerprint(directory) != before


def test_another_shape_of_the_same_bytes_is_another_model(directory: Path) -> None:
    before = fingerprint(directory)
    save_file({"w": torch.zeros(32, 128), "v": torch.zeros(3)}, directory / "model.safetensors")
    assert fingerprint(directory) != before


def test_dummy_weights_are_told_apart_by_their_seed(directory: Path) -> None:
    seeded = {fingerprint(directory, dummy_seed=seed) for seed in (0, 1)}
    assert len(seeded | {fingerprint(directory)}) == 3
