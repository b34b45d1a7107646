"""The settings of an engine: scheduler, cache, model.

Each struct rejects values outside their range; `engine_config` also rejects unknown keys and wrong types.
"""

import math
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from baton.config.loader import build, check_between
from baton.errors import ConfigError

# Far beyond any step that a machine could finish; they bound the memory of one step.
MAX_NUM_SEQS: Final = 2**16
MAX_NUM_BATCHED_TOKENS: Final = 2**20
MAX_QUEUE_DELAY_MS: Final = 60_000


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The size and the policy of steps."""

    max_num_seqs: int = 64  # sequences in one step of a worker
    max_num_batched_tokens: int = 2048  # tokens computed in one step, decodes and prefill chunks together
    # How steps are filled. continuous: sequences join and leave at every step; static, dynamic: in batches.
    policy: Literal["continuous", "static", "dynamic"] = "continuous"
    max_queue_delay_ms: float = 0.0  # how long a prefill may wait for others to share its step
    preferred_batch_sizes: tuple[int, ...] = ()  # a waiting window closes early when it reaches one of these

    def __post_init__(self) -> None:
        check_between("scheduler.max_num_seqs", self.max_num_seqs, 1, MAX_NUM_SEQS)
        check_between(
            "scheduler.max_num_batched_tokens", self.max_num_batched_tokens, 1, MAX_NUM_BATCHED_TOKENS
        )
        check_between("scheduler.max_queue_delay_ms", self.max_queue_delay_ms, 0, MAX_QUEUE_DELAY_MS)
        for size in self.preferred_batch_sizes:
            check_between("scheduler.preferred_batch_sizes", size, 1, self.max_num_seqs)


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV pages on the device and on the host."""

    page_size: int = 16  # tokens in one KV page, a power of two
    kv_cache_memory_bytes: int | None = None  # bytes for KV pages; None: what gpu_memory_utilization leaves
    gpu_memory_utilization: float = 0.9  # share of the device that weights, activations and KV pages may take
    host_cache_memory_bytes: int = 0  # bytes of host memory KV pages swap to; 0: preempted KV is recomputed
    enable_prefix_caching: bool = True  # reuse KV pages of equal prompt prefixes

    def __post_init__(self) -> None:
        _at_least("cache.page_size", self.page_size, 1)
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"cache.page_size: expected a power of two, got {self.page_size}")
        if self.kv_cache_memory_bytes is not None:
            _at_least("cache.kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        check_between("cache.gpu_memory_utilization", self.gpu_memory_utilization, 0, 1)
        if self.gpu_memory_utilization == 0:
            raise ConfigError("cache.gpu_memory_utilization: expected more than 0, got 0")
        _at_least("cache.host_cache_memory_bytes", self.host_cache_memory_bytes, 0)


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of an engine, apart from its model."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of weights; auto: the checkpoint's
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: seeded random weights, only config.json is read
    device: Literal["auto", "cpu", "cuda"] = "auto"  # of workers; auto: cuda where there is a GPU
    tensor_parallel_size: int = 1  # ranks that one worker splits the model over
    max_model_len: int | None = None  # tokens, prompt and output together; None: the model's own limit
    seed: int = 0  # of sampling for requests without a seed of their own, and of dummy weights
    cache: CacheConfig = msgspec.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = msgspec.field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        _at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)  # a prompt of one token, an answer of one
        check_between("seed", self.seed, 0, 2**63 - 1)


class EngineConfig(EngineSettings, frozen=True):
    """The settings of an engine with its model."""

    model: str  # a local directory in Hugging Face layout

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model: expected a directory, got an empty string")
        super().__post_init__()


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration in a nested plain mapping (from YAML, JSON or the command line).

    Keys are field names, `{"model": ..., "cache": {"page_size": 16}}`; sizes in bytes may be written
    "4GiB", and a part may be its struct, CacheConfig(page_size=16). Raises ConfigError with the full dotted
    key on an unknown key, a wrong type or a bad value.
    """
    return build(EngineConfig, settings)


def _at_least(key: str, value: float, low: float) -> None:
    if not (math.isfinite(value) and value >= low):
        raise ConfigError(f"{key}: expected at least {low}, got {value}")


class RankSidecar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Code that runs beside each rank that is a process of its own: see engine/runner/tp_worker.py.

    Every rank's process imports the factory itself; only the two strings cross to the process.
    """

    factory: str  # "package.module:name"; called with `arguments`, it returns the sidecar of one rank
    arguments: str
