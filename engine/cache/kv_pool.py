"""The tensors behind the ledgers: the device pool of one rank and its host pages, and how many pages fit."""

import os
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from baton.config.engine import CacheConfig
from baton.engine.cache.host_tier import PageCopy
from baton.errors import ConfigError
from baton.kernels.huge_pages import huge_zeros
from baton.kernels.native import TORCH_DTYPES
from baton.kernels.pages import gather_pages, scatter_pages
from baton.pages import PageLayout

# (shape, dtype) -> zeros for a CPU pool, in memory of the caller's choice
ZerosOnCpu = Callable[[Ordered[int], torch.dtype], Tensor]


class KvPool:
    """`device` and `host`: [pages, num_layers, 2, heads_per_rank, page_size, head_dim], zeros at first."""

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
        """Copy whole pages, first to the host, then to the device. Blocks until the copies are done."""
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


DEFAULT_CPU_BYTES: Final = 4 * 2**30
CUDA_CONTEXT_BYTES: Final = (
    768 * 2**20
)  # of a process, beyond the memory that torch reserves; a cautious guess
MAX_CPU_SHARE: Final = 0.25  # of the available memory


def count_pages(cache: CacheConfig, layout: PageLayout, device: torch.device) -> int:
    """The number of pages that fit in the configured memory, or in the available memory without a setting."""
    given = cache.kv_cache_memory_bytes
    if given is None:
        given = _free_bytes(cache, device)
    return given // layout.page_bytes


def check_fits(cache: CacheConfig, num_pages: int, layout: PageLayout, max_model_len: int) -> None:
    """ConfigError unless one sequence of `max_model_len` tokens fits in the pool."""
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
    """Memory that Linux grants without swapping. File caches count as available."""
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
    # The caller has loaded the weights and run a full step: later steps need as much memory as that step.
    # Another process may share the device and load at this moment. Its memory reduces the free memory, never
    # our own share.
    peak = torch.cuda.max_memory_reserved(device)
    ours = int(total * cache.gpu_memory_utilization) - peak - CUDA_CONTEXT_BYTES
    return max(0, min(ours, free - (peak - torch.cuda.memory_reserved(device))))
