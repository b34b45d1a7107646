"""The outcome of a kernel's case, and random inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Outcome:
    kernel: Tensor
    reference: Tensor
    exact: bool = False


def normal(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal values that depend on the shape alone, the same on every device."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
