"""Triton's interpreter with the products of a matrix unit, in the test's process and in those of other ranks.

`tl.dot` then treats all rows of a tile alike. The interpreter sums a row by its place in the tile, and
multiplies the raw uint16 in which it keeps bf16.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.engine.cache.page_pool import StepMarks
from baton.kernels.native import huge_zeros


def use(patch: pytest.MonkeyPatch) -> None:
    """Replace the product until the patch is undone."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    bfloat16, float32 = (getattr(interpreter.tl, name) for name in ("bfloat16", "float32"))

    def widened(operand: Any) -> Any:
        if operand.dtype != bfloat16:
            return operand.data.astype(np.float32)
        return (operand.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(left: Any, right: Any, sums: Any, *_: Any) -> Any:
        product_M1N = np.matmul(widened(left)[:, None], widened(right)[None])  # row by row
        return interpreter.TensorHandle(product_M1N[:, 0] + sums.data, float32)

    patch.setattr(interpreter.interpreter_builder, "create_dot", create_dot)


class MatrixUnit:
    """A rank's sidecar that does nothing but `use`."""

    def __init__(self, arguments: str) -> None:
        use(pytest.MonkeyPatch())

    def zeros_on_cpu(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return huge_zeros(shape, dtype)

    def start(self, rank: int, pool: Tensor, steps: StepMarks) -> None: ...

    def close(self) -> None: ...
