"""The key that the processes of a cluster share. A process that holds the key is trusted.

A key file holds one key, or two on a line each while the key is rotated: processes use the first and accept
both. A process reads its key file again each second (`KeyWatch`).
"""

import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from baton.clock import Clock
from baton.errors import ConfigError, reason_of
from baton.rpc.auth import MIN_KEY_BYTES

KEY_BYTES: Final = 32
MAX_KEY_BYTES: Final = 1024
MAX_KEYS: Final = 2
# Bits that a key file must not have. Its group may read the file: Kubernetes mounts secrets that way for
# users other than root.
NOT_OURS: Final = 0o027
READ_EVERY_S: Final = 1.0
USE_AFTER_S: Final = 5.0  # until a new key is used: all processes accept the key by then

Keys: TypeAlias = tuple[bytes, ...]  # one or two cluster keys, the one to use first

logger = logging.getLogger(__name__)


def new_key() -> bytes:
    """Return a random key of KEY_BYTES bytes, in hex digits."""
    return secrets.token_hex(KEY_BYTES).encode()


def read_keys(path: Path) -> Keys:
    """ConfigError unless the file holds one or two keys that others of this machine cannot read."""
    try:
        if path.stat().st_mode & NOT_OURS:
            raise ConfigError(f"cluster key: {path} can be read by others of this machine: chmod 600 {path}")
        keys = tuple(path.read_bytes().split())
    except FileNotFoundError:
        made = f"make it with `baton cluster-key new --cluster-key-file {path}`"
        raise ConfigError(f"cluster key: there is no file {path}: {made}") from None
    except OSError as error:
        raise ConfigError(f"cluster key: {path} cannot be read: {reason_of(error)}") from None
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"cluster key: {path}: expected one or two keys, a line each, got {len(keys)}")
    for key in keys or (b"",):
        if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            raise ConfigError(
                f"cluster key: {path}: expected {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, got {len(key)}: "
                f"make one with: (umask 077; openssl rand -hex {KEY_BYTES} > {path})"
            )
    return keys


class KeyWatch:
    """Cluster keys that may change while a process runs."""

    def __init__(self, read: Callable[[], Keys], clock: Clock) -> None:
        """read: returns the present keys. Raises what `read` raises: ConfigError."""
        self.keys = self._found = read()  # `keys` are in use now
        self._read = read
        self._clock = clock
        self._use_s = 0.0  # when the first key of `_found` is used
        self._complaint = ""

    def look(self) -> bool:
        """Read the keys again. Return whether `keys` have changed.

        A new key is accepted at once, beside the key in use, and used USE_AFTER_S later: other processes
        may read the file later than this one.
        """
        try:
            found = self._read()
        except ConfigError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.warning("the cluster keys stay the same: %s", error)
            return False
        self._complaint = ""
        now_s, before = self._clock.now_s(), self.keys
        if found != self._found:
            self._found = found
            self._use_s = now_s if found[0] in before else now_s + USE_AFTER_S
        self.keys = found if now_s >= self._use_s else (before[0], found[0])
        return self.keys != before
