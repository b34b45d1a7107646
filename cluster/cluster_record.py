"""The record of a cluster on this machine, by which `baton status` and other commands find it.

Each running `baton serve` keeps one file, which only its user can read, and removes it when the cluster ends.
Machines and containers may share the cache, so each has a folder of its own for its records.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from baton.cluster.cluster_key import MAX_KEYS, Keys, write_secret
from baton.cluster.runtimes.base import started_at
from baton.config.environment import cache_directory
from baton.errors import ConfigError
from baton.messages.workers import Routers

EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The addresses and keys of one cluster."""

    host: str  # address that the API listens on
    port: int  # of the API
    routers: Routers
    keys: Annotated[Keys, Meta(min_length=1, max_length=MAX_KEYS)]
    settings: dict[str, Any] = {}  # of the cluster, without passwords

    @property
    def url(self) -> str:
        """The API's address for clients on this machine, without /v1."""
        return url(self.host, self.port)


def url(host: str, port: int) -> str:
    """Return the URL of a server on this machine that listens on `host`, which may mean every address."""
    reached = EVERYWHERE.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reached}:{port}"


@contextmanager
def recorded() -> Iterator[Callable[[ClusterRecord], None]]:
    """Yield a function that writes this process's record. Leaving the block removes the record."""
    path = _directory() / f"{os.getpid()}-{started_at(os.getpid())}.json"

    def record(what: ClusterRecord) -> None:
        write_secret(path, msgspec.json.encode(what))

    try:
        yield record
    finally:
        path.unlink(missing_ok=True)


def find_record(port: int | None = None) -> ClusterRecord:
    """Return the record of the cluster with its API at `port`, or the only one.

    ConfigError: none, or several.
    """
    records = [record for record in _records() if port in (None, record.port)]
    if len(records) == 1:
        return records[0]
    if not records:
        which = "cluster of yours" if port is None else f"cluster of yours with its API at port {port}"
        raise ConfigError(
            f"no {which} runs on this machine: start one with `baton serve`, or name its router with "
            "--router HOST:PORT and --cluster-key-file FILE"
        )
    ports = ", ".join(str(record.port) for record in records)
    raise ConfigError(f"several clusters run on this machine: choose by the API's port, --port {ports}")


def is_served(port: int) -> bool:
    """Return whether a cluster of this user on this machine has its API at `port`."""
    return any(record.port == port for record in _records())


def _records() -> list[ClusterRecord]:
    found = []
    for path in sorted(_directory().glob("*.json")):
        pid, _, started = path.stem.partition("-")
        if not pid.isdecimal() or started != str(started_at(int(pid))):  # its `serve` was killed
            path.unlink(missing_ok=True)
            continue
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=ClusterRecord))
        except (OSError, msgspec.MsgspecError):
            continue
    return found


def _directory() -> Path:
    """Return the folder for processes that see each other's ids: those of one container, since one boot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    machine = hashlib.blake2b(boot + os.readlink(b"/proc/self/ns/pid"), digest_size=6).hexdigest()
    return cache_directory() / "clusters" / machine
