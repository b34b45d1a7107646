"""The C kernels of the CPU path: compiled once per machine with the system's compiler, called through ctypes.

Plain C with a C ABI: no torch headers, so one build serves every torch and Python version and takes
seconds. The library is named by a hash of the sources, the flags, the compiler and the CPU. Where there is
no compiler every op falls back to its plain torch reference, several times slower, and says so once.

A library runs with all rights of the process that loads it. Only a regular file that this user or root owns,
and that no other user may write, is loaded; any other file is replaced by a new build. The same holds for the
folder: write access of other users is removed if the folder is this user's, and refused otherwise.

Large tensors of the CPU path lie in pages of 2 MiB: reads miss the address cache far less often.
"""

import ctypes
import fcntl
import hashlib
import logging
import math
import mmap
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
_builds_folder: Path | None = None

M_TRIM_THRESHOLD: Final = -1  # of malloc.h
M_MMAP_THRESHOLD: Final = -3
KEPT_BYTES: Final = 2**28
CHUNK_BYTES: Final = 2**26  # of memory in huge pages
ALIGNMENT: Final = 64  # bytes, a cache line
COMPILING: Final = "compiling-"  # how the folder of a build begins; `baton serve` looks for it
SOURCES: Final = Path(__file__).resolve().parent / "csrc"
FLAGS: Final = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-std=gnu11",
    "-fvisibility=hidden",
    "-shared",
    "-fPIC",
    "-pthread",
    "-w",
)
# The element types that a model and its pages may have; the last two are of pages alone.
TORCH_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
DTYPE_CODES: Final = {torch.float32: 0, torch.bfloat16: 1}  # as `enum dtype` in simd.h
_CTYPES: Final[dict[str, Any]] = {
    "p": ctypes.c_void_p,
    "n": ctypes.c_int64,
    "i": ctypes.c_int,
    "f": ctypes.c_float,
}


def handles(dtype: torch.dtype) -> bool:
    """True when the C kernels take tensors of this dtype on this machine."""
    return dtype in DTYPE_CODES and library() is not None


@cache
def function(name: str, signature: str) -> Callable[..., None]:
    """The C function `name`; signature: p pointer, n int64 or ptrdiff_t, i int, f float, one letter each.

    Nothing is checked on the C side: callers pass addresses of tensors they keep alive, in the shapes
    that the source file states.
    """
    loaded = library()
    if loaded is None:
        raise RuntimeError(f"{name}: the native kernels are not built; ask native.handles() first")
    entry = loaded[name]
    entry.argtypes = [_CTYPES[letter] for letter in signature]
    entry.restype = None
    return entry


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, built on first use; None without a working C compiler, or a folder to trust."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        logger.warning("no C compiler found: the CPU kernels run as plain torch, several times slower")
        return None
    _keep_freed_memory()
    try:
        loaded = ctypes.CDLL(str(_built_library(compiler)))
        loaded.baton_set_num_threads(torch.get_num_threads())
        return loaded
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("native kernels not built (%s): the CPU kernels run as plain torch, slower", error)
        return None


def num_threads() -> int:
    """Threads that the C kernels use, the caller's included; as many as torch had when they were loaded."""
    loaded = library()
    return 1 if loaded is None else int(loaded.baton_num_threads())


def set_num_threads(count: int) -> None:
    """Limit torch and the C kernels to `count` threads."""
    torch.set_num_threads(count)
    loaded = library()
    if loaded is not None:
        loaded.baton_set_num_threads(count)


def lower_num_threads(count: int) -> None:
    """Limit torch to `count` threads if it has more. The C kernels, which are not loaded yet, will follow."""
    torch.set_num_threads(min(count, torch.get_num_threads()))


def _keep_freed_memory() -> None:
    """Have glibc keep a step's temporaries for the next step: faulting them in anew took 6 % of a step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def give_back_freed_memory() -> int:
    """Give the memory that glibc and torch keep for later steps back to the system and to the GPU.

    Returns the bytes of the current GPU that torch still has; 0 without a GPU.
    """
    num_bytes = 0
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()  # frees what other processes had mapped, so it goes before the cache
        torch.cuda.empty_cache()
        empty_host_cache = getattr(torch._C, "_host_emptyCache", None)  # of pinned memory
        if empty_host_cache is not None:
            empty_host_cache()
        num_bytes = torch.cuda.memory_reserved()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return num_bytes


def _built_library(compiler: str) -> Path:
    sources = sorted(SOURCES.glob("*.c"))
    digest = hashlib.blake2b(digest_size=8)
    for part in (*FLAGS, compiler, platform.machine(), _cpu_features()):
        digest.update(part.encode())
    for source in (*sources, *sorted(SOURCES.glob("*.h"))):
        digest.update(source.read_bytes())
    folder = _cache_folder()
    target = folder / f"kernels-{digest.hexdigest()}.so"
    if not _is_trusted_file(target):
        with _locked(folder):  # one process builds, the others wait for the library
            if not _is_trusted_file(target):
                _compile(compiler, sources, target)
    return target


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; hold none on a file system without locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_trusted_file(path: Path) -> bool:
    """True when the file is there and only this user or root can have written it."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and _is_only_ours(status)


def _is_only_ours(status: os.stat_result) -> bool:
    """True when this user or root owns the file and no other user may write it."""
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compile(compiler: str, sources: list[Path], target: Path) -> None:
    """Compile the sources, as many at once as there are cores."""
    if os.path.lexists(target):
        status = target.lstat()
        owner, mode = status.st_uid, stat.filemode(status.st_mode)
        logger.warning(
            "%s is not loaded: it belongs to user %d, mode %s; it is built anew", target, owner, mode
        )
    with tempfile.TemporaryDirectory(prefix=COMPILING, dir=target.parent) as folder:
        objects = {each: f"{folder}/{each.stem}.o" for each in sources}
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            compiling = [
                threads.submit(_run, [compiler, *FLAGS, "-c", str(source), "-o", compiled])
                for source, compiled in objects.items()
            ]
            for each in compiling:
                each.result()
        built = Path(folder) / target.name
        _run([compiler, *FLAGS, *objects.values(), "-o", str(built), "-lm"])
        built.chmod(stat.S_IRWXU)  # a lenient umask would have others write it
        os.replace(built, target)  # whole or not at all
    logger.info("native kernels compiled", extra={"path": str(target)})


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if result.returncode:
        raise subprocess.SubprocessError(f"{command[0]} failed: {result.stderr.strip()[-300:]}")


def keep_builds_in(folder: Path) -> None:
    """Set the folder of compiled kernels; call before the first kernel runs."""
    global _builds_folder
    _builds_folder = folder


def _cache_folder() -> Path:
    folder = _builds_folder or Path.home() / ".cache" / "baton"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if _is_only_ours(status):
        return folder
    if status.st_uid != os.geteuid():
        raise PermissionError(
            f"{folder} is for compiled kernels, and user {status.st_uid} could replace them (mode "
            f"{stat.filemode(status.st_mode)}): set BATON_CACHE_DIR to a folder of your own"
        )
    folder.chmod(stat.S_IMODE(status.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
    return folder


def _cpu_features() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text(errors="replace").splitlines()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


# Memory in huge pages.


def huge_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros of `shape`, in huge pages where the system grants them; untouched parts take no memory."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # freed with the tensor
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


class HugeArena:
    """Memory for many tensors that live and die together, small ones too: weights.

    Each tensor keeps its chunk alive. Untouched parts of a chunk take no memory.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._num_used = 0

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A tensor [num_elements] with arbitrary contents."""
        num_bytes = num_elements * dtype.itemsize
        if self._num_used + num_bytes > len(self._chunk):
            self._chunk = huge_zeros((max(CHUNK_BYTES, num_bytes),), torch.uint8)
            self._num_used = 0
        piece = self._chunk[self._num_used : self._num_used + num_bytes]
        self._num_used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return piece.view(dtype)
