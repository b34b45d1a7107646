"""The GPUs of a machine, counted without a GPU."""

from pathlib import Path

import pytest

from baton.cluster.runtimes import gpus

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
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def add_nvidia_smi(folder: Path, listed: str, status: int = 0) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && printf '%s' '{listed}'\nexit {status}\n")
    program.chmod(0o755)


@pytest.fixture(autouse=True)
def torch_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "version", lambda name: "2.13.0+cu130")


def test_torch_without_cuda_uses_no_gpu_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add_nvidia_smi(folder, LISTED)
    assert gpus.usable_gpus() == ("0", "1") and not caplog.records
    monkeypatch.setattr(gpus, "version", lambda name: "2.13.0+cpu")
    assert gpus.usable_gpus() == () and gpus.visible_gpus() == ("0", "1")
    assert "torch 2.13.0+cpu has no CUDA: workers compute on CPUs beside 2 GPUs" in caplog.text


def test_gpus_are_those_that_nvidia_smi_lists(folder: Path) -> None:
    add_nvidia_smi(folder, LISTED)
    assert gpus.visible_gpus() == ("0", "1")


def test_empty_list_of_nvidia_smi_means_no_gpu(folder: Path) -> None:
    add_nvidia_smi(folder, "No devices found.\n")
    assert gpus.visible_gpus() == ()


def test_device_files_are_counted_without_nvidia_smi(folder: Path) -> None:
    assert gpus.visible_gpus() == ("0", "1", "2")


def test_device_files_are_counted_when_nvidia_smi_fails(folder: Path) -> None:
    add_nvidia_smi(folder, "Failed to initialize NVML: Driver/library version mismatch\n", status=18)
    assert gpus.visible_gpus() == ("0", "1", "2")


def test_cuda_visible_devices_has_precedence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_nvidia_smi(folder, LISTED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert gpus.visible_gpus() == ("3", "5")
