"""The machine that figures are from: its description, and how fast it reads, copies and multiplies.

The rates are the denominators of other figures, so every run measures them anew.
"""

import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final, TypeAlias

import torch
from torch import Tensor

Call: TypeAlias = Callable[[], object]
NUM_WARMUP_RUNS: Final = 2  # the first runs compile kernels, make handles and settle the allocator
LEAST_GRAPH_S: Final = 2e-3  # a graph repeats short calls until its own launch no longer counts
MAX_ROUNDS: Final = 20
CLOCK_RAMP_S: Final = 0.1  # an idle GPU takes this long to reach its clocks
BUFFER_BYTES: Final = {"cpu": 2**29, "cuda": 2**32}  # many times the caches
GPU_STATE: Final = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "power.draw",
    "temperature.gpu",
    "memory.used",
    "memory.total",
)
MATMUL_SIZE: Final = {"cpu": 2048, "cuda": 8192}


def seconds_per_call(calls: Sequence[Call], device: torch.device, *, num_runs: int = 7) -> float:
    """Return the median over `num_runs` of the time of all calls in a row, divided by their number.

    On a GPU the calls are captured into one graph and its replays are timed, so neither Python nor launches
    count; a call must not wait for the device. Calls should touch different memory: data that fits into a
    cache is measured from the cache.
    """
    for _ in range(NUM_WARMUP_RUNS):
        _run(calls)
    if device.type == "cuda":
        eager_s = wall_seconds(lambda: _run(calls), device)
        num_rounds = min(MAX_ROUNDS, max(1, round(LEAST_GRAPH_S / eager_s)))
        return median(_replay_seconds(calls, num_rounds, num_runs)) / (num_rounds * len(calls))
    return median(wall_seconds(lambda: _run(calls), device) for _ in range(num_runs)) / len(calls)


def wall_seconds(run: Call, device: torch.device) -> float:
    """Return the time by the clock until the device has finished, Python included."""
    synchronize(device)
    started_s = perf_counter()
    run()
    synchronize(device)
    return perf_counter() - started_s


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _replay_seconds(calls: Sequence[Call], num_rounds: int, num_runs: int) -> list[float]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_rounds):
            _run(calls)
    warm_until_s = perf_counter() + CLOCK_RAMP_S
    while perf_counter() < warm_until_s:
        graph.replay()
        torch.cuda.synchronize()
    events = []
    for _ in range(num_runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def machine_description() -> dict[str, str | int | float]:
    """Return the processor, memory, versions, load and date, as the JSON of a suite keeps them."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    description: dict[str, str | int | float] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": round(memory_bytes / 2**30, 1),
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),  # runnable processes, mean of the last minute
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    if torch.cuda.is_available():
        description["gpu"] = torch.cuda.get_device_name()
        description["cuda"] = str(torch.version.cuda)
    return description


def gpu_state(device: torch.device) -> dict[str, str | float]:
    """Return a GPU's driver, clocks (MHz), power (W), temperature (°C), memory (MiB), and NCCL's version.

    Empty without a GPU. A figure that the driver does not give is left out.
    """
    if device.type != "cuda":
        return {}
    state: dict[str, str | float] = {}
    if torch.distributed.is_nccl_available():
        state["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = [
        "nvidia-smi",
        f"--id={uuid}",
        f"--query-gpu={','.join(GPU_STATE)}",
        "--format=csv,noheader,nounits",
    ]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return state
    for name, value in zip(GPU_STATE, said.strip().split(", "), strict=False):
        try:
            state[name] = value if name == "driver_version" else float(value)
        except ValueError:
            continue
    return state


@torch.inference_mode()
def read_bandwidth_gbps(device: torch.device, num_bytes: int | None = None) -> float:
    """Return the GB/s (10^9) at which a plain reduction reads memory: the better of two kinds."""
    values = _random(num_bytes or BUFFER_BYTES[device.type], device)
    seconds = min(seconds_per_call([values.sum], device), seconds_per_call([values.amax], device))
    return values.nbytes / seconds / 1e9


@torch.inference_mode()
def copy_bandwidth_gbps(device: torch.device, num_bytes: int | None = None) -> float:
    """Return the GB/s (10^9) of a copy within the device's memory; bytes read and bytes written count."""
    source = _random((num_bytes or BUFFER_BYTES[device.type]) // 2, device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_per_call([lambda: target.copy_(source)], device) / 1e9


@torch.inference_mode()
def matmul_peak_tflops(device: torch.device, dtype: torch.dtype, size: int | None = None) -> float:
    """Return the TFLOP/s of the library's product of two square random matrices.

    Where a CPU has no instructions for bf16, torch takes minutes: then it is the rate of floats.
    """
    size = size or MATMUL_SIZE[device.type]
    if device.type == "cpu" and dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtype = torch.float32
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(left)
    num_calls = 10 if device.type == "cuda" else 1
    seconds = seconds_per_call([lambda: torch.mm(left, right, out=out)] * num_calls, device)
    return 2 * size**3 / seconds / 1e12


def _random(num_bytes: int, device: torch.device) -> Tensor:
    return torch.rand(num_bytes // 4, dtype=torch.float32, device=device)


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
