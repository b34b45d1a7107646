"""Every knob of Baton, one frozen struct per owner, and the only reads of the environment.

Each struct refuses values outside their range when it is made; `engine_config` also refuses unknown keys
and wrong types, and is what configuration files and the command line go through.
"""

import difflib
import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

import msgspec

from baton.errors import ConfigError

StructT = TypeVar("StructT", bound=msgspec.Struct)

BYTE_UNITS: Final = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}

# Far beyond any step that a machine could finish; they bound what is allocated for one.
MAX_NUM_SEQS: Final = 2**16
MAX_NUM_BATCHED_TOKENS: Final = 2**20
MAX_QUEUE_DELAY_MS: Final = 60_000  # nobody waits longer for company


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048  # tokens computed in one step, decodes and prefill chunks together
    policy: Literal["continuous", "static", "dynamic"] = "continuous"
    max_queue_delay_ms: float = 0.0  # how long a prefill may wait for others to share its step
    preferred_batch_sizes: tuple[int, ...] = ()  # a waiting window closes early when it reaches one of these

    def __post_init__(self) -> None:
        _between("scheduler.max_num_seqs", self.max_num_seqs, 1, MAX_NUM_SEQS)
        _between("scheduler.max_num_batched_tokens", self.max_num_batched_tokens, 1, MAX_NUM_BATCHED_TOKENS)
        _between("scheduler.max_queue_delay_ms", self.max_queue_delay_ms, 0, MAX_QUEUE_DELAY_MS)
        for size in self.preferred_batch_sizes:
            _between("scheduler.preferred_batch_sizes", size, 1, self.max_num_seqs)


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    page_size: int = 16  # tokens
    kv_cache_memory_bytes: int | None = None  # None: what gpu_memory_utilization leaves
    gpu_memory_utilization: float = 0.9  # share of the device that weights, activations and pages may take
    host_cache_memory_bytes: int = 0  # host tier that pages swap to; 0: none
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        _at_least("cache.page_size", self.page_size, 1)
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"cache.page_size: expected a power of two, got {self.page_size}")
        if self.kv_cache_memory_bytes is not None:
            _at_least("cache.kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        _between("cache.gpu_memory_utilization", self.gpu_memory_utilization, 0, 1)
        if self.gpu_memory_utilization == 0:
            raise ConfigError("cache.gpu_memory_utilization: expected more than 0, got 0")
        _at_least("cache.host_cache_memory_bytes", self.host_cache_memory_bytes, 0)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str  # a local directory in Hugging Face layout
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: the checkpoint's
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: seeded random weights, only config.json is read
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tensor_parallel_size: int = 1
    max_model_len: int | None = None  # tokens, prompt and output together; None: the model's own limit
    seed: int = 0
    cache: CacheConfig = msgspec.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = msgspec.field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model: expected a directory, got an empty string")
        _at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)  # a prompt of one token, an answer of one
        _between("seed", self.seed, 0, 2**63 - 1)


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """The configuration that a nested plain mapping (from YAML, JSON or the command line) spells out.

    Keys are field names, `{"model": ..., "cache": {"page_size": 16}}`; sizes in bytes may be written
    "4GiB", and a part may be its struct, CacheConfig(page_size=16). Raises ConfigError with the full dotted
    key on an unknown key, a wrong type or a bad value.
    """
    return _build(EngineConfig, settings, "")


def parse_bytes(text: str) -> int:
    """Bytes that "4GiB", "512 MiB", "1.5GB" or "4096" stand for; raises ConfigError otherwise."""
    match = re.fullmatch(r"\s*(\d{1,19}(?:\.\d{1,19})?)\s*([A-Za-z]*)\s*", text)
    unit = BYTE_UNITS.get(match[2] or "B") if match else None
    if match is None or unit is None:
        raise ConfigError(f'expected a size such as "4GiB" (units {", ".join(BYTE_UNITS)}), got {text!r}')
    return int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)


def cache_directory() -> Path:
    """Where compiled native kernels are kept: BATON_CACHE_DIR, or `baton` in the user's cache folder."""
    own = os.environ.get("BATON_CACHE_DIR")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "baton"


def log_level() -> int:
    """The level that BATON_LOG_LEVEL names (DEBUG, INFO ...), WARNING when it is unset."""
    name = os.environ.get("BATON_LOG_LEVEL", "WARNING")
    levels = logging.getLevelNamesMapping()
    if name.upper() not in levels:
        raise ConfigError(f"BATON_LOG_LEVEL: expected one of {', '.join(levels)}, got {name!r}")
    return levels[name.upper()]


def _build(struct_type: type[StructT], settings: object, prefix: str) -> StructT:
    if isinstance(settings, struct_type):  # nothing has checked its types
        settings = msgspec.structs.asdict(settings)
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{prefix or 'config'}: expected a mapping, got {_show(settings)}")
    fields = {_join(prefix, field.name): field for field in msgspec.structs.fields(struct_type)}
    values = {}
    for name, value in settings.items():
        key = _join(prefix, name)
        if key not in fields:
            raise ConfigError(_unknown_key(key, _known_keys(struct_type, prefix)))
        values[fields[key].name] = _value(fields[key].type, value, key)
    for key, field in fields.items():
        if field.required and field.name not in values:
            raise ConfigError(f"{key}: expected a value, got none")
    return struct_type(**values)


def _join(prefix: str, name: object) -> str:
    return f"{prefix}.{name}" if prefix else str(name)


def _value(expected: Any, value: object, key: str) -> Any:
    if _is_struct(expected):
        return _build(expected, value, key)
    if key.endswith("_bytes") and isinstance(value, str):
        try:
            return parse_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None
    try:
        return msgspec.convert(value, expected)
    except msgspec.ValidationError:
        raise ConfigError(f"{key}: expected {_describe(expected)}, got {_show(value)}") from None


def _unknown_key(key: str, known: list[str]) -> str:
    # Leaves are compared alone: a shared prefix would make any two keys of one section look alike.
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    nearest = difflib.get_close_matches(key.rpartition(".")[2], leaves, n=1)
    hint = f"did you mean {leaves[nearest[0]]!r}?" if nearest else f"known keys are {', '.join(known)}"
    return f"unknown configuration key {key!r}; {hint}"


def _known_keys(struct_type: type[msgspec.Struct], prefix: str) -> list[str]:
    """Dotted keys of a struct and of those inside it, outermost first."""
    fields = msgspec.structs.fields(struct_type)
    own = [_join(prefix, field.name) for field in fields]
    nested = [
        _known_keys(field.type, _join(prefix, field.name)) for field in fields if _is_struct(field.type)
    ]
    return own + [key for keys in nested for key in keys]


def _is_struct(expected: Any) -> bool:
    return isinstance(expected, type) and issubclass(expected, msgspec.Struct)


def _describe(expected: Any) -> str:
    if get_origin(expected) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(expected))
    return expected.__name__ if isinstance(expected, type) and not get_args(expected) else str(expected)


def _show(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"


def _at_least(key: str, value: float, low: float) -> None:
    if not (math.isfinite(value) and value >= low):
        raise ConfigError(f"{key}: expected at least {low}, got {value}")


def _between(key: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(f"{key}: expected {low} to {high}, got {value}")
