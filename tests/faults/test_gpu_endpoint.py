"""Hand-offs between pools on a GPU, and between a GPU and a CPU, of endpoints in two processes."""

from collections.abc import Callable

import pytest
import torch

from tests.endpoint_host import NUM_PAGES, EndpointHost, HostProcess
from tests.replicas import assert_handed_over

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize(
    ("asked", "devices", "expected"),
    [
        ("auto", ("cuda", "cuda"), "cuda_ipc"),
        ("nccl", ("cuda", "cuda"), "nccl"),
        ("tcp", ("cuda", "cuda"), "tcp"),
        ("auto", ("cuda", "cpu"), "tcp"),
        ("auto", ("cpu", "cuda"), "tcp"),
    ],
)
def test_pages_arrive_exactly(
    asked: str,
    devices: tuple[str, str],
    expected: str,
    page_size: int,
    make_host: Callable[..., EndpointHost],
) -> None:
    source = make_host(is_shared=False, transport=asked, device=devices[0])
    with HostProcess(page_size=page_size, device=devices[1]) as destination:
        for _ in range(3):
            assert_handed_over(source, destination)
        opened = source.transports()
        if expected == "nccl" and opened["tcp"] and torch.cuda.device_count() == 1:
            pytest.skip("two ranks on one GPU need NCCL 2.30: tcp took over, exactly")
        assert opened[expected] == 1
        assert source.counts()["FREE"] == NUM_PAGES
