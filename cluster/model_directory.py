"""The directory of a model name."""

from os import PathLike
from pathlib import Path
from typing import Final

import msgspec

import baton
from baton.config.engine import EngineSettingsT
from baton.errors import ModelError

TINY: Final = "tiny"


def resolve_model(model: str | PathLike[str]) -> Path:
    """Return the model's directory. "tiny" is the model that comes with Baton, "./tiny" a directory of yours.

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


def resolve_draft_model(settings: EngineSettingsT) -> EngineSettingsT:
    """Return the settings with the directory of their draft model, if any; raises as `resolve_model`."""
    speculative = settings.speculative
    if speculative is None or speculative.model is None:
        return settings
    speculative = msgspec.structs.replace(speculative, model=str(resolve_model(speculative.model)))
    return msgspec.structs.replace(settings, speculative=speculative)
