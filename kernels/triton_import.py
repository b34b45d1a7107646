"""The one place that imports Triton, so that every op imports and runs on a machine without it."""

from collections.abc import Callable
from functools import partial
from typing import Any

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    triton = tl = None

__all__ = ["Kernel", "jit", "kernel", "tl", "triton"]


class Kernel:
    """A compiled-on-demand GPU function: `kernel[grid](*arguments)` launches one program per grid point."""

    def __init__(self, function: Callable[..., Any], varying: tuple[str, ...]) -> None:
        self.name = function.__name__
        self.jitted: Any = triton and triton.jit(function, do_not_specialize=list(varying))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        if self.jitted is None:
            raise RuntimeError(f"{self.name} needs Triton: pip install 'baton[gpu]'")
        # Said aloud because the default differs between releases of Triton.
        return partial(self.jitted[grid], enable_fp_fusion=True)


def kernel(*, varying: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Kernel]:
    """Makes a function a `Kernel`.

    varying: integer parameters that change from step to step. They are not specialised (Triton
    otherwise compiles anew for 1, multiples of 16 and the rest), so a running engine never compiles.
    """
    return partial(Kernel, varying=varying)


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`triton.jit` for a function that kernels call: it is inlined into them."""
    return function if triton is None else triton.jit(function)
