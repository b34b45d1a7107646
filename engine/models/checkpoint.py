"""The files of a checkpoint, and the tensors that their headers promise.

Only safetensors are read. Pickled weights are refused: unpickling runs whatever code the file carries. No
torch here: whether a model is whole is asked before any process is started that computes.
"""

import hashlib
import math
from pathlib import Path
from typing import Final

import msgspec

from baton.engine.models.json_file import read_json
from baton.errors import ModelError

# The header of a safetensors file: which tensors it holds, checked against the file's real size.
#
# Layout: u64 little-endian header length, a JSON object `{name: {dtype, shape, data_offsets}}`, then the
# tensors' bytes. Reading it cannot run code, unlike a pickle.

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


SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
PICKLE_SUFFIXES: Final = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


def read_entries(directory: Path) -> tuple[dict[str, TensorEntry], dict[str, Path]]:
    """Each tensor of `model.safetensors`, or of the shards that `model.safetensors.index.json` lists, and the
    file that holds it.

    Every header is checked here, so that a damaged download is found before anything is loaded.
    Raises ModelError naming the file, and the tensor where one is to blame.
    """
    if (directory / SINGLE_FILE).exists():
        path = directory / SINGLE_FILE
        entries = read_safetensors_header(path).tensors
        return entries, dict.fromkeys(entries, path)
    if (directory / INDEX_FILE).exists():
        return _read_shards(directory / INDEX_FILE)
    raise ModelError(_why_no_weights(directory))


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files that `read_entries` reads, in order of name; none when there are none."""
    if (directory / SINGLE_FILE).exists():
        return (directory / SINGLE_FILE,)
    if (directory / INDEX_FILE).exists():
        return tuple(sorted(set(_read_index(directory / INDEX_FILE).values())))
    return ()


def _read_shards(index: Path) -> tuple[dict[str, TensorEntry], dict[str, Path]]:
    files = _read_index(index)
    headers = {path: read_safetensors_header(path).tensors for path in sorted(set(files.values()))}
    for name, path in files.items():
        if name not in headers[path]:
            raise ModelError(f"{index}: tensor {name!r} should be in {path.name}, which does not hold it")
    return {name: headers[path][name] for name, path in files.items()}, files


def _read_index(index: Path) -> dict[str, Path]:
    weight_map = read_json(index).require("weight_map", dict[str, str])
    for file_name in weight_map.values():
        # A path could name any file of this machine; shards lie beside their index.
        is_plain = Path(file_name).name == file_name and "\0" not in file_name
        if not is_plain or not file_name.endswith(".safetensors"):
            raise ModelError(f"{index}: a shard should be a .safetensors file beside it, got {file_name!r}")
    return {name: index.parent / file_name for name, file_name in weight_map.items()}


def _why_no_weights(directory: Path) -> str:
    if not directory.is_dir():
        return f"{directory}: there is no such directory"
    expected = f"{directory}: expected {SINGLE_FILE} or {INDEX_FILE}"
    names = sorted(path.name for path in directory.iterdir())
    pickles = [name for name in names if Path(name).suffix in PICKLE_SUFFIXES]
    if pickles:
        return (
            f"{expected}, got pickled weights ({', '.join(pickles)}): reading a pickle can run any code, "
            f"so they are refused; convert them to safetensors"
        )
    others = [name for name in names if name.endswith(".safetensors")]
    return f"{expected}, got {', '.join(others)}" if others else f"{expected}, found no weights"


# A model's fingerprint: part of every KV page's identity, so that pages are shared within one model only.

DIGEST_BYTES: Final = 16
SAMPLE_BYTES: Final = 4096  # of each tensor


def fingerprint(directory: Path, *, dummy_seed: int | None = None) -> str:
    """BLAKE2b-128, in hexadecimal, of config.json and every weight file's size, header and samples.

    A sample, up to 4 KiB from the middle of each tensor, tells a fine-tuned model from its base, which
    has the same headers: training changes values all over a tensor. Every byte is not hashed: at the 1 to
    2 GB/s of a disk, 140 GB of weights would take a minute or two at each start of each worker. Two models
    that differ only outside the samples share a fingerprint, and with it cached pages: such a pair is made by
    hand, by somebody who owns both. With `dummy_seed` the weights are what that seed makes of config.json.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"baton model")
    _update(digest, (directory / "config.json").read_bytes())
    if dummy_seed is not None:
        _update(digest, f"dummy weights {dummy_seed}".encode())
        return digest.hexdigest()
    for path in weight_files(directory):
        header = read_safetensors_header(path)
        _update(digest, path.name.encode())
        _update(digest, header.raw)
        for sample in _samples(path, header):
            _update(digest, sample)
    return digest.hexdigest()


def _samples(path: Path, header: SafetensorsHeader) -> list[bytes]:
    samples = []
    with path.open("rb") as file:
        for entry in header.tensors.values():
            taken = min(SAMPLE_BYTES, entry.num_bytes)
            file.seek(header.data_start + entry.data_offsets[0] + (entry.num_bytes - taken) // 2)
            samples.append(file.read(taken))
    return samples


def _update(digest: "hashlib.blake2b", part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))  # parts cannot run into each other
    digest.update(part)
