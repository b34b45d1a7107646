"""How `baton status` and its like find a cluster of this machine: what its `serve` has left for its user.

One file for each running `serve`, readable by its user alone; it goes when the cluster does.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from baton.cluster.cluster_key import MAX_KEYS, Keys, write_secret
from baton.config.environment import cache_directory
from baton.errors import ConfigError
from baton.messages.workers import Routers

EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str  # that the API listens on
    port: int
    routers: Routers
    keys: Annotated[Keys, Meta(min_length=1, max_length=MAX_KEYS)]

    @property
    def url(self) -> str:
        return url(self.host, self.port)


def url(host: str, port: int) -> str:
    """Where to connect to what listens on `host`, which may mean every address of this machine."""
    reached = EVERYWHERE.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reached}:{port}"


@contextmanager
def recorded() -> Iterator[Callable[[ClusterRecord], None]]:
    """Leave a record, once there is one to leave, for as long as the block lasts."""
    path = _directory() / f"{os.getpid()}.json"

    def record(what: ClusterRecord) -> None:
        write_secret(path, msgspec.json.encode(what))

    try:
        yield record
    finally:
        path.unlink(missing_ok=True)


def find_record(port: int | None = None) -> ClusterRecord:
    """Of the cluster whose API is at `port`, or of the only one. ConfigError: there is none, or several."""
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
    """Whether a cluster of this user and machine has its API at `port`."""
    return any(record.port == port for record in _records())


def _records() -> list[ClusterRecord]:
    found = []
    for path in sorted(_directory().glob("*.json")):
        if not Path(f"/proc/{path.stem}").exists():  # its `serve` was killed
            path.unlink(missing_ok=True)
            continue
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=ClusterRecord))
        except (OSError, msgspec.MsgspecError):
            continue
    return found


def _directory() -> Path:
    return cache_directory() / "clusters"
