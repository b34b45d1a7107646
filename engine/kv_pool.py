"""The tensors behind the ledgers: the device pool of one rank, and the host pages it swaps with."""

from collections.abc import Callable
from collections.abc import Sequence as Ordered

import torch
from torch import Tensor

from baton.engine.dtypes import TORCH_DTYPES
from baton.engine.plan import PageCopy
from baton.kernels.gather_pages import gather_pages
from baton.kernels.huge_pages import huge_zeros
from baton.kernels.scatter_pages import scatter_pages
from baton.layout import PageLayout

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
