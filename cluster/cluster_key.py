"""The key that the processes of a cluster share; whoever holds it is one of them."""

import os
import secrets
from pathlib import Path
from typing import Final

from baton.config import cluster_key_file
from baton.errors import ConfigError
from baton.keys import MIN_KEY_BYTES

KEY_BYTES: Final = 32
MAX_KEY_BYTES: Final = 1024
NOT_OURS: Final = 0o027  # a group may read it: Kubernetes hands a secret to a user that is not root so


def cluster_key(file: str | None) -> bytes:
    """What is in `file`, or in the one that BATON_CLUSTER_KEY_FILE names, or a new key where neither is."""
    name = file or cluster_key_file()
    return secrets.token_hex(KEY_BYTES).encode() if name is None else read_key(Path(name))


def read_key(path: Path) -> bytes:
    """ConfigError unless the file holds a key that others of this machine cannot read."""
    try:
        if path.stat().st_mode & NOT_OURS:
            raise ConfigError(f"cluster key: {path} can be read by others of this machine: chmod 600 {path}")
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cluster key: {path} cannot be read: {error.strerror}") from None
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ConfigError(
            f"cluster key: {path}: expected {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, got {len(key)}: "
            f"make one with: (umask 077; openssl rand -hex {KEY_BYTES} > {path})"
        )
    return key


def write_secret(path: Path, secret: bytes) -> None:
    """Readable by this user alone, from the first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret)
