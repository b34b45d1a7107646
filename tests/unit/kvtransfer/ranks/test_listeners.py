"""Which doors a pool has, by where it lies; a CPU's pool stands in for a GPU's."""

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from torch import Tensor

from baton.clock import SystemClock
from baton.kvtransfer.ranks import listeners
from baton.kvtransfer.ranks.listeners import PoolListeners, RankPages
from baton.kvtransfer.ranks.pages import PageGenerations, SharedPool
from baton.kvtransfer.settings import EndpointSettings
from baton.pages import PageLayout
from baton.rpc.connection import DroppedPeers

LAYOUT = PageLayout(tp_size=1, page_size=16, num_layers=1, num_kv_heads=1, head_dim=16, dtype="bfloat16")
NUM_PAGES = 4


class GpuPages(RankPages):
    def __init__(self, pool: Tensor) -> None:
        super().__init__(pool)
        self.device = "cuda"


class FakeDevicePool:
    def __init__(self, pool: Tensor) -> None:
        self.generations = PageGenerations(len(pool))

    def offer(self) -> tuple[bytes, tuple[int, ...]]:
        return b"", ()

    def close(self) -> None:
        self.generations.file.close()


def doors(transport: str = "auto", *, is_shared: bool = False) -> PoolListeners:
    shared = SharedPool() if is_shared else None
    zeros = torch.zeros if shared is None else shared.zeros
    settings = EndpointSettings(key=b"k" * 32, fingerprint="model", layout=LAYOUT, transport=transport)
    return PoolListeners(
        zeros((NUM_PAGES, LAYOUT.page_bytes), dtype=torch.uint8),
        shared,
        settings.for_rank(0),
        b"k" * 32,
        b"i" * 16,
        lambda transfers: None,
        clock=SystemClock(),
        dropped=DroppedPeers(),
    )


@pytest.fixture(params=[True, False])
def has_nccl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    monkeypatch.setattr(listeners, "RankPages", GpuPages)
    monkeypatch.setattr(listeners, "SharedDevicePool", FakeDevicePool)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: request.param)
    yield request.param


@pytest.mark.parametrize(
    ("transport", "is_shared", "names"),
    [
        ("auto", False, ("tcp",)),
        ("auto", True, ("shm", "tcp")),
        ("gloo", True, ("shm", "gloo", "tcp")),
    ],
)
def test_a_pool_on_a_cpu(transport: str, is_shared: bool, names: tuple[str, ...]) -> None:
    with closing(doors(transport, is_shared=is_shared)) as made:
        assert made.names == names
        assert made.message().device == "cpu"
        assert (made.generations is not None) == is_shared


def test_a_pool_on_a_gpu(has_nccl: bool) -> None:
    with closing(doors("gloo")) as made:
        assert made.names == (("cuda_ipc", "nccl", "tcp") if has_nccl else ("cuda_ipc", "tcp"))
        assert made.message().device == "cuda"
        assert made.generations is not None
