"""KV pages on a GPU: packed and unpacked beside a copy of the same bytes, and moved between two processes.

Without CUDA each has a stand-in that runs the same code around it: the CPU's own gather and scatter, shm for
cuda_ipc, gloo for NCCL; the notes say so.
"""

import random
from collections.abc import Iterator
from functools import partial
from typing import Final

import torch
from torch import Tensor

from baton.bench.gpu_kv_ends import Move, Moved, Way, measure
from baton.bench.gpu_session import Session, require_equal
from baton.bench.report import Row, format_number
from baton.bench.timing import Call, seconds_per_call, synchronize
from baton.kernels.gather_pages import gather_pages
from baton.kernels.scatter_pages import scatter_pages
from baton.kvtransfer.page_packing import DevicePages, PagePacking, packing_of
from baton.kvtransfer.transfer_plan import Offsets, TransferPlan, plan_transfer
from baton.layout import PageLayout

PAGE_SIZE: Final = 16
LEAST_NCCL: Final = (2, 30)  # the first with NCCL_MULTI_RANK_GPU_ENABLE
BAR_PERCENT: Final = 85.0


def gather(session: Session) -> Iterator[Row]:
    """Scattered pages into staging, percent of a copy of as many bytes."""
    pool = _pool(session)
    for peer in _peers(session):
        plan = plan_transfer(_layout(session, 1), peer, 0, 0)
        for num_units in session.sizes.kv_units:
            yield _packing_row(session, "gather", pool, plan, num_units)


def scatter(session: Session) -> Iterator[Row]:
    """Staging into scattered pages."""
    pool = _pool(session)
    for peer in _peers(session):
        plan = plan_transfer(peer, _layout(session, 1), 0, 0)
        for num_units in session.sizes.kv_units:
            yield _packing_row(session, "scatter", pool, plan, num_units)


def cuda_ipc(session: Session) -> Iterator[Row]:
    """From push to DONE between two processes, percent of a contiguous copy within one."""
    way: Way = "cuda_ipc" if session.device.type == "cuda" else "shm"
    for moved in measure(_move(session, way)):
        percent = 100 * moved.copy_s / moved.seconds
        name = f"cuda_ipc, {_size(moved.num_bytes)}"
        note = f"{_gbps(moved.num_bytes, moved.seconds)}, copy {_gbps(moved.num_bytes, moved.copy_s)}"
        note += _stand_in(session, "shm between two processes")
        if moved.num_units == session.sizes.kv_moved_units[-1]:
            yield session.bar(name, percent, "% of copy", BAR_PERCENT, note)
        else:  # what a push costs before its first byte moves is most of it
            yield Row(name, percent, "% of copy", note=note)


def nccl(session: Session) -> Iterator[Row]:
    """From push to DONE between two ranks on one GPU."""
    has_gpu = session.device.type == "cuda"
    if has_gpu:
        missing = _missing_nccl()
        if missing:
            yield Row("nccl, two ranks on one GPU", None, "", note=missing)
            return
    for moved in measure(_move(session, "nccl" if has_gpu else "gloo")):
        yield _pair_row(session, moved)


def _pair_row(session: Session, moved: Moved) -> Row:
    percent = format_number(100 * moved.copy_s / moved.seconds)
    note = f"{percent} % of a copy" + _stand_in(session, "gloo between two processes")
    gbps = moved.num_bytes / moved.seconds / 1e9
    return Row(f"nccl, two ranks on one GPU, {_size(moved.num_bytes)}", gbps, "GB/s", note=note)


def _missing_nccl() -> str:
    """Why two ranks cannot share a GPU here; empty when they can."""
    if not torch.distributed.is_nccl_available():
        return "this build of torch has no NCCL"
    version = torch.cuda.nccl.version()
    if version[:2] < LEAST_NCCL:
        least = ".".join(map(str, LEAST_NCCL))
        return f"NCCL {'.'.join(map(str, version))}: two ranks on one GPU need {least}"
    return ""


def _packing_row(session: Session, verb: str, pool: Tensor, plan: TransferPlan, num_units: int) -> Row:
    packing, num_bytes = packing_of(pool), num_units * plan.unit_bytes
    side = plan.source if verb == "gather" else plan.destination
    pages = random.Random(num_units).sample(range(len(pool)), len(pool))
    # Every call has pages and staging of its own: what fits into a cache is measured from the cache.
    offsets = [
        side.offsets(0, num_units, pages[first : first + num_units])
        for first in range(0, len(pages) - num_units + 1, num_units)
    ]
    staging = packing.staging(len(offsets) * num_bytes)
    parts = list(staging.split(num_bytes))
    _check(verb, packing, pool, plan, offsets[0], parts[0])
    calls = [
        _call(verb, packing, plan, offset_N, part) for offset_N, part in zip(offsets, parts, strict=True)
    ]
    contiguous = pool.view(-1)[: len(staging)].split(num_bytes)
    copies: list[Call] = [partial(part.copy_, source) for part, source in zip(parts, contiguous, strict=True)]
    seconds, copy_s = (seconds_per_call(each, session.device) for each in (calls, copies))
    note = f"{_gbps(2 * num_bytes, seconds)} read and written, copy {_gbps(2 * num_bytes, copy_s)}"
    note += _stand_in(session, "the CPU's own " + verb)
    name = f"kv {verb}, {_size(num_bytes)} in runs of {_size(plan.run_bytes)}"
    return session.bar(name, 100 * copy_s / seconds, "% of copy", BAR_PERCENT, note)


def _call(verb: str, packing: PagePacking, plan: TransferPlan, offset_N: Offsets, part: Tensor) -> Call:
    """On a GPU the kernel alone: a graph cannot hold how its row numbers get there."""
    if not isinstance(packing, DevicePages):
        return partial(packing.pack if verb == "gather" else packing.unpack, plan, offset_N, part)
    rows = packing.rows(plan, offset_N)
    content, staging = packing.content.view(-1, plan.row_bytes), part.view(-1, plan.row_bytes)
    if verb == "gather":
        return partial(gather_pages, content, rows, staging)
    return partial(scatter_pages, staging, rows, content)


def _check(
    verb: str, packing: PagePacking, pool: Tensor, plan: TransferPlan, offset_N: Offsets, part: Tensor
) -> None:
    """The way that transports take, against plain indexing by runs."""
    if verb == "gather":
        packing.note_written()
        packing.pack(plan, offset_N, part)
    else:
        part.random_()
        synchronize(pool.device)
        packing.unpack(plan, offset_N, part)
    packing.finish()
    runs = torch.from_numpy(offset_N // plan.run_bytes).to(pool.device)
    expected = pool.view(-1, plan.run_bytes)[runs].view(-1)
    require_equal(f"{verb} of pages", part, expected)


def _pool(session: Session) -> Tensor:
    layout = _layout(session, 1)
    pool = torch.empty(
        session.sizes.num_kv_pages, layout.page_bytes, dtype=torch.uint8, device=session.device
    )
    return pool.random_()


def _peers(session: Session) -> tuple[PageLayout, PageLayout]:
    """Ranks whose pages are cut alike, and ranks that have half of the heads: many short runs."""
    return _layout(session, 1), _layout(session, 2)


def _layout(session: Session, tp_size: int) -> PageLayout:
    model = session.sizes.model
    return PageLayout(
        tp_size=tp_size,
        page_size=PAGE_SIZE,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype="bfloat16",
    )


def _move(session: Session, way: Way) -> Move:
    return Move(
        way=way,
        layout=_layout(session, 1),
        num_pages=max(session.sizes.num_kv_pages, *session.sizes.kv_moved_units),
        num_units=session.sizes.kv_moved_units,
    )


def _stand_in(session: Session, what: str) -> str:
    return "" if session.device.type == "cuda" else f"; {what} stands in"


def _size(num_bytes: int) -> str:
    large = num_bytes >= 2**20
    return f"{format_number(num_bytes / (2**20 if large else 1024))} {'MiB' if large else 'KiB'}"


def _gbps(num_bytes: int, seconds: float) -> str:
    return f"{format_number(num_bytes / seconds / 1e9)} GB/s"
