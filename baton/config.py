"""Every knob of Baton, one frozen struct per owner, and the only reads of the environment.

Each struct refuses values outside their range when it is made; `engine_config` also refuses unknown keys
and wrong types, and is what configuration files and the command line go through.
"""

import logging
import math
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from baton.config_tree import build, check_between
from baton.errors import ConfigError

# Far beyond any step that a machine could finish; they bound what is allocated for one.
MAX_NUM_SEQS: Final = 2**16
MAX_NUM_BATCHED_TOKENS: Final = 2**20
MAX_QUEUE_DELAY_MS: Final = 60_000  # nobody waits longer for company

MAX_NODE_NAME: Final = 128  # characters
LogFormat: TypeAlias = Literal["text", "json"]
LOG_FORMATS: Final[tuple[LogFormat, ...]] = get_args(LogFormat)

PREFIX: Final = "BATON_"
# Those that are no setting of a cluster, and are read here.
VARIABLES: Final = (
    *("BATON_API_KEY", "BATON_CACHE_DIR", "BATON_CLUSTER_KEY_FILE", "BATON_LOG_FORMAT", "BATON_LOG_LEVEL"),
    "BATON_NODE_NAME",
)


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    """How an engine runs, whatever its model."""

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
    model: str  # a local directory in Hugging Face layout

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model: expected a directory, got an empty string")
        super().__post_init__()


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """The configuration that a nested plain mapping (from YAML, JSON or the command line) spells out.

    Keys are field names, `{"model": ..., "cache": {"page_size": 16}}`; sizes in bytes may be written
    "4GiB", and a part may be its struct, CacheConfig(page_size=16). Raises ConfigError with the full dotted
    key on an unknown key, a wrong type or a bad value.
    """
    return build(EngineConfig, settings)


def cache_directory() -> Path:
    """Where compiled native kernels are kept: BATON_CACHE_DIR, or `baton` in the user's cache folder."""
    own = os.environ.get("BATON_CACHE_DIR")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "baton"


def cluster_key_file() -> str | None:
    """The file that BATON_CLUSTER_KEY_FILE names, which holds the key that the cluster's processes share."""
    return os.environ.get("BATON_CLUSTER_KEY_FILE") or None


def api_key() -> str | None:
    """A client's own, from BATON_API_KEY or, as other clients have it, OPENAI_API_KEY."""
    return os.environ.get("BATON_API_KEY") or os.environ.get("OPENAI_API_KEY") or None


def environment_settings() -> dict[str, str]:
    """Every BATON_* variable by its name."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}


def node_name() -> str:
    """Return this machine's name for operators: BATON_NODE_NAME, or the host name."""
    return (os.environ.get("BATON_NODE_NAME") or socket.gethostname())[:MAX_NODE_NAME]


def set_node_name(name: str) -> None:
    """Name this process's machine, and that of its children, unless the operator named it."""
    os.environ.setdefault("BATON_NODE_NAME", name)


def visible_gpus() -> tuple[str, ...]:
    """NVIDIA GPUs that a process started now would see, in the words of CUDA_VISIBLE_DEVICES."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1"))
    present = Path("/proc/driver/nvidia/gpus")
    return tuple(str(index) for index, _ in enumerate(present.iterdir())) if present.is_dir() else ()


def environment_of_child(*, num_threads: int, gpus: Sequence[str] | None = None) -> dict[str, str]:
    """This process's environment for one that it starts. The operator's own OMP_NUM_THREADS goes first."""
    threads = {"OMP_NUM_THREADS": str(num_threads)}
    seen = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return threads | dict(os.environ) | seen


def prepare_nccl() -> None:
    """Have torch leave a process alive whose NCCL peer has died or hangs; called before any group is made.

    By default torch's watchdog ends the process in both cases. Here deadlines of our own end the transfer,
    and a step that hangs is found by its age. The operator's own values go first.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")


def prepare_ray() -> None:
    """Ray reads these: only who has the token is heard, nothing is reported home, files get no colours."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if os.environ.get("NO_COLOR") or sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")


def ray_asks_for_token() -> bool:
    """Whether a Ray that is started now answers only who has its token, as `prepare_ray` has it."""
    return os.environ.get("RAY_AUTH_MODE", "token") == "token"


def log_level() -> int:
    """The level that BATON_LOG_LEVEL names (DEBUG, INFO ...), WARNING when it is unset."""
    name = os.environ.get("BATON_LOG_LEVEL", "WARNING")
    levels = logging.getLevelNamesMapping()
    if name.upper() not in levels:
        raise ConfigError(f"BATON_LOG_LEVEL: expected one of {', '.join(levels)}, got {name!r}")
    return levels[name.upper()]


def log_format() -> LogFormat:
    """Return the form of log lines that BATON_LOG_FORMAT names; text when it is unset."""
    name = os.environ.get("BATON_LOG_FORMAT", "text")
    if name not in LOG_FORMATS:
        raise ConfigError(f"BATON_LOG_FORMAT: expected text or json, got {name!r}")
    return "json" if name == "json" else "text"


def set_log_format(name: LogFormat) -> None:
    """Have this process, and those that it starts, write log lines in this form."""
    os.environ["BATON_LOG_FORMAT"] = name


def _at_least(key: str, value: float, low: float) -> None:
    if not (math.isfinite(value) and value >= low):
        raise ConfigError(f"{key}: expected at least {low}, got {value}")
