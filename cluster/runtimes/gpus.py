"""The NVIDIA GPUs of this machine, and whether the installed torch computes on them."""

import logging
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from baton.config.environment import chosen_gpus

DEVICES: Final = Path("/dev")
NVIDIA_SMI_S: Final = 60.0  # the driver of a machine with many GPUs may take seconds to start

logger = logging.getLogger(__name__)


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that a new process would see, as CUDA_VISIBLE_DEVICES names them.

    In a container these are the GPUs of the container: /proc/driver/nvidia may list all GPUs of the machine.
    """
    chosen = chosen_gpus()
    if chosen is not None:
        return chosen
    num_gpus = _count_by_nvidia_smi()
    if num_gpus is None:
        num_gpus = len([*DEVICES.glob("nvidia[0-9]*")])
    return tuple(map(str, range(num_gpus)))


def usable_gpus() -> tuple[str, ...]:
    """Return the visible GPUs; none, and a warning, where the installed torch is a build without CUDA."""
    found = visible_gpus()
    if found and is_torch_for_cpus():
        logger.warning("torch %s has no CUDA: workers compute on CPUs beside %d GPUs", _torch(), len(found))
        return ()
    return found


def is_torch_for_cpus() -> bool:
    """Return whether the installed torch is a build without CUDA."""
    return _torch().endswith("+cpu")


def _torch() -> str:
    with suppress(PackageNotFoundError):
        return version("torch")
    return ""


def _count_by_nvidia_smi() -> int | None:
    """Return the number of GPUs that `nvidia-smi -L` lists; None: the program is missing, or fails."""
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(
            ("nvidia-smi", "-L"), capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_S
        )
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return None
