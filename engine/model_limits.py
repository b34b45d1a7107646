"""What a model's shape allows, asked before anything is loaded; no torch here."""

from baton.config import EngineSettings
from baton.engine.hf_config import ModelConfig
from baton.errors import ConfigError


def choose_max_model_len(config: EngineSettings, model: ModelConfig) -> int:
    asked = config.max_model_len
    if asked is not None and asked > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len: the model has positions for {model.max_position_embeddings} tokens, got {asked}"
        )
    return asked or model.max_position_embeddings


def check_split(model: ModelConfig, num_ranks: int) -> None:
    """ConfigError unless every tensor-parallel rank can have an equal part."""
    sizes = {
        "KV heads": model.num_kv_heads,
        "attention heads": model.num_heads,
        "intermediate_size": model.intermediate_size,
    }
    for what, size in sizes.items():
        if size % num_ranks:
            raise ConfigError(f"{what}: {size} cannot be split over {num_ranks} tensor-parallel ranks")
