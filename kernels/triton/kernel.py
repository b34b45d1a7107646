"""The one place that imports Triton, so that every op imports and runs on a machine without it.

It also compiles kernels ahead of time, without a GPU, and reads the table of tuned tiles, tuned.json.
"""

import importlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import torch
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

__all__ = [
    "HAS_TRITON",
    "SHARED_MEMORY_BYTES",
    "TILES",
    "Compiled",
    "Kernel",
    "Launch",
    "TileKey",
    "TileKind",
    "TunedDtype",
    "TunedTile",
    "compile_for_hopper",
    "has_large_shared_memory",
    "jit",
    "kernel",
    "read_tuned",
    "runs_triton",
    "tl",
    "triton",
    "tuned_tile",
    "write_tuned",
]

HAS_TRITON = not isinstance(triton, _MissingTriton)
INTERPRETS: Final = HAS_TRITON and bool(triton.knobs.runtime.interpret)  # by TRITON_INTERPRET=1


def runs_triton(tensor: Tensor) -> bool:
    """True when Triton kernels take the tensor: on a GPU, or on a CPU under Triton's interpreter."""
    return tensor.is_cuda or INTERPRETS


@cache
def has_large_shared_memory(device: torch.device) -> bool:
    """True for A100, H100, H200 and B200, which have 160 KB and more a multiprocessor, and without a GPU."""
    if device.type != "cuda":
        return True
    capability = torch.cuda.get_device_capability(device)
    return capability == (8, 0) or capability[0] in (9, 10)


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


# Compiling ahead of time.

SHARED_MEMORY_BYTES: Final = 227 * 1024  # what one program may have on sm_90
_OPTIONS: Final = ("num_warps", "num_stages", "enable_fp_fusion")
_TYPES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.uint8: "u8"}


class Launch(NamedTuple):
    """A launch as its launcher makes it."""

    kernel: Kernel
    arguments: tuple[object, ...]
    options: dict[str, object]  # compile-time constants, num_warps and num_stages


class Compiled(NamedTuple):
    """A kernel as compiled for sm_90."""

    asm: Mapping[str, Any]  # ttgir, ptx, cubin
    registers: int  # of a thread
    local_bytes: int  # that a thread keeps outside its registers: spills
    shared_bytes: int  # of a program


def compile_for_hopper(launch: Launch) -> Compiled:
    """Compile what the launch would compile on an H100 or H200, without a GPU."""
    jitted = launch.kernel.jitted
    names: list[str] = jitted.arg_names
    values = dict(zip(names, launch.arguments, strict=False))
    options = {name: value for name, value in launch.options.items() if name in _OPTIONS}
    constants = {name: value for name, value in launch.options.items() if name not in _OPTIONS}
    varying = {param.name for param in jitted.params if param.do_not_specialize}
    specialised = [name for name in values if name not in varying]
    constants |= {name: 1 for name in specialised if isinstance(values[name], int) and values[name] == 1}
    signature = {name: "constexpr" if name in constants else _type_name(values[name]) for name in names}
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name in specialised
        if name not in constants and _is_divisible_by_16(values[name])
    }
    compiler = importlib.import_module("triton.compiler")
    source = compiler.ASTSource(fn=jitted, signature=signature, constexprs=constants, attrs=attributes)
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    made = triton.compile(source, target=target, options={"enable_fp_fusion": True} | options)
    usage = _resource_usage(made.asm["cubin"])
    local_bytes = usage["STACK"] + usage["LOCAL"]
    return Compiled(made.asm, usage["REG"], local_bytes, made.metadata.shared)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Return the cubin's own account: REG, STACK and LOCAL of a thread among others."""
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(program), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"([A-Z]+):(\d+)", usage)}


def _type_name(argument: object) -> str:
    """Return the Triton type that the argument of a launch has."""
    if isinstance(argument, Tensor):
        return "*" + (_TYPES.get(argument.dtype) or f"i{argument.element_size() * 8}")
    if isinstance(argument, float):
        return "fp32"
    assert isinstance(argument, int)
    return "i32" if -(2**31) <= argument < 2**31 else "i64"


def _is_divisible_by_16(value: object) -> bool:
    number = value.data_ptr() if isinstance(value, Tensor) else value
    return isinstance(number, int) and number % 16 == 0


# Tuned tiles.
#
# `baton bench gpu-tiles` writes the table: on a GPU it times the candidates, elsewhere it judges
# them by a model from what they compile to. A launcher without a row for its shape uses its own rule.
#
# Sums must not depend on the batch, on chunks or on the number of ranks (batch invariance). So a row is found
# by the shape that the order of sums may depend on, and by the rows of the tile. All rows of one kind, dtype
# and width have the same block_n and block_k at every height of the tile.

TILES: Final = Path(__file__).with_name("tuned.json")
TileKind: TypeAlias = Literal["linear", "decode", "prefill"]
TunedDtype: TypeAlias = Literal["bfloat16", "float16"]


class TileKey(NamedTuple):
    """The key of a row of the table of tuned tiles."""

    kind: TileKind
    dtype: torch.dtype
    width: int  # linear: inputs that are summed by one rank's split. decode, prefill: the head dim
    block_m: int  # rows of the tile: tokens, or query heads and tokens


class TunedTile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the table."""

    kind: TileKind
    dtype: TunedDtype
    width: int
    block_m: int
    block_n: int  # outputs, or keys
    block_k: int = 0  # inputs; 0 in attention
    num_warps: int
    num_stages: int
    registers: int  # the most of all kernels of this row, as compiled for sm_90
    shared_bytes: int  # the same
    chosen_by: Literal["model", "time"]
    triton: str  # the version that compiled the row

    @property
    def key(self) -> TileKey:
        """Return what the row is found by."""
        return TileKey(self.kind, getattr(torch, self.dtype), self.width, self.block_m)


@cache
def read_tuned() -> Mapping[TileKey, TunedTile]:
    """Return the table. Raises msgspec.ValidationError for a file that is no table."""
    rows = msgspec.json.decode(TILES.read_bytes(), type=list[TunedTile])
    return {row.key: row for row in rows}


def tuned_tile(key: TileKey) -> TunedTile | None:
    """Return the row for this shape on a GPU with the shared memory of an H100; None where there is none."""
    return read_tuned().get(key)


def write_tuned(rows: list[TunedTile], path: Path = TILES) -> None:
    """Replace the table, in the order of its keys, a row a line."""
    rows = sorted(rows, key=lambda row: (row.kind, row.dtype, row.width, row.block_m))
    lines = ",\n".join(msgspec.json.encode(row).decode() for row in rows)
    path.write_text(f"[\n{lines}\n]\n")
    read_tuned.cache_clear()
