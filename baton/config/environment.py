"""The only reads of the process environment, and the environment of child processes."""

import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from baton.errors import ConfigError

MAX_NODE_NAME: Final = 128  # characters
LogFormat: TypeAlias = Literal["text", "json"]
LOG_FORMATS: Final[tuple[LogFormat, ...]] = get_args(LogFormat)
PREFIX: Final = "BATON_"
_MPS_PRIORITY: Final = "CUDA_MPS_CLIENT_PRIORITY"
# Idle OpenMP threads of torch sleep. By default they spin and take cores from other workers: two workers that
# loaded a model on two cores took twice the processor time.
_PASSIVE_WAIT: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
# Variables that are no settings of a cluster, and are read here.
VARIABLES: Final = (
    *("BATON_API_KEY", "BATON_CACHE_DIR", "BATON_CLUSTER_KEY_FILE", "BATON_LOG_FORMAT", "BATON_LOG_LEVEL"),
    "BATON_NODE_NAME",
)


def cache_directory() -> Path:
    """Return Baton's cache folder, of compiled kernels, records of clusters and logs of plans.

    BATON_CACHE_DIR, or `baton` in the user's cache folder.
    """
    own = os.environ.get("BATON_CACHE_DIR")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "baton"


def cluster_key_file() -> str | None:
    """Return the file that BATON_CLUSTER_KEY_FILE names, which holds the cluster key."""
    return os.environ.get("BATON_CLUSTER_KEY_FILE") or None


def api_key() -> str | None:
    """Return a client's key from BATON_API_KEY or OPENAI_API_KEY."""
    return os.environ.get("BATON_API_KEY") or os.environ.get("OPENAI_API_KEY") or None


def otel_service_name() -> str:
    """Return the name of this cluster in traces: OTEL_SERVICE_NAME, or baton."""
    return os.environ.get("OTEL_SERVICE_NAME") or "baton"


def environment_settings() -> dict[str, str]:
    """Return every BATON_* variable by name."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}


def node_name() -> str:
    """Return this machine's name for operators: BATON_NODE_NAME, or the host name."""
    return (os.environ.get("BATON_NODE_NAME") or socket.gethostname())[:MAX_NODE_NAME]


def set_node_name(name: str) -> None:
    """Name this process's machine, and that of its children, unless the operator named it."""
    os.environ.setdefault("BATON_NODE_NAME", name)


def chosen_gpus() -> tuple[str, ...] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names; None where it is not set."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return None
    return tuple(name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1"))


def environment_of_child(
    *, num_threads: int, gpus: Sequence[str] | None = None, mps_priority: int | None = None
) -> dict[str, str]:
    """Return the environment of a child process. Thread settings of the operator take precedence.

    A process tokenizes one text at a time. mps_priority: see `mps_variables`.
    """
    threads = {
        "OMP_NUM_THREADS": str(num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        **_PASSIVE_WAIT,
    }
    seen = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return threads | dict(os.environ) | seen | mps_variables(mps_priority)


def environment_of_template(num_threads: int) -> dict[str, str]:
    """Return the environment of a process that forks children with that many threads at the most.

    OpenBLAS gets one thread: it starts its threads when it is loaded.
    """
    return environment_of_child(num_threads=num_threads) | {"OPENBLAS_NUM_THREADS": "1"}


def replace_environment(variables: dict[str, str]) -> set[str]:
    """Replace the environment of the present process; return the names of the variables that differ."""
    changed = {name for name, _ in variables.items() ^ os.environ.items()}
    os.environ.clear()
    os.environ.update(variables)
    return changed


def mps_variables(priority: int | None) -> dict[str, str]:
    """Return the variables of a process that may be a client of CUDA's MPS; they do nothing without MPS.

    priority: 0 normal, 1 below normal; None: no variables. A CUDA_MPS_CLIENT_PRIORITY of the operator, for
    all processes, has precedence.
    """
    if priority is None:
        return {}
    return {_MPS_PRIORITY: os.environ.get(_MPS_PRIORITY, str(priority))}


def prepare_nccl() -> None:
    """Keep torch from ending this process when an NCCL peer has died or hangs; call before any group is made.

    Baton's own deadlines end such transfers, and a step that hangs is found by its age. Values of the
    operator have precedence.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")


def prepare_ray() -> None:
    """Set defaults of Ray: token authentication, no usage statistics, no colours in files.

    Actors of a Ray that is started afterwards inherit that idle OpenMP threads sleep.
    """
    for name, value in _PASSIVE_WAIT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if os.environ.get("NO_COLOR") or sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")


def ray_asks_for_token() -> bool:
    """Return whether a Ray started now requires its token, as `prepare_ray` sets it."""
    return os.environ.get("RAY_AUTH_MODE", "token") == "token"


def log_level() -> int:
    """Return the level that BATON_LOG_LEVEL names (DEBUG, INFO ...), WARNING when it is unset."""
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
    """Set the form of log lines of this process and its children."""
    os.environ["BATON_LOG_FORMAT"] = name
