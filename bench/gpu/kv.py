"""KV pages on a GPU: packed and unpacked beside a copy of the same bytes, and moved between two processes.

Without CUDA each kind has a stand-in with the same code around it, as the notes say: the CPU's own gather and
scatter, shm for cuda_ipc. The two processes are those of the KV suite (bench/kv/ends.py).
"""

import random
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Final, NamedTuple

import torch
from torch import Tensor

from baton.bench.gpu.session import Session, require_equal
from baton.bench.kv.ends import Ends, bf16_layout
from baton.bench.machine import Call, seconds_per_call, synchronize, wall_seconds
from baton.bench.report import Row, format_number
from baton.kernels.pages import Offsets, copy_pages
from baton.kvtransfer.protocol.transfer_plan import TransferPlan, plan_transfer
from baton.kvtransfer.transports.pages import DevicePages, PagePacking, packing_of
from baton.pages import PageLayout

PAGE_SIZE: Final = 16
BAR_PERCENT: Final = 85.0
NUM_ROUNDS: Final = 9


class Moved(NamedTuple):
    """Medians of one number of pages: seconds while they moved, and of a copy within one process."""

    num_pages: int
    num_bytes: int
    seconds: float
    copy_s: float


def move(session: Session, transport: str) -> Iterator[Moved]:
    """Move pages to another process; rounds alternate with copies. RuntimeError: pages do not arrive."""
    counts, layout = session.sizes.kv_moved_units, _layout(session, 1)
    with Ends(layout, max(counts) * PAGE_SIZE, (transport,), session.device.type) as ends:
        content = ends.pool(transport).view(-1).view(torch.uint8)
        target = torch.empty_like(content)
        for num_pages in counts:
            num_bytes = num_pages * layout.page_bytes
            copy = partial(target[:num_bytes].copy_, content[:num_bytes])
            times_s = [
                (
                    ends.send(transport, num_pages * PAGE_SIZE).moving_s,
                    wall_seconds(copy, session.device),
                )
                for _ in range(1 + NUM_ROUNDS)
            ]
            seconds, copy_s = (median(each) for each in zip(*times_s[1:], strict=True))
            yield Moved(num_pages, num_bytes, seconds, copy_s)


def cuda_ipc(session: Session) -> Iterator[Row]:
    """Measure pages that move between two processes, in percent of a contiguous copy within one."""
    for moved in move(session, "cuda_ipc" if session.device.type == "cuda" else "shm"):
        percent = 100 * moved.copy_s / moved.seconds
        note = f"{_gbps(moved.num_bytes, moved.seconds)}, copy {_gbps(moved.num_bytes, moved.copy_s)}"
        note += _stand_in(session, "shm between two processes")
        # A small push costs most before its first byte.
        bar = BAR_PERCENT if moved.num_pages == max(session.sizes.kv_moved_units) else None
        yield session.bar(f"cuda_ipc, {_size(moved.num_bytes)}", percent, "% of copy", bar, note)


def gather(session: Session) -> Iterator[Row]:
    """Pack scattered pages into staging, in percent of a copy of as many bytes."""
    pool = _pool(session)
    for peer in _peers(session):
        plan = plan_transfer(_layout(session, 1), peer, 0, 0)
        for num_units in session.sizes.kv_units:
            yield _packing_row(session, "gather", pool, plan, num_units)


def scatter(session: Session) -> Iterator[Row]:
    """Unpack staging into scattered pages."""
    pool = _pool(session)
    for peer in _peers(session):
        plan = plan_transfer(peer, _layout(session, 1), 0, 0)
        for num_units in session.sizes.kv_units:
            yield _packing_row(session, "scatter", pool, plan, num_units)


def _packing_row(session: Session, verb: str, pool: Tensor, plan: TransferPlan, num_units: int) -> Row:
    packing, num_bytes = packing_of(pool), num_units * plan.sent_unit_bytes
    side = plan.source if verb == "gather" else plan.destination
    pages = random.Random(num_units).sample(range(len(pool)), len(pool))
    # Every call has pages and staging of its own: data that fits into a cache is measured from the cache.
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
    """Return the call; on a GPU the kernel alone, as a graph cannot hold the copy of its row numbers."""
    if not isinstance(packing, DevicePages):
        return partial(packing.pack if verb == "gather" else packing.unpack, plan, offset_N, part)
    rows = packing.rows(plan, offset_N)
    content, staging = packing.of_rows(plan), part.view(-1, plan.row_bytes)
    if verb == "gather":
        return partial(copy_pages, content, rows, staging, None)
    return partial(copy_pages, staging, None, content, rows)


def _check(
    verb: str, packing: PagePacking, pool: Tensor, plan: TransferPlan, offset_N: Offsets, part: Tensor
) -> None:
    """Compare the packing of transports with plain indexing by runs."""
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
    """Return the layout of a rank with equal pages, and of a rank with half of the heads: many short runs."""
    return _layout(session, 1), _layout(session, 2)


def _layout(session: Session, tp_size: int) -> PageLayout:
    model = session.sizes.model
    shape = model.num_layers, model.num_kv_heads, model.head_dim
    return bf16_layout(*shape, page_size=PAGE_SIZE, tp_size=tp_size)


def _stand_in(session: Session, what: str) -> str:
    return "" if session.device.type == "cuda" else f"; {what} stands in"


def _size(num_bytes: int) -> str:
    large = num_bytes >= 2**20
    return f"{format_number(num_bytes / (2**20 if large else 1024))} {'MiB' if large else 'KiB'}"


def _gbps(num_bytes: int, seconds: float) -> str:
    return f"{format_number(num_bytes / seconds / 1e9)} GB/s"
