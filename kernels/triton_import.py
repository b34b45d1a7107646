"""The one place that imports Triton, so that every op imports and runs on a machine without it."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from torch import Tensor

MISSING = "tensors on a GPU need Triton: pip install triton"


class _MissingTriton:
    """Stands in for the module, so that a launch names the missing package."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else RuntimeError(MISSING)


try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    triton = tl = _MissingTriton()

__all__ = ["HAS_TRITON", "Kernel", "jit", "kernel", "runs_triton", "tl", "triton"]

HAS_TRITON = not isinstance(triton, _MissingTriton)
INTERPRETS: Final = HAS_TRITON and bool(triton.knobs.runtime.interpret)  # by TRITON_INTERPRET=1


def runs_triton(tensor: Tensor) -> bool:
    """True when Triton kernels take the tensor: on a GPU, or on a CPU under Triton's interpreter."""
    return tensor.is_cuda or INTERPRETS


class Kernel:
    """A compiled-on-demand GPU function: `kernel[grid](*arguments)` launches one program per grid point."""

    def __init__(self, function: Callable[..., Any], varying: tuple[str, ...]) -> None:
        self.jitted: Any = None
        if HAS_TRITON:
            self.jitted = triton.jit(function, do_not_specialize=list(varying))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        if self.jitted is None:
            raise RuntimeError(MISSING)
        # Explicit, because the default differs between releases of Triton.
        return partial(self.jitted[grid], enable_fp_fusion=True)


def kernel(*, varying: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Kernel]:
    """Makes a function a `Kernel`.

    varying: integer parameters that change from step to step. They are not specialised (Triton
    otherwise compiles anew for 1, multiples of 16 and the rest), so a running engine never compiles.
    """
    return partial(Kernel, varying=varying)


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`triton.jit` for a function that kernels call: it is inlined into them."""
    return triton.jit(function) if HAS_TRITON else function
