"""Checkpoints: named tensors of a model directory, read where they lie."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.engine.models.checkpoint import TensorEntry, read_entries
from baton.errors import ModelError

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
    """Map the checkpoint's files. ModelError as of `read_entries`."""
    return SafetensorsCheckpoint(*read_entries(directory))


def check_slice(name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> None:
    if not 0 <= dim < len(shape) or not 0 <= start <= stop <= shape[dim]:
        raise ModelError(f"tensor {name!r} of shape {list(shape)} has no [{start}, {stop}) along {dim}")


def _map(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: cannot be mapped: {error}") from error


# torch's types of the element types that a model and its pages may have.

TORCH_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
