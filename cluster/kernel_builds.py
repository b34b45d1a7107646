"""Whether kernels are being compiled on this machine, by whichever process: a long silence else."""

import time
from pathlib import Path
from typing import Final

from baton.config import cache_directory

FOLDERS: Final = "compiling-*"  # as kernels/native.py names them, which may not know of this
LONGEST_S: Final = 300.0  # what is older was left by a process that was killed


def are_compiled_now() -> bool:
    return any(_age_s(folder) < LONGEST_S for folder in cache_directory().glob(FOLDERS))


def _age_s(folder: Path) -> float:
    try:
        return time.time() - folder.stat().st_mtime
    except OSError:  # done meanwhile
        return LONGEST_S
