"""The directory of a model: one of this machine, that of `tiny`, or a repository of Hugging Face.

`ORGANIZATION/NAME` or `ORGANIZATION/NAME@REVISION` names a repository. A revision is a branch, a tag or a
commit. The files lie in huggingface_hub's cache, which HF_HOME places; only missing ones are downloaded.
"""

import logging
import re
from os import PathLike
from pathlib import Path
from typing import Final

import msgspec

import baton
from baton.config.cluster import ServeConfig
from baton.config.engine import EngineSettingsT
from baton.errors import ModelError
from baton.tokenizer_file import SENTENCEPIECE_FILE, TOKENIZER_FILE, has_tokenizer

logger = logging.getLogger(__name__)

TINY: Final = "tiny"
_SMALL_FILES: Final = ("*.json", "*.jinja", SENTENCEPIECE_FILE)
_WEIGHTS: Final = "*.safetensors"
# Files below the repository's top folder are copies for other programs, except for further chat templates.
# `consolidated` weights, of Mistral, are the same weights in another layout.
_OTHER_FILES: Final = ["*/*.json", f"*/{_WEIGHTS}", f"consolidated{_WEIGHTS}"]
_REPOSITORY: Final = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?", re.ASCII)


def resolve_model(model: str | PathLike[str]) -> Path:
    """Return the model's directory. "tiny" is the model that comes with Baton, "./tiny" a directory of yours.

    The cache serves a repository without any network when it has all the files. Otherwise huggingface_hub
    downloads them. Raises ModelError when there is no such directory and no such repository.
    """
    if not isinstance(model, str | PathLike) or not str(model):
        got = "an empty string" if isinstance(model, str) else f"{model!r} ({type(model).__name__})"
        raise ModelError(f'model: expected "{TINY}", a directory or a repository, got {got}')
    if model == TINY:
        return Path(baton.__file__).parent / "engine" / TINY
    directory = Path(model)
    if directory.is_dir():
        return directory
    repository = _REPOSITORY.fullmatch(str(model))
    if repository is None or directory.exists():
        got = "a file" if directory.exists() else "another name, and no directory has it"
        raise ModelError(
            f'model {str(model)!r}: expected "{TINY}", the model that comes with Baton, a directory in '
            f"Hugging Face layout (config.json, *.safetensors, tokenizer.json), or a repository "
            f"(ORGANIZATION/NAME), got {got}"
        )
    return _snapshot(repository["name"], repository["revision"])


def is_repository(model: str) -> bool:
    """Return whether the model is a repository of Hugging Face: no directory has this name."""
    return model != TINY and not Path(model).exists() and _REPOSITORY.fullmatch(model) is not None


def served_name(model: str) -> str:
    """Return the model's name in the API by default: that of the repository, or of the directory."""
    if is_repository(model):
        return model.partition("@")[0]
    return model.rstrip("/").rpartition("/")[2] or model


def pin_revision(config: ServeConfig) -> ServeConfig:
    """Return settings that name repositories by their commits, so that all machines load the same files.

    When the cluster runs on this machine alone, the settings name directories instead, so that its processes
    need not import huggingface_hub. Raises as `resolve_model`.
    """
    is_one_machine = config.runtime == "local" or config.ray_address is None
    if config.other_models:
        others = {
            name: msgspec.structs.replace(other, model=_pinned(other.model, is_one_machine))
            for name, other in config.other_models.items()
        }
        config = msgspec.structs.replace(config, other_models=others)
    if not is_repository(config.model):
        return config
    name = config.served_model_name or served_name(config.model)
    model = _pinned(config.model, is_one_machine)
    return msgspec.structs.replace(config, model=model, served_model_name=name)


def _pinned(model: str, is_one_machine: bool) -> str:
    if not is_repository(model):
        return model
    directory = resolve_model(model)
    return str(directory) if is_one_machine else f"{served_name(model)}@{directory.name}"


def resolve_draft_model(settings: EngineSettingsT) -> EngineSettingsT:
    """Return the settings with the directory of their draft model, if any; raises as `resolve_model`."""
    speculative = settings.speculative
    if speculative is None or speculative.model is None:
        return settings
    speculative = msgspec.structs.replace(speculative, model=str(resolve_model(speculative.model)))
    return msgspec.structs.replace(settings, speculative=speculative)


def _snapshot(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # takes half a second
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    def fetch(*patterns: str, from_cache: bool = False) -> Path:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                local_files_only=from_cache,
                allow_patterns=list(patterns),
                ignore_patterns=_OTHER_FILES,
            )
        )

    try:
        directory = fetch(*_SMALL_FILES, _WEIGHTS, from_cache=True)
        if _has_weights(directory):
            return directory
    except LocalEntryNotFoundError:
        pass
    except HFValidationError as error:
        raise ModelError(f"model {name!r}: {error}") from None
    try:
        directory = fetch(*_SMALL_FILES)
        if not has_tokenizer(directory):  # warn before a download of hours
            logger.warning(
                "model %r: the repository has no %s and no %s: prompts are token ids, and so are answers",
                name,
                TOKENIZER_FILE,
                SENTENCEPIECE_FILE,
            )
        directory = fetch(*_SMALL_FILES, _WEIGHTS)
    except Exception as error:  # the HTTP client's errors have no base class in common with the hub's
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"model {name!r}: no directory has this name, and as a repository of Hugging Face it cannot be "
            f"downloaded: {reason}"
        ) from error
    if not _has_weights(directory):
        raise ModelError(f"model {name!r}: the repository has no safetensors in Hugging Face layout")
    return directory


def _has_weights(directory: Path) -> bool:
    """Return whether there are weights; a program that reads config.json alone leaves a snapshot without."""
    return any(directory.glob(_WEIGHTS))
