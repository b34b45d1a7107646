"""Runs packed out of one pool and unpacked into another, directly or by way of host memory."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from baton.kernels.pages import copy_pages, copy_runs_reference, decode_pages, encode_pages
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.transports.pages import DevicePages, PagePacking, StagedParts, packing_of
from baton.pages import PageLayout
from tests.fake_cuda import DEVICE, FakeCuda
from tests.layouts import a_layout
from tests.transfer_ends import as_received, runs_of

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


def layout(tp_size: int, page_size: int, transfer_dtype: str = "auto") -> PageLayout:
    return a_layout(
        tp_size=tp_size, page_size=page_size, num_kv_heads=6, dtype="bfloat16", transfer_dtype=transfer_dtype
    )


def pool_of(cut: PageLayout, num_pages: int, device: str, fill: int | None = None) -> Tensor:
    shape = (num_pages, 2, 2, cut.heads_per_rank, cut.page_size, 8)
    values = torch.randint(0, 2**14, shape, generator=torch.Generator().manual_seed(1))  # finite
    content = values if fill is None else torch.full(shape, fill)
    return content.to(torch.int16).view(torch.bfloat16).to(device)


def raw(pool: Tensor) -> Tensor:
    return pool.cpu().view(-1).view(torch.uint8)


ON_EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)
CUTS = pytest.mark.parametrize(
    ("one", "other", "ranks"),
    [
        (layout(1, 16), layout(1, 16), (0, 0)),
        (layout(2, 16), layout(3, 16), (1, 1)),
        (layout(1, 8), layout(2, 32), (0, 1)),
        (layout(1, 16, "int8"), layout(1, 16, "int8"), (0, 0)),
        (layout(2, 16, "fp8"), layout(3, 16, "fp8"), (1, 1)),
        (layout(2, 32, "int8"), layout(1, 8, "int8"), (1, 0)),
    ],
    ids=["equal", "overlapping heads", "tp and pages", "int8", "fp8 of heads", "int8, tp and pages"],
)


@ON_EACH_DEVICE
@CUTS
def test_packed_runs_are_unpacked_where_the_plan_says(
    one: PageLayout, other: PageLayout, ranks: tuple[int, int], device: str
) -> None:
    plan = plan_transfer(one, other, *ranks)
    source, destination = pool_of(one, 12, device), pool_of(other, 12, device, fill=0)
    pages = [5, 0, 11, 7, 2, 9, 1, 3], [6, 4, 10, 8, 0, 2, 3, 1]
    runs = runs_of(plan, 1, 8, *pages)
    expected = raw(destination).clone()
    copy_runs_reference(
        as_received(plan, raw(source)),
        expected,
        runs.source_offset_N,
        runs.destination_offset_N,
        runs.run_bytes,
    )
    sender, receiver = packing_of(source), packing_of(destination)
    staging = sender.staging(7 * plan.sent_unit_bytes)
    sender.note_written()
    sender.pack(plan, runs.source_offset_N, staging)
    sender.finish()
    receiver.unpack(plan, runs.destination_offset_N, staging)
    receiver.finish(10.0)
    assert torch.equal(raw(destination), expected)


@ON_EACH_DEVICE
@CUTS
def test_parts_of_any_size_cross_host_memory(
    one: PageLayout, other: PageLayout, ranks: tuple[int, int], device: str
) -> None:
    plan = plan_transfer(one, other, *ranks)
    source, destination = pool_of(one, 12, device), pool_of(other, 12, device, fill=0)
    expected = raw(destination).clone()
    sender, receiver = (StagedParts(packing_of(pool)) for pool in (source, destination))
    for first, stop in ((2, 4), (0, 2), (4, 8)):
        runs = runs_of(plan, first, stop, [5, 0, 11, 7, 2, 9, 1, 3], [6, 4, 10, 8, 0, 2, 3, 1])
        fetched = sender.fetch(plan, runs.source_offset_N)
        assert fetched.device.type == "cpu" and len(fetched) == (stop - first) * plan.sent_unit_bytes
        receiver.room(len(fetched)).copy_(fetched)
        receiver.store(plan, runs.destination_offset_N)
        offsets = runs.source_offset_N, runs.destination_offset_N
        copy_runs_reference(as_received(plan, raw(source)), expected, *offsets, runs.run_bytes)
    assert torch.equal(raw(destination), expected)


def test_a_pool_must_be_contiguous() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        packing_of(torch.zeros(4, 8, 2)[:, ::2])
    with pytest.raises(ValueError, match="contiguous"):
        packing_of(torch.zeros(4))


# Lanes of a GPU, on a stand-in for the CUDA runtime.


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    runtime = FakeCuda()
    runtime.install(monkeypatch)
    with runtime:
        yield runtime


def test_each_lane_waits_for_writers_and_is_waited_for_alone(cuda: FakeCuda) -> None:
    cut = layout(1, 16)
    plan = plan_transfer(cut, cut, 0, 0)
    pool = torch.arange(8 * cut.page_bytes, device=DEVICE).view(8, -1).to(torch.uint8)
    packing = packing_of(pool, 2, stream_priority=-1)
    assert isinstance(packing, DevicePages)
    staging = [packing.staging(2 * cut.page_bytes) for _ in range(2)]
    lanes = [id(stream) for stream in packing.streams]
    assert [stream.priority for stream in cuda.streams] == [-1, -1]

    packing.note_written()
    cuda.calls.clear()
    packing.pack(plan, plan.source.offsets(0, 2, (6, 1)), staging[0], 0)
    waits = [call.value for call in cuda.calls if call.name == "stream waits for event"]
    assert waits == lanes, "a lane packs before the writer is done"
    cuda.calls.clear()
    packing.pack(plan, plan.source.offsets(0, 2, (3, 4)), staging[1], 1)
    packing.finish(lane=1)
    packing.unpack(plan, plan.destination.offsets(0, 2, (0, 5)), staging[1], 1)
    assert [call.name for call in cuda.calls if "event" in call.name] == ["record event"]
    assert torch.equal(raw(pool[[0, 5]]), raw(pool[[3, 4]])) and torch.equal(
        raw(staging[0]), raw(pool[[6, 1]])
    )
    packing.finish(lane=0)
    assert [cuda.events_on[lane] for lane in lanes] == [1, 1]


def test_threads_that_chose_no_gpu_open_no_context_on_another(cuda: FakeCuda) -> None:
    cut = layout(1, 16)
    plan = plan_transfer(cut, cut, 0, 0)
    packing = packing_of(torch.zeros(8, cut.page_bytes, dtype=torch.uint8, device=DEVICE))
    parts = StagedParts(packing)
    parts.fetch(plan, plan.source.offsets(0, 2, (6, 1)))
    parts.store(plan, plan.destination.offsets(0, 2, (3, 4)))
    assert not cuda.strays


@pytest.mark.parametrize("transfer_dtype", ["auto", "int8"])
def test_warm_up_launches_every_kernel_of_transfers_and_changes_no_page(
    transfer_dtype: str, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: set[tuple[str, int]] = set()  # name, ids

    def note(name: str, launch: Callable[..., None]) -> Callable[..., None]:
        def noted(*given: Tensor | None) -> None:
            sides = given[1::2] if name == "copy_pages" else ()
            launched.add((name, sum(1 << side for side, ids_N in enumerate(sides) if ids_N is not None)))
            launch(*given)

        return noted

    kernels: dict[str, Callable[..., None]] = {
        "copy_pages": copy_pages,
        "encode_pages": encode_pages,
        "decode_pages": decode_pages,
    }
    for name, launch in kernels.items():
        monkeypatch.setattr(f"baton.kvtransfer.transports.pages.{name}", note(name, launch))
    cut = layout(2, 16, transfer_dtype)
    pool = torch.zeros(3, cut.page_bytes, dtype=torch.uint8, device=DEVICE)
    packing_of(pool, 2).warm_up(plan_transfer(cut, cut, 1, 1))
    assert cuda.calls[-1].name == "record event" and not raw(pool).any()
    copies = {("copy_pages", 1), ("copy_pages", 2), ("copy_pages", 3)}  # out of pages, into them, and both
    coded = set() if transfer_dtype == "auto" else {("encode_pages", 0), ("decode_pages", 0)}
    assert launched == copies | coded


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_packing_waits_for_the_stream_that_wrote_the_pages() -> None:
    pool = torch.zeros(64, 2**20, dtype=torch.uint8, device="cuda")
    packing: PagePacking = packing_of(pool)
    assert isinstance(packing, DevicePages)
    cut = a_layout(num_layers=1, num_kv_heads=8, head_dim=2048, dtype="bfloat16")
    plan = plan_transfer(cut, cut, 0, 0)
    assert plan.run_bytes == 2**20
    staging = packing.staging(64 * 2**20)
    torch.cuda._sleep(10**8)  # the step is still computing
    pool.fill_(7)
    packing.note_written()
    packing.pack(plan, plan.source.offsets(0, 64, range(64)), staging)
    packing.finish()
    assert bool((staging == 7).all())
