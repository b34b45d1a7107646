"""Which directory a model name means."""

import time
from os import PathLike
from pathlib import Path
from typing import Final

import baton
from baton.config.environment import cache_directory
from baton.errors import ModelError

TINY: Final = "tiny"


def resolve_model(model: str | PathLike[str]) -> Path:
    """The model's directory; `tiny` is the one that comes with Baton (`./tiny` is a directory of yours).

    Raises ModelError when there is no such directory.
    """
    if not isinstance(model, str | PathLike) or not str(model):
        got = "an empty string" if isinstance(model, str) else f"{model!r} ({type(model).__name__})"
        raise ModelError(f'model: expected "{TINY}" or a directory, got {got}')
    if model == TINY:
        return Path(baton.__file__).parent / "engine" / TINY
    directory = Path(model)
    if not directory.is_dir():
        raise ModelError(
            f'model {str(model)!r}: expected "{TINY}", the model that comes with Baton, or a directory in '
            f"Hugging Face layout (config.json, *.safetensors, tokenizer.json), got "
            f"{'a file' if directory.exists() else 'a name that is no directory'}; nothing is downloaded"
        )
    return directory


FOLDERS: Final = "compiling-*"  # as kernels/native.py names them, which may not know of this
LONGEST_S: Final = 300.0  # what is older was left by a process that was killed


def are_compiled_now() -> bool:
    """Whether kernels are being compiled on this machine, by whichever process: a long silence else."""
    return any(_age_s(folder) < LONGEST_S for folder in cache_directory().glob(FOLDERS))


def _age_s(folder: Path) -> float:
    try:
        return time.time() - folder.stat().st_mtime
    except OSError:  # done meanwhile
        return LONGEST_S
