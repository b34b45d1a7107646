"""Which directory a model name means."""

from pathlib import Path
from typing import Final

import baton
from baton.errors import ModelError

TINY: Final = "tiny"


def resolve_model(model: str | Path) -> Path:
    """The model's directory; `tiny` is the one that comes with Baton (`./tiny` is a directory of yours).

    Raises ModelError when there is no such directory.
    """
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
