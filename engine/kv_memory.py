"""How many KV pages fit the memory given."""

import os
from pathlib import Path
from typing import Final

import torch

from baton.config import CacheConfig
from baton.errors import ConfigError
from baton.layout import PageLayout

DEFAULT_CPU_BYTES: Final = 4 * 2**30
CUDA_CONTEXT_BYTES: Final = 768 * 2**20  # of a process, beside what torch reserves: a cautious guess
MAX_CPU_SHARE: Final = 0.25  # of the memory that is free now


def count_pages(cache: CacheConfig, layout: PageLayout, device: torch.device) -> int:
    """Pages for the device pool: all that the memory holds; what sequences leave is prefix cache."""
    given = cache.kv_cache_memory_bytes
    if given is None:
        given = _free_bytes(cache, device)
    return given // layout.page_bytes


def check_fits(cache: CacheConfig, num_pages: int, layout: PageLayout, max_model_len: int) -> None:
    """ConfigError unless one sequence of the longest length fits the pool."""
    needed = layout.num_pages(max_model_len)
    if num_pages >= needed:
        return
    given_bytes = cache.kv_cache_memory_bytes or num_pages * layout.page_bytes
    raise ConfigError(
        f"the KV cache holds {num_pages * layout.page_size} tokens, one sequence of max_model_len "
        f"{max_model_len} needs {needed * layout.page_bytes:,} bytes a rank, got "
        f"{given_bytes:,}: raise cache.kv_cache_memory_bytes or lower max_model_len"
    )


def _available_bytes() -> int:
    """What Linux would give without swapping: file caches count as available, as the weights' own does."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_bytes(cache: CacheConfig, device: torch.device) -> int:
    if device.type != "cuda":
        return min(DEFAULT_CPU_BYTES, int(_available_bytes() * MAX_CPU_SHARE))
    free, total = torch.cuda.mem_get_info(device)
    # The caller has loaded the weights and run a full step: what that step held, a later one will need.
    # Another process may share the device, and load at this moment: its memory counts against what is free,
    # never against our own share.
    peak = torch.cuda.max_memory_reserved(device)
    ours = int(total * cache.gpu_memory_utilization) - peak - CUDA_CONTEXT_BYTES
    return max(0, min(ours, free - (peak - torch.cuda.memory_reserved(device))))
