"""Triton decides when a kernel is decorated whether it is interpreted, so these need their own process."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from tests.kernels.interpreted import matrix_unit

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


@pytest.fixture(autouse=True, scope="session")
def products_of_a_matrix_unit() -> Iterator[None]:
    pytest.importorskip("triton.runtime.interpreter")
    with pytest.MonkeyPatch.context() as patch:
        matrix_unit.use(patch)
        yield
