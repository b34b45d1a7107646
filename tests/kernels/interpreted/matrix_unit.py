"""Triton's interpreter with the products of a matrix unit, in the test's process and in those of other ranks.

It also does less work twice, which saves a fifth of the tests' time.

`tl.dot` then treats all rows of a tile alike. The interpreter sums a row by its place in the tile, and
multiplies the raw uint16 in which it keeps bf16.
"""

import importlib
from collections.abc import Sequence
from functools import cache
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
    _patch_language_once(patch, interpreter)
    _remember_types(patch, interpreter)


def _patch_language_once(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Search for what is to patch at launches alone, and not again in each function that a kernel calls."""
    patch_language, language = interpreter._patch_lang, interpreter.tl

    def patch_once(function: Any) -> Any:
        used = [each for each in function.__globals__.values() if each is language or each is language.core]
        if any(language.core.is_builtin(each.load) for each in used):
            return patch_language(function)
        return interpreter._LangPatchScope()

    patch.setattr(interpreter, "_patch_lang", patch_once)


def _remember_types(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Look NumPy's type of a tensor up by that of its elements; each look-up has made a table."""
    find, find_once = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)

    def find_by_elements(kind: Any) -> Any:
        return find_once(kind.scalar) if type(kind.scalar) is interpreter.tl.dtype else find(kind)

    patch.setattr(interpreter, "_get_np_dtype", find_by_elements)


class MatrixUnit:
    """A rank's sidecar that does nothing but `use`."""

    def __init__(self, arguments: str) -> None:
        use(pytest.MonkeyPatch())

    def zeros_on_cpu(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return huge_zeros(shape, dtype)

    def start(self, rank: int, pool: Tensor, steps: StepMarks) -> None: ...

    def close(self) -> None: ...
