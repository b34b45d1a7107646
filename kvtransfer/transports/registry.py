"""Which transport a pair of ranks uses, and which it falls back on.

The order is a pure function of where the two ranks are and what the destination offers. Whatever comes first
is opened; one that cannot be opened, or breaks, makes way for the next (kvtransfer/ranks/transports.py). When
none is left the destination computes the pages itself.
"""

import threading
from collections.abc import Collection
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec

from baton.errors import ConfigError

TransportName = Literal["shm", "cuda_ipc", "nccl", "gloo", "tcp"]
AUTO: Final = "auto"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class RankLocation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a rank's pages are. `host` is the same for two ranks only if they share a kernel."""

    host: str
    device: Literal["cpu", "cuda"]


def this_host() -> str:
    """This boot of this machine."""
    return _BOOT_ID.read_text().strip()


def order(
    source: RankLocation, destination: RankLocation, offered: Collection[str], asked: str = AUTO
) -> tuple[TransportName, ...]:
    """The transports to try, best first; when all have failed, recompute.

    offered: what the destination has opened doors for. asked: one transport to try first, or `auto`.
    ConfigError for a name that is none, or that cannot serve this pair.
    """
    usable = _usable(source, destination)
    if asked == AUTO:
        names: tuple[TransportName, ...] = usable
    else:
        known = [name for name in get_args(TransportName) if name == asked]
        if not known:
            expected = ", ".join((AUTO, *get_args(TransportName)))
            raise ConfigError(f"transport: expected one of {expected}, got {asked!r}")
        if not _can_serve(asked, source, destination):
            raise ConfigError(f"transport: {asked} cannot serve {source} to {destination}")
        names = (known[0], *(name for name in usable if name == "tcp" and name != asked))
    return tuple(name for name in names if name in offered)


def _usable(source: RankLocation, destination: RankLocation) -> tuple[TransportName, ...]:
    is_same_host = source.host == destination.host
    if source.device == destination.device == "cpu":
        return ("shm", "tcp") if is_same_host else ("tcp",)
    if source.device == destination.device == "cuda":
        return ("cuda_ipc", "nccl", "tcp") if is_same_host else ("nccl", "tcp")
    return ("tcp",)


def _can_serve(name: str, source: RankLocation, destination: RankLocation) -> bool:
    """gloo is never chosen unasked: on a CPU tcp and shm are both faster."""
    return name in _usable(source, destination) or (
        name == "gloo" and source.device == destination.device == "cpu"
    )


class TransportCounters:
    """Which transports opened and which did not, since the start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_opened: dict[str, int] = {name: 0 for name in get_args(TransportName)}
        self.num_failed: dict[str, int] = {name: 0 for name in get_args(TransportName)}
        self.num_fallbacks = 0  # pairs that did not get their first choice
        self.num_recomputes = 0  # pairs that got none

    def by_name(self) -> dict[str, int]:
        """Those that are not zero, as "opened_shm"."""
        counts = {f"opened_{name}": number for name, number in self.num_opened.items()}
        counts |= {f"failed_{name}": number for name, number in self.num_failed.items()}
        counts |= {"fallbacks": self.num_fallbacks, "recomputes": self.num_recomputes}
        return {name: number for name, number in counts.items() if number}

    def opened(self, name: TransportName, num_before: int) -> None:
        with self._lock:
            self.num_opened[name] += 1
            self.num_fallbacks += num_before > 0

    def failed(self, name: TransportName) -> None:
        """It could not be opened, or broke later."""
        with self._lock:
            self.num_failed[name] += 1

    def recomputed(self) -> None:
        with self._lock:
            self.num_recomputes += 1
