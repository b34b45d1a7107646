"""A rank of a replica without an engine: its pool and its agent, in a process of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.config.engine import RankSidecar
from baton.engine.runner.tp_worker import make_sidecar
from baton.pages import PageLayout
from tests.remote import Remote


def shape_of(layout: PageLayout, num_pages: int) -> tuple[int, ...]:
    heads = layout.num_planes, layout.heads_per_rank
    return (num_pages, layout.num_layers, *heads, layout.page_size, layout.head_dim)


def fill(pool: Tensor, layout: PageLayout, rank: int, seed: int) -> None:
    """Fill a pool with random contents, the same whole for every number of ranks."""
    shape = list(pool.shape)
    shape[3] = layout.num_kv_heads
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    heads = layout.heads_of(rank)
    pool.copy_(whole[:, :, :, heads.start : heads.stop])


class LateSteps:
    """The steps of a device that writes when a test says so."""

    def __init__(self) -> None:
        self.launched = 0
        self.passed = 0

    def has_passed(self, mark: int) -> bool:
        return mark <= self.passed


class ListeningRank:
    def __init__(self, sidecar: RankSidecar, layout: PageLayout, rank: int, num_pages: int) -> None:
        self._layout = layout
        self._rank = rank
        self._agent = make_sidecar(sidecar)
        self._pool = self._agent.zeros_on_cpu(shape_of(self._layout, num_pages), torch.bfloat16)
        self._steps = LateSteps()
        self._agent.start(rank, self._pool, self._steps)

    def fill(self, seed: int) -> None:
        fill(self._pool, self._layout, self._rank, seed)

    def pass_mark(self, mark: int) -> None:
        """Write everything that was launched before the mark."""
        self._steps.passed = mark

    def pages(self, pages: Sequence[int]) -> bytes:
        return self._pool[list(pages)].contiguous().view(torch.uint8).numpy().tobytes()

    def close(self) -> None:
        self._agent.close()


class RankProcess(Remote):
    """A rank in a process, which starts at once; its agent connects to the endpoint that is made next."""

    def __init__(self, sidecar: RankSidecar, layout: PageLayout, rank: int, num_pages: int) -> None:
        super().__init__(ListeningRank, sidecar, layout, rank, num_pages)
        self._layout = layout

    def pages(self, pages: Sequence[int]) -> Tensor:
        """Return the contents of pages."""
        self.start_call("pages", pages)
        content = bytearray(self.result())
        return torch.frombuffer(content, dtype=torch.bfloat16).view(shape_of(self._layout, len(pages)))

    def close(self) -> None:
        self.end_input()
        self.wait()
