"""Triton decides when a kernel is decorated whether it is interpreted, so these need their own process."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

COMMAND = "TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted"

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError(f"interpreted kernels need a process of their own: {COMMAND}")


@pytest.fixture(autouse=True, scope="session")
def interpreter_takes_loop_bounds_from_tensors() -> None:
    version = pytest.importorskip("triton").__version__
    if tuple(int(part) for part in version.split(".")[:2]) < (3, 7):
        pytest.skip(f"Triton {version} reads loop bounds in a way that NumPy 2.4 refuses; 3.7 mended it")


@pytest.fixture(autouse=True)
def infinities_are_welcome() -> Iterator[None]:
    """NumPy warns where a GPU computes on: -inf minus -inf, a logarithm of 0."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bf16 as raw uint16 and multiplies those: widen the operands of `tl.dot`."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    bfloat16, float32 = (getattr(interpreter.tl, name) for name in ("bfloat16", "float32"))
    multiply = interpreter.interpreter_builder.create_dot

    def widened(operand: Any) -> Any:
        if operand.dtype != bfloat16:
            return operand
        bits = operand.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), float32)

    def create_dot(left: Any, right: Any, *rest: Any) -> Any:
        return multiply(widened(left), widened(right), *rest)

    monkeypatch.setattr(interpreter.interpreter_builder, "create_dot", create_dot)
