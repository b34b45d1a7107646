"""Checkpoints: named tensors of a model directory, read where they lie.

Only safetensors are read. Pickled weights are refused: unpickling runs whatever code the file carries.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.engine.json_file import read_json
from baton.engine.safetensors_file import TensorEntry, read_safetensors_header
from baton.errors import ModelError

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
PICKLE_SUFFIXES: Final = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})

Progress = Callable[[int, int], None]
"""Called with (bytes of the checkpoint gone through, bytes in all), the first time with 0.

A tensor counts whole, though each tensor-parallel rank keeps only its part of it.
"""


class Checkpoint(Protocol):
    """Tensors are shared with the checkpoint: copy before writing to them."""

    def names(self) -> tuple[str, ...]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def num_bytes(self, name: str) -> int:
        """Of the whole tensor, as saved."""

    def tensor(self, name: str) -> Tensor:
        """The whole tensor on the CPU, in the dtype that it was saved in; ModelError when unknown."""

    def slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """`[start, stop)` along `dim`: what one tensor-parallel rank needs."""


class SafetensorsCheckpoint:
    """Tensors mapped from their files: nothing is read until it is used, and nothing is read twice."""

    def __init__(self, entries: dict[str, TensorEntry], files: dict[str, Path]) -> None:
        self._entries = entries
        self._files = files  # tensor name -> the file that holds it
        self._open_files: dict[Path, Any] = {path: _map(path) for path in sorted(set(files.values()))}

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def num_bytes(self, name: str) -> int:
        return self._entry(name).num_bytes

    def tensor(self, name: str) -> Tensor:
        self._entry(name)
        tensor: Tensor = self._open_files[self._files[name]].get_tensor(name)
        return tensor

    def slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        check_slice(name, self.shape(name), dim, start, stop)
        return self.tensor(name).narrow(dim, start, stop - start)

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._entries:
            raise ModelError(f"the checkpoint has no tensor {name!r}")
        return self._entries[name]


class ReportingCheckpoint:
    """Another checkpoint, saying how much of it has been handed out: what a bar shows.

    `names` are the tensors that will be asked for, each once.
    """

    def __init__(self, inner: Checkpoint, names: Iterable[str], progress: Progress) -> None:
        self._inner = inner
        self._total_bytes = sum(inner.num_bytes(name) for name in names)
        self._progress = progress
        self._done_bytes = 0
        progress(0, self._total_bytes)

    def names(self) -> tuple[str, ...]:
        return self._inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(name)

    def num_bytes(self, name: str) -> int:
        return self._inner.num_bytes(name)

    def tensor(self, name: str) -> Tensor:
        tensor = self._inner.tensor(name)
        self._report(name)
        return tensor

    def slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        part = self._inner.slice(name, dim, start, stop)
        self._report(name)
        return part

    def _report(self, name: str) -> None:
        self._done_bytes += self._inner.num_bytes(name)
        self._progress(self._done_bytes, self._total_bytes)


def open_checkpoint(directory: Path) -> SafetensorsCheckpoint:
    """Map `model.safetensors`, or the shards that `model.safetensors.index.json` lists.

    Every header is checked here, so that a damaged download is found before anything is loaded.
    Raises ModelError naming the file, and the tensor where one is to blame.
    """
    if (directory / SINGLE_FILE).exists():
        path = directory / SINGLE_FILE
        entries = read_safetensors_header(path).tensors
        return SafetensorsCheckpoint(entries, dict.fromkeys(entries, path))
    if (directory / INDEX_FILE).exists():
        return _open_shards(directory / INDEX_FILE)
    raise ModelError(_why_no_weights(directory))


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files that `open_checkpoint` would map, in order of name; none when there are none."""
    if (directory / SINGLE_FILE).exists():
        return (directory / SINGLE_FILE,)
    if (directory / INDEX_FILE).exists():
        return tuple(sorted(set(_read_index(directory / INDEX_FILE).values())))
    return ()


def check_slice(name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> None:
    if not 0 <= dim < len(shape) or not 0 <= start <= stop <= shape[dim]:
        raise ModelError(f"tensor {name!r} of shape {list(shape)} has no [{start}, {stop}) along {dim}")


def _open_shards(index: Path) -> SafetensorsCheckpoint:
    files = _read_index(index)
    headers = {path: read_safetensors_header(path).tensors for path in sorted(set(files.values()))}
    for name, path in files.items():
        if name not in headers[path]:
            raise ModelError(f"{index}: tensor {name!r} should be in {path.name}, which does not hold it")
    return SafetensorsCheckpoint({name: headers[path][name] for name, path in files.items()}, files)


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


def _map(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: cannot be mapped: {error}") from error
