"""What `baton serve` would fail of once its workers load, found before any process is started.

Files are read, no weights: it takes no torch, and milliseconds.
"""

from pathlib import Path
from typing import Final, Literal, TypeAlias

from baton.cluster.model_directory import resolve_model
from baton.engine.checkpoint_files import read_entries
from baton.engine.hf_config import read_model_config
from baton.engine.model_limits import check_split, choose_max_model_len
from baton.errors import ConfigError
from baton.gateway.chat_template import ChatTemplate
from baton.gateway.tenants import Tenants
from baton.serve_config import ServeConfig
from baton.worker import WorkerRole

Speech: TypeAlias = Literal["chat", "text", "token ids"]

NO_KEY: Final = bytes(16)  # what tenants' pages are kept apart by matters to nobody here


def check_model(config: ServeConfig) -> Path:
    """The model's directory. ModelError or ConfigError, which begins with the setting, unless every worker
    could load its part of it.
    """
    directory = resolve_model(config.model)
    model = read_model_config(directory)
    if config.engine.load_format != "dummy":
        read_entries(directory)
    choose_max_model_len(config.engine, model)
    for role, workers in ((WorkerRole.PREFILL, config.prefill), (WorkerRole.DECODE, config.decode)):
        if workers.num_workers:
            try:
                check_split(model, workers.engine(config.engine).tensor_parallel_size)
            except ConfigError as error:
                whose = "engine" if workers.tensor_parallel_size is None else role
                raise ConfigError(f"{whose}.tensor_parallel_size: {error}") from None
    return directory


def check_tenants(config: ServeConfig) -> None:
    """ConfigError unless the file of tenants, where one is given, can be read."""
    if config.tenants is not None:
        Tenants.from_file(Path(config.tenants), NO_KEY)


def speech_of(directory: Path, chat_template: str | None = None) -> Speech:
    """What the model can be asked in. ModelError for a damaged file, ConfigError for a `chat_template` that
    cannot be read.
    """
    if not (directory / "tokenizer.json").exists():
        return "token ids"
    return "text" if ChatTemplate.from_directory(directory, chat_template) is None else "chat"
