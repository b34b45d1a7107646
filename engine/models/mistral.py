"""Mistral: every layer sees a sliding window, unless the config turns it off."""

from baton.engine.models.json_file import JsonObject
from baton.engine.models.traits import Traits


def mistral(keys: JsonObject, num_layers: int) -> Traits:
    window = None if keys.is_null("sliding_window") else keys.count("sliding_window", 4096)
    return Traits(sliding_windows=(window,) * num_layers)
