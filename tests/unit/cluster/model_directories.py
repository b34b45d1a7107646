"""Model directories made from the tiny one, for what cannot be shown with it."""

import json
import shutil
from pathlib import Path

from baton.cluster.model_directory import resolve_model


def without_weights(folder: Path, **tokenizer_config: object) -> Path:
    """Config and tokenizer of the tiny model; what is given replaces keys of `tokenizer_config.json`."""
    source = resolve_model("tiny")
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        shutil.copy(source / name, folder / name)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | tokenizer_config))
    return folder


def with_config_alone(folder: Path) -> Path:
    shutil.copy(resolve_model("tiny") / "config.json", folder / "config.json")
    return folder


def with_pickled_weights(folder: Path) -> Path:
    (without_weights(folder) / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    return folder
