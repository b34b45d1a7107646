"""The header of a safetensors file: which tensors it holds, checked against the file's real size.

Layout: u64 little-endian header length, a JSON object `{name: {dtype, shape, data_offsets}}`, then the
tensors' bytes. Reading it cannot run code, unlike a pickle.
"""

import math
from pathlib import Path
from typing import Final

import msgspec

from baton.errors import ModelError

LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100 * 2**20  # the format's own limit
# Only floats make a model that we run; bytes each takes.
FLOAT_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2}


class TensorEntry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]  # bytes [start, stop) after the header

    @property
    def num_bytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


class SafetensorsHeader(msgspec.Struct, frozen=True, kw_only=True):
    """`raw` is the header as it stands in the file; the tensors' bytes begin at `data_start`."""

    tensors: dict[str, TensorEntry]
    raw: bytes
    data_start: int


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """Raises ModelError when the file is cut short, too long, or its header contradicts itself."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            raw = file.read(_header_bytes(path, file.read(LENGTH_BYTES), file_bytes))
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    header = SafetensorsHeader(tensors=_entries(path, raw), raw=raw, data_start=LENGTH_BYTES + len(raw))
    stop = max((entry.data_offsets[1] for entry in header.tensors.values()), default=0)
    if header.data_start + stop != file_bytes:
        raise ModelError(
            f"{path}: is truncated or damaged: its header asks for {header.data_start + stop} bytes, "
            f"got {file_bytes}"
        )
    return header


def _header_bytes(path: Path, length: bytes, file_bytes: int) -> int:
    if len(length) < LENGTH_BYTES:
        raise ModelError(f"{path}: is truncated: no safetensors header in {file_bytes} bytes")
    num_bytes = int.from_bytes(length, "little")
    if num_bytes > min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise ModelError(
            f"{path}: is truncated or not a safetensors file: its header should take {num_bytes} bytes, "
            f"got a file of {file_bytes}"
        )
    return num_bytes


def _entries(path: Path, raw: bytes) -> dict[str, TensorEntry]:
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        fields.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(field, type=TensorEntry) for name, field in fields.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: is damaged: its safetensors header cannot be read: {error}") from None
    for name, entry in entries.items():
        _check_entry(f"{path}: tensor {name!r}", entry)
    return entries


def _check_entry(what: str, entry: TensorEntry) -> None:
    if entry.dtype not in FLOAT_BYTES:
        raise ModelError(f"{what}: dtype should be one of {', '.join(FLOAT_BYTES)}, got {entry.dtype!r}")
    expected = math.prod(entry.shape) * FLOAT_BYTES[entry.dtype]
    if entry.data_offsets[0] < 0 or min(entry.shape, default=0) < 0 or entry.num_bytes != expected:
        raise ModelError(
            f"{what}: {entry.dtype} {list(entry.shape)} should take {expected} bytes, "
            f"got [{entry.data_offsets[0]}, {entry.data_offsets[1]})"
        )
