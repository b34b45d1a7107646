"""Baton's only reads of the process environment, and the environment of the processes that it starts."""

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
# Those that are no setting of a cluster, and are read here.
VARIABLES: Final = (
    *("BATON_API_KEY", "BATON_CACHE_DIR", "BATON_CLUSTER_KEY_FILE", "BATON_LOG_FORMAT", "BATON_LOG_LEVEL"),
    "BATON_NODE_NAME",
)


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
