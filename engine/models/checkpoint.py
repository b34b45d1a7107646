"""The safetensors files of a model directory.

Only safetensors are read. Pickled weights are refused, because unpickling runs any code that the file
carries. The safetensors library checks every header. This module imports no torch: `read_entries` says
whether a model is whole before any process starts that computes.
"""

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from safetensors import SafetensorError, safe_open

from baton.engine.models.json_file import read_json
from baton.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
PICKLE_SUFFIXES: Final = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
FLOAT_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2}  # the dtypes that models may have


class TensorEntry(NamedTuple):
    """One tensor of a checkpoint, by the header of its file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of the whole tensor."""
        return math.prod(self.shape) * FLOAT_BYTES[self.dtype]


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a model, in order of name; empty when there are none."""
    if (directory / SINGLE_FILE).exists():
        return (directory / SINGLE_FILE,)
    if (directory / INDEX_FILE).exists():
        return tuple(sorted(set(_read_index(directory / INDEX_FILE).values())))
    return ()


def read_entries(directory: Path) -> dict[str, TensorEntry]:
    """Read the headers of `model.safetensors`, or of the shards that `model.safetensors.index.json` lists.

    Reads every header, so that a damaged download is found before anything is loaded. Raises ModelError
    naming the file, and the tensor where one is at fault.
    """
    files = weight_files(directory)
    if not files:
        raise ModelError(_why_no_weights(directory))
    entries = {name: entry for path in files for name, entry in _read_header(path)}
    if files == (directory / SINGLE_FILE,):
        return entries
    index = directory / INDEX_FILE
    for name, path in _read_index(index).items():
        if name not in entries or entries[name].path != path:
            raise ModelError(f"{index}: tensor {name!r} should be in {path.name}, which does not hold it")
    return entries


class SafetensorsCheckpoint:
    """The tensors of a model directory, mapped from their files: nothing is read before it is used."""

    def __init__(self, directory: Path) -> None:
        """ModelError as of `read_entries`."""
        self.entries = read_entries(directory)
        paths = {entry.path for entry in self.entries.values()}
        self._open_files = {path: _open(path, "pt") for path in sorted(paths)}

    def names(self) -> tuple[str, ...]:
        """As `Checkpoint.names`."""
        return tuple(self.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """As `Checkpoint.shape`."""
        return self._entry(name).shape

    def num_bytes(self, name: str) -> int:
        """As `Checkpoint.num_bytes`."""
        return self._entry(name).num_bytes

    def slice(self, name: str, dim: int, start: int, stop: int) -> "Tensor":
        """As `Checkpoint.slice`: a view of the mapped file."""
        tensor: Tensor = self._open_files[self._entry(name).path].get_tensor(name)
        return tensor.narrow(dim, start, stop - start)

    def sample(self, name: str, num_items: int) -> bytes:
        """Up to `num_items` elements from the middle of a tensor, as fp32."""
        flat = self._open_files[self._entry(name).path].get_tensor(name).view(-1)
        num_taken = min(num_items, len(flat))
        middle = flat.narrow(0, (len(flat) - num_taken) // 2, num_taken)
        sample: bytes = middle.float().numpy().tobytes()
        return sample

    def _entry(self, name: str) -> TensorEntry:
        if name not in self.entries:
            raise ModelError(f"the checkpoint has no tensor {name!r}")
        return self.entries[name]


def _open(path: Path, framework: str) -> Any:
    try:
        return safe_open(path, framework=framework)
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file") from None
    except SafetensorError as error:
        raise ModelError(f"{path}: is truncated or damaged: {error}") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_header(path: Path) -> Iterator[tuple[str, TensorEntry]]:
    file = _open(path, "np")
    for name in file.keys():  # noqa: SIM118  # not a mapping
        header = file.get_slice(name)
        dtype = header.get_dtype()
        if dtype not in FLOAT_BYTES:
            raise ModelError(
                f"{path}: tensor {name!r}: dtype should be one of {', '.join(FLOAT_BYTES)}, got {dtype!r}"
            )
        yield name, TensorEntry(path, dtype, tuple(header.get_shape()))


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


DIGEST_BYTES: Final = 16
SAMPLE_ITEMS: Final = 1024  # of each tensor


def fingerprint(directory: Path, *, dummy_seed: int | None = None) -> str:
    """BLAKE2b-128, in hexadecimal, of config.json, the name, dtype and shape of every tensor, and a sample of
    each.

    The fingerprint is part of every KV page's identity, so that pages are shared within one model only. A
    sample, up to 1024 elements from the middle of each tensor, tells a fine-tuned model from its base, which
    has the same shapes: training changes values all over a tensor. Hashing every byte would take a minute or
    two for 140 GB of weights at each start of each worker. Two models that differ only outside the samples
    share a fingerprint, and with it cached pages; only a deliberate edit makes such a pair. With `dummy_seed`
    the weights are a function of config.json and the seed.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"baton model")
    _update(digest, (directory / "config.json").read_bytes())
    if dummy_seed is not None:
        _update(digest, f"dummy weights {dummy_seed}".encode())
        return digest.hexdigest()
    checkpoint = SafetensorsCheckpoint(directory)
    for name, (_, dtype, shape) in sorted(checkpoint.entries.items()):
        _update(digest, f"{name} {dtype} {shape}".encode())
        _update(digest, checkpoint.sample(name, SAMPLE_ITEMS))
    return digest.hexdigest()


def _update(digest: "hashlib.blake2b", part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))  # parts cannot run into each other
    digest.update(part)
