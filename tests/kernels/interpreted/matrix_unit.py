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
    bfloat16 = interpreter.tl.bfloat16

    def widened(operand: Any) -> Any:
        if operand.dtype != bfloat16:
            return operand.data.astype(np.float32)
        return (operand.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(left: Any, right: Any, sums: Any, *_: Any) -> Any:
        """Row by row. fp32 holds sums of the products of 128 integers of 8 bits exactly."""
        product_M1N = np.matmul(widened(left)[:, None], widened(right)[None])
        sums_MN = sums.data + product_M1N[:, 0].astype(sums.data.dtype)
        return interpreter.TensorHandle(sums_MN, sums.dtype.scalar)

    patch.setattr(interpreter.interpreter_builder, "create_dot", create_dot)


class MatrixUnit:
    """A rank's sidecar that does nothing but `use`."""

    def __init__(self, arguments: str) -> None:
        use(pytest.MonkeyPatch())

    def zeros_on_cpu(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return huge_zeros(shape, dtype)

    def start(self, rank: int, pool: Tensor, steps: StepMarks) -> None: ...

    def close(self) -> None: ...
