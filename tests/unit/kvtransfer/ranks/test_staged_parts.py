"""Pages by way of staging memory, with a CPU's packing in place of a GPU's, and a GPU's where it is."""

import pytest
import torch
from torch import Tensor

from baton.kernels.copy_runs import copy_runs_reference
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.transports.pages import StagedParts, packing_of
from baton.pages import PageLayout

NUM_PAGES = 8
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


def layout(tp_size: int, page_size: int) -> PageLayout:
    return PageLayout(
        tp_size=tp_size, page_size=page_size, num_layers=2, num_kv_heads=4, head_dim=8, dtype="bfloat16"
    )


def pool_of(cut: PageLayout, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_PAGES, cut.page_bytes)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("one", "other"),
    [(layout(1, 16), layout(1, 16)), (layout(1, 16), layout(2, 16)), (layout(1, 32), layout(2, 16))],
    ids=["equal", "tp", "tp and pages"],
)
def test_parts_of_any_size_cross_host_memory(one: PageLayout, other: PageLayout, device: str) -> None:
    plan = plan_transfer(one, other, 0, 0)
    source, destination = pool_of(one, device, 1), pool_of(other, device, 2)
    expected = destination.cpu().view(-1)
    sender, receiver = (StagedParts(packing_of(pool)) for pool in (source, destination))
    for first, stop in ((2, 4), (0, 2), (4, 6)):
        runs = plan.runs(first, stop, [5, 0, 3, 6, 1, 2], [7, 2, 4, 0, 1, 3])
        fetched = sender.fetch(plan, runs.source_offset_N)
        assert fetched.device.type == "cpu" and len(fetched) == runs.num_bytes
        receiver.room(runs.num_bytes).copy_(fetched)
        receiver.store(plan, runs.destination_offset_N)
        offsets = runs.source_offset_N, runs.destination_offset_N
        copy_runs_reference(source.cpu().view(-1), expected, *offsets, runs.run_bytes)
    assert torch.equal(destination.cpu().view(-1), expected)


def test_room_is_made_once_for_the_largest_part() -> None:
    parts = StagedParts(packing_of(pool_of(layout(1, 16), "cpu", 1)))
    large = parts.room(1000).data_ptr()
    assert parts.room(10).data_ptr() == large and len(parts.room(10)) == 10
    assert parts.room(1000).data_ptr() == large
