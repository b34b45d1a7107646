"""Mistral: every layer sees a sliding window, unless the config turns it off."""

from baton.engine.architectures.traits import Traits
from baton.engine.json_file import JsonObject


def mistral(keys: JsonObject, num_layers: int) -> Traits:
    window = None if keys.is_null("sliding_window") else keys.count("sliding_window", 4096)
    return Traits(sliding_windows=(window,) * num_layers)
