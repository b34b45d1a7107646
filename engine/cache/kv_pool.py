"""The tensors behind the ledgers: the device pool of one rank, and the host pages it swaps with."""

import os
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from baton.config.engine import CacheConfig
from baton.engine.models.weights import TORCH_DTYPES
from baton.engine.scheduler.plan import PageCopy
from baton.errors import ConfigError
from baton.kernels.huge_pages import huge_zeros
from baton.kernels.pages import gather_pages, scatter_pages
from baton.pages import PageLayout

# (shape, dtype) -> the zeros of a CPU pool, in memory of the caller's choice
ZerosOnCpu = Callable[[Ordered[int], torch.dtype], Tensor]


class KvPool:
    """`device`: [num_pages, num_layers, 2, heads_per_rank, page_size, head_dim], zeros at first."""

    def __init__(
        self,
        layout: PageLayout,
        num_pages: int,
        num_host_pages: int,
        device: torch.device,
        zeros_on_cpu: ZerosOnCpu = huge_zeros,
    ) -> None:
        shape = (layout.num_layers, 2, layout.heads_per_rank, layout.page_size, layout.head_dim)
        dtype = TORCH_DTYPES[layout.dtype]
        if device.type == "cpu":
            self.device: Tensor = zeros_on_cpu((num_pages, *shape), dtype)
        else:
            self.device = torch.zeros((num_pages, *shape), dtype=dtype, device=device)
        self.host: Tensor = torch.zeros(
            (num_host_pages, *shape), dtype=dtype, pin_memory=device.type == "cuda" and num_host_pages > 0
        )

    @torch.inference_mode()
    def copy(self, to_host: Ordered[PageCopy], to_device: Ordered[PageCopy]) -> None:
        """Move whole pages, first those that leave, then those that come back; done when it returns."""
        if to_host:
            device_pages, host_pages = zip(*to_host, strict=True)
            self.host[list(host_pages)] = self._gather(device_pages).cpu()
        if to_device:
            device_pages, host_pages = zip(*to_device, strict=True)
            staging = self.host[list(host_pages)].to(self.device.device)
            scatter_pages(staging, self._ids(device_pages), self.device)

    def _gather(self, pages: Ordered[int]) -> Tensor:
        staging = torch.empty(
            (len(pages), *self.device.shape[1:]), dtype=self.device.dtype, device=self.device.device
        )
        gather_pages(self.device, self._ids(pages), staging)
        return staging

    def _ids(self, pages: Ordered[int]) -> Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self.device.device)


# How many KV pages fit the memory given.

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
