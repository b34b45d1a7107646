"""Reads the JSON files of a model directory key by key; every error names the file, the key and the value."""

from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from baton.errors import ModelError

T = TypeVar("T")
MAX_COUNT: Final = 2**31 - 1
MAX_FILE_BYTES: Final = 64 * 2**20  # no real index is larger; checked before memory is taken


class JsonObject:
    """One JSON object of a file. A key with the value null counts as absent, as in `transformers`."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self._values = values
        self.source = source

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether the key is present with the value null."""
        return key in self._values and self._values[key] is None

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value of `key` as `kind` (a type that msgspec converts to), or None when it is absent."""
        value = self._values.get(key)
        if value is None:
            return None
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError:
            wanted = kind.__name__ if type(kind) is type else str(kind)
            raise ModelError(f"{self.source}: {key!r} should be {wanted}, got {value!r}") from None

    def require(self, key: str, kind: type[T]) -> T:
        value = self.get(key, kind)
        if value is None:
            raise ModelError(f"{self.source}: key {key!r} is missing")
        return value

    def count(self, key: str, default: int | None = None, *, most: int = MAX_COUNT) -> int:
        """A whole number from 1 to `most`; required when there is no default."""
        value = self.require(key, int) if default is None else self.get(key, int)
        chosen = default if value is None else value
        if chosen is None or not 1 <= chosen <= most:
            raise ModelError(f"{self.source}: {key!r} should be 1 to {most}, got {chosen}")
        return chosen

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above zero; required when there is no default."""
        value = self.require(key, float) if default is None else self.get(key, float)
        chosen = default if value is None else value
        if chosen is None or not 0 < chosen < float("inf"):
            raise ModelError(f"{self.source}: {key!r} should be a number above 0, got {chosen}")
        return chosen

    def integers(self, key: str) -> tuple[int, ...]:
        """One whole number or a list of them; empty when absent."""
        if isinstance(self._values.get(key), list):
            return tuple(self.require(key, list[int]))
        value = self.get(key, int)
        return () if value is None else (value,)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, bool)
        return default if value is None else value

    def section(self, key: str) -> "JsonObject":
        """The nested object under `key`, empty when it is absent."""
        values: dict[str, Any] | None = self.get(key, dict)
        return JsonObject(values or {}, f"{self.source}: {key}")

    def merged(self, other: "JsonObject") -> "JsonObject":
        """These keys, and the keys of `other` that are absent here."""
        own = {key: value for key, value in self._values.items() if value is not None}
        return JsonObject({**other._values, **own}, self.source)


def read_json(path: Path) -> JsonObject:
    """Read a file that holds one JSON object. ModelError when it is missing, too large or not an object."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_FILE_BYTES:
            raise ModelError(f"{path}: should be at most {MAX_FILE_BYTES} bytes, got {num_bytes}")
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: is not a JSON object: {error}") from None
    return JsonObject(values, str(path))
