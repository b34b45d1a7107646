import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.runner.model_runner import KvPool
from baton.pages import PageLayout
from tests.layouts import a_layout

CPU = torch.device("cpu")


def layout(dtype: str = "float32") -> PageLayout:
    return a_layout(tp_size=2, page_size=4, num_layers=3, num_kv_heads=4, head_dim=6, dtype=dtype)


def numbered_pool(num_pages: int, num_host_pages: int, dtype: str = "float32") -> KvPool:
    """Device page p is filled with p + 1, host page h with 100 + h."""
    pool = KvPool(layout(dtype), num_pages, num_host_pages, CPU)
    pool.device += torch.arange(1, num_pages + 1).view(-1, 1, 1, 1, 1, 1)
    pool.host += torch.arange(100, 100 + num_host_pages).view(-1, 1, 1, 1, 1, 1)
    return pool


def contents(pages: torch.Tensor) -> list[float]:
    """The number that fills each page, which must be the same throughout."""
    flat = pages.flatten(1)
    assert (flat == flat[:, :1]).all()
    values: list[float] = flat[:, 0].tolist()
    return values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_pool_has_the_layout_of_one_rank_and_holds_zeros(dtype: str) -> None:
    pool = KvPool(layout(dtype), 5, 2, CPU)
    assert pool.device.shape == (5, 3, 2, 2, 4, 6) and pool.host.shape == (2, 3, 2, 2, 4, 6)
    assert pool.device.is_contiguous() and not pool.device.any() and not pool.host.any()
    assert pool.device.nbytes == 5 * layout(dtype).page_bytes


@given(
    leaving=st.lists(st.integers(0, 5), unique=True, max_size=4),
    coming=st.lists(st.integers(0, 5), unique=True, max_size=4),
    data=st.data(),
)
def test_pages_leave_before_others_come_back(
    leaving: list[int], coming: list[int], data: st.DataObject
) -> None:
    pool = numbered_pool(6, 5)
    host_pages = st.permutations(range(5))
    to_host = tuple(zip(leaving, data.draw(host_pages), strict=False))
    to_device = tuple(zip(coming, data.draw(host_pages), strict=False))
    device, host = contents(pool.device), contents(pool.host)
    for device_page, host_page in to_host:
        host[host_page] = device[device_page]
    for device_page, host_page in to_device:
        device[device_page] = host[host_page]
    pool.copy(to_host, to_device)
    assert contents(pool.device) == device and contents(pool.host) == host


def test_page_comes_back_bit_for_bit() -> None:
    pool = KvPool(layout("bfloat16"), 3, 1, CPU)
    pool.device.copy_(torch.randn(pool.device.shape, generator=torch.Generator().manual_seed(0)))
    before = pool.device.clone()
    pool.copy([(1, 0)], [])
    pool.device[1] = 0
    pool.copy([], [(1, 0)])
    assert torch.equal(pool.device, before)


def test_cpu_pool_lies_in_the_given_memory() -> None:
    memory = torch.zeros(10**5)
    asked: list[tuple[int, ...]] = []

    def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        asked.append(tuple(shape))
        return memory.view(dtype)[: math.prod(shape)].view(tuple(shape))

    pool = KvPool(layout(), 5, 0, CPU, zeros)
    assert asked == [(5, 3, 2, 2, 4, 6)] and pool.device.data_ptr() == memory.data_ptr()
