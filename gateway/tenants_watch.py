"""The tenants file as it is now: it is looked at again and again, and taken when it is well.

1. A file that looks other than the one that was read last is left alone until it has not changed for
   SETTLE_S: it may be half written.
2. Then it is read. If all of it is well, its tenants are those of the gateway from now on.
3. If anything is wrong in it, or it is gone, the tenants stay what they were, and a warning says so, once.

What runs is not touched by any of this: a key that is revoked opens nothing new.
"""

import asyncio
import logging
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

from baton.clock import Clock
from baton.errors import ConfigError
from baton.gateway.tenants import Tenants
from baton.gateway.tenants_file import read_tenants
from baton.keys import ClusterKeys

LOOK_EVERY_S: Final = 0.2
SETTLE_S: Final = 0.2

logger = logging.getLogger(__name__)


class Signature(NamedTuple):
    """What changes whenever a file does."""

    device: int
    inode: int
    num_bytes: int
    written_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> "Signature | None":
        """None of a file that is not there."""
        try:
            status = path.stat()
        except OSError:
            return None
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class TenantsWatch:
    """`look` does all its work on the thread that calls it; `tenants` may be asked on another meanwhile."""

    def __init__(self, path: Path, keys: ClusterKeys, clock: Clock) -> None:
        """keys: a gateway's. Raises ConfigError for a file that is wrong: there is no earlier one."""
        self.counters: Counter[str] = Counter()  # changes that were "taken", and "refused"
        self._path = path
        self._clock = clock
        self._known = Signature.of(path)  # of what was read last, for better or worse; taken before reading
        self._seen = self._known  # by the last look
        self._seen_s = clock.now_s()  # since when it has looked like that
        self.tenants = Tenants.from_file(path, keys)

    def look(self) -> bool:
        """Whether the tenants are others now."""
        signature, now_s = Signature.of(self._path), self._clock.now_s()
        if signature != self._seen or now_s < self._seen_s:
            self._seen, self._seen_s = signature, now_s
        if signature == self._known or now_s - self._seen_s < SETTLE_S:
            return False
        self._known = signature
        return self._take()

    async def keep_looking(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await asyncio.to_thread(self.look)
            except Exception:  # a bug of ours must not leave revoked keys in force for ever
                logger.exception("%s could not be looked at", self._path)

    def _take(self) -> bool:
        try:
            file = read_tenants(self._path)
        except ConfigError as error:
            self.counters["refused"] += 1
            logger.warning("the tenants stay what they were: %s", error)
            return False
        self.tenants.replace(file)
        self.counters["taken"] += 1
        num_keys = sum(len(entry.keys) for entry in file.tenants.values())
        logger.info("%s: %d tenants with %d keys are in force", self._path, len(file.tenants), num_keys)
        return True
