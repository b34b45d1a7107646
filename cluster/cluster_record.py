"""The record of a cluster on this machine, by which `baton status` and other commands find it.

Each running `baton serve` keeps one file, which only its user can read, and removes it when the cluster ends.
Machines and containers may share the cache, so each has a folder of its own for its records. A new boot of a
machine begins a new folder and removes the earlier ones.
"""

import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from baton.cluster.cluster_key import MAX_KEYS, Keys
from baton.cluster.files import make_folder, write_secret
from baton.cluster.runtimes.base import started_at
from baton.config.environment import cache_directory
from baton.errors import ConfigError
from baton.messages.workers import Routers

MACHINE_ID: Final = Path("/etc/machine-id")
NO_ID: Final = (b"", b"uninitialized")  # contents of that file in images, before the first boot
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
    """Yield a function that writes this process's record. Leaving the block removes the record.

    Raises ConfigError when there is no folder for records and none can be made.
    """
    path = _directory() / f"{os.getpid()}-{started_at(os.getpid())}.json"
    make_folder(path.parent, mode=0o700)  # before a start that takes minutes
    _remove_earlier_boots()

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
    directory = _directory()
    boot_and_container = directory.name.partition("-")[2]  # a machine may get another name while it runs
    for path in sorted(directory.parent.glob(f"*-{boot_and_container}/*.json")):
        pid, _, started = path.stem.partition("-")
        if not pid.isdecimal() or started != str(started_at(int(pid))):  # its `serve` was killed
            path.unlink(missing_ok=True)
            continue
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=ClusterRecord))
        except (OSError, msgspec.MsgspecError):
            continue
    return found


def _remove_earlier_boots() -> None:
    """Remove the folders of this machine's earlier boots: none of their processes runs.

    A folder that has changed during this boot belongs to another machine of the same name. A machine without
    an id cannot tell its earlier folders from those of others, and leaves them.
    """
    directory = _directory()
    machine, boot, _ = directory.name.split("-")
    began_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    for other in directory.parent.glob(f"{machine}-*-*"):
        with suppress(FileNotFoundError):  # another process removes the folder too
            if other.name.split("-")[1] != boot and other.stat().st_mtime < began_s:
                shutil.rmtree(other, ignore_errors=True)


def _directory() -> Path:
    """Return the folder for processes that see each other's ids: those of one container, since one boot.

    Its name is MACHINE-BOOT-CONTAINER, a hash of each. A machine without an id is known by its boot: another
    machine may have its name, and must not take its records for those of an earlier boot.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    machine_id = MACHINE_ID.read_bytes() if MACHINE_ID.exists() else b""
    if machine_id.strip() in NO_ID:
        machine_id = boot
    machine = machine_id + socket.gethostname().encode()  # many containers have the same id
    parts = machine, boot, os.readlink(b"/proc/self/ns/pid")
    name = "-".join(hashlib.blake2b(part, digest_size=6).hexdigest() for part in parts)
    return cache_directory() / "clusters" / name
