"""The GPUs of a machine, counted without a GPU."""

from pathlib import Path

import pytest

from baton.config import environment

LISTED = """\
GPU 0: NVIDIA H200 (UUID: GPU-5d1f)
  MIG 1g.18gb     Device  0: (UUID: MIG-0c7a)
GPU 1: NVIDIA H200 (UUID: GPU-9b02)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with three device files of GPUs; the only folder of programs, and of devices."""
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(environment, "DEVICES", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def add_nvidia_smi(folder: Path, listed: str, status: int = 0) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && printf '%s' '{listed}'\nexit {status}\n")
    program.chmod(0o755)


@pytest.fixture(autouse=True)
def torch_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "version", lambda name: "2.13.0+cu130")


def test_torch_without_cuda_uses_no_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_nvidia_smi(folder, LISTED)
    monkeypatch.setattr(environment, "version", lambda name: "2.13.0+cpu")
    assert environment.visible_gpus() == ()


def test_gpus_are_those_that_nvidia_smi_lists(folder: Path) -> None:
    add_nvidia_smi(folder, LISTED)
    assert environment.visible_gpus() == ("0", "1")


def test_no_gpus_are_listed_by_nvidia_smi(folder: Path) -> None:
    add_nvidia_smi(folder, "No devices found.\n")
    assert environment.visible_gpus() == ()


def test_device_files_are_counted_without_nvidia_smi(folder: Path) -> None:
    assert environment.visible_gpus() == ("0", "1", "2")


def test_device_files_are_counted_when_nvidia_smi_fails(folder: Path) -> None:
    add_nvidia_smi(folder, "Failed to initialize NVML: Driver/library version mismatch\n", status=18)
    assert environment.visible_gpus() == ("0", "1", "2")


def test_chosen_gpus_go_before_those_of_the_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_nvidia_smi(folder, LISTED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert environment.visible_gpus() == ("3", "5")
