"""Files that are written whole, and their folders. Errors of the system become ConfigErrors with the path."""

import contextlib
import os
import tempfile
from pathlib import Path

from baton.errors import ConfigError, reason_of


def write_secret(path: Path, secret: bytes) -> None:
    """Write a file that only this user can read, and its folder if there is none. Raises ConfigError."""
    make_folder(path.parent, mode=0o700)
    replace_file(path, secret, mode=0o600)


def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Make a folder and its parents unless they are there. Raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=mode)
    except OSError as error:
        raise ConfigError(f"{path}: the folder cannot be made: {reason_of(error)}") from None


def replace_file(path: Path, content: bytes, *, mode: int | None = None) -> None:
    """Replace a file in one step: readers see the old content or the new one. Raises ConfigError.

    mode: None: mode and owner of the old file stay, and a new file has 0o600.
    """
    path = path.resolve()
    try:
        old = path.stat() if path.exists() else None
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            if mode is None and old is not None:
                Path(name).chmod(old.st_mode & 0o777)
                with contextlib.suppress(PermissionError):
                    os.chown(name, old.st_uid, old.st_gid)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {reason_of(error)}") from None
