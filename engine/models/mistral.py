"""Mistral: every layer has a sliding window, unless the config turns it off."""

from baton.engine.models.architecture import Architecture, Traits
from baton.engine.models.json_file import JsonObject


def read_traits(keys: JsonObject, num_layers: int) -> Traits:
    """Read `sliding_window`; null turns it off."""
    window = None if keys.is_null("sliding_window") else keys.count("sliding_window", 4096)
    return Traits(sliding_windows=(window,) * num_layers)


MISTRAL = Architecture(model_type="mistral", read_traits=read_traits)
