"""A rank's sidecar that notes every call in a file of a folder."""

import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.cache.page_pool import StepMarks


class RecordingSidecar:
    """arguments: the folder."""

    def __init__(self, arguments: str) -> None:
        self._folder = Path(arguments)
        self._name = "rank"
        self._note("made")

    def zeros_on_cpu(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._note(f"zeros {list(shape)}")
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        self._memory = mmap.mmap(-1, num_bytes)
        return torch.frombuffer(self._memory, dtype=dtype).view(tuple(shape))

    def start(self, rank: int, pool: Tensor, steps: StepMarks) -> None:
        self._pool = pool
        self._steps = steps
        self._note(f"start {rank} {list(pool.shape)}")

    def hear(self, line: bytes) -> None:
        self._note(f"hears {line.decode().strip()}")
        if b"nonsense" in line:
            raise ValueError("nonsense")

    def close(self) -> None:
        is_used = bool(torch.frombuffer(self._memory, dtype=self._pool.dtype).any())
        self._note(f"close, steps have written: {is_used}")
        assert self._steps.has_passed(self._steps.launched)
        self._note(f"steps have come to mark {self._steps.launched}")

    def _note(self, what: str) -> None:
        with (self._folder / self._name).open("a") as notes:
            notes.write(what + "\n")
