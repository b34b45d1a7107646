"""The one place that imports Triton, so that every op imports and runs on a machine without it."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    triton = tl = None

__all__ = ["Block", "Kernel", "Pointer", "jit", "tl", "triton"]

Pointer: TypeAlias = Any  # a tensor at the launch, a typed pointer inside the kernel
Block: TypeAlias = Any  # a tile or a scalar that lives in registers


class Kernel(Protocol):
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """`kernel[grid](*arguments)` launches one program per grid point."""

    def __call__(self, *arguments: Any) -> Any:
        """A call from inside another kernel, where it is inlined."""


def jit(*, varying: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Kernel]:
    """`triton.jit`; without Triton, a stand-in that says so when it is launched.

    varying: integer parameters that change from step to step. They are not specialised (Triton
    otherwise compiles anew for 1, multiples of 16 and the rest), so a running engine never compiles.
    """

    def decorate(function: Callable[..., Any]) -> Kernel:
        kernel: Kernel
        if triton is None:
            kernel = _AbsentKernel(function.__name__)
        else:
            kernel = triton.jit(function, do_not_specialize=list(varying))
        return kernel

    return decorate


class _AbsentKernel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError(f"{self._name} needs Triton: pip install 'baton[gpu]'")
