"""What the text of an option stands for; one that stands for nothing is refused before anything is loaded."""

import re
from argparse import ArgumentTypeError
from typing import Final

COUNT_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
# vLLM's other names of the same thing.
DTYPE_NAMES: Final = {"half": "float16", "float": "float32"}
LOAD_FORMAT_NAMES: Final = {"safetensors": "auto"}


def integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"expected integers such as 5,17, got {text!r}") from None


def biases(text: str) -> dict[int, float]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(token_id): float(bias) for token_id, bias in pairs}
    except ValueError:
        raise ArgumentTypeError(f"expected biases such as 5:-1.5,17:2, got {text!r}") from None


def count(text: str) -> int:
    """As vLLM reads it: 4k is 4,000 and 4K is 4,096."""
    match = re.fullmatch(r"(\d{1,19})(\.\d{1,9})?([kmgKMG]?)", text)
    if match is None or (match[2] and match[3] not in ("k", "m", "g")):
        raise ArgumentTypeError(f"expected an integer such as 4096, 4k (4000) or 4K (4096), got {text!r}")
    unit = COUNT_UNITS[match[3]]
    return int(match[1]) * unit + round(float(match[2] or 0) * unit)


def stop_string(text: str) -> str:
    if not text:
        raise ArgumentTypeError("a stop string must not be empty")
    return text


def dtype(text: str) -> str:
    return DTYPE_NAMES.get(text, text)


def load_format(text: str) -> str:
    return LOAD_FORMAT_NAMES.get(text, text)
