"""The shards of a transfer, and the byte ranges that a shard copies between two ranks.

The page layouts of the two replicas may differ. A transfer consists of units of `min(source page_size,
destination page_size)` tokens. Its first token is a page boundary on both sides. A piece, units [first,
stop), is a list of runs: byte ranges of one length that are contiguous on both sides. Runs are ordered by
unit, then layer, keys before values, then head. Bytes on the wire and the bytes of a unit's digest have the
same order.

    what differs             a run is                              8B model, 16 tokens a page
    nothing                  a page                                2 MiB
    stage_layers             a page's shared layers                at one stage to 1 of 2: 1 MiB
    tp_size                  the shared heads of a layer's keys    32 KiB at tp 1 to 1 of 2 ranks: 16 KiB
    page_size                a unit of one head's keys             4 KiB

Offsets are counted from the start of a rank's pool, in int64: pools pass 2^31 bytes. Suffix N: runs.

A run is a sequence of rows (baton/pages.py). Where the layouts have a `transfer_dtype`, the wire carries each
row as codes and their scale. A row has a scale of its own, so runs may be cut in any way.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from baton.errors import ConfigError
from baton.kernels.native import TORCH_DTYPES
from baton.kernels.pages import CodedRows, Offsets
from baton.pages import PageLayout

Pages: TypeAlias = Sequence[int] | Offsets  # page ids of one side, in token order

MAX_DEFAULT_GROUPS: Final = 4
MIN_GROUP_BYTES: Final = 256 << 10  # of one page; smaller groups cost more than the overlap saves
MUST_AGREE: Final = (
    "num_layers",
    "num_planes",
    "num_kv_heads",
    "head_dim",
    "dtype",
    "cache_dtype",
    "transfer_dtype",
)


@dataclass(frozen=True, slots=True, eq=False)
class TransferSide:
    """The placement of a transfer's units in one rank's pages."""

    page_bytes: int
    units_per_page: int
    unit_stride_bytes: int  # between the same run of two units of one page
    run_offset_R: Offsets  # the runs of a page's first unit, from the start of the page

    def num_pages(self, num_units: int) -> int:
        """Return the number of pages that hold the first `num_units` units of a transfer."""
        return -(-num_units // self.units_per_page)

    def offsets(self, first: int, stop: int, pages: Pages) -> Offsets:
        """Return the byte offsets in the pool of the runs of units [first, stop), in plan order.

        pages: the pages of the transfer's units from 0 on. Raises ValueError when the pages end before
        `stop`, or when a page id is negative. The owner of the pool checks that every page is within the
        pool.
        """
        if not 0 <= first <= stop or self.num_pages(stop) > len(pages):
            raise ValueError(
                f"units [{first}, {stop}) do not lie in {len(pages)} pages of {self.units_per_page} units"
            )
        first_page = first // self.units_per_page  # earlier pages are skipped
        page_ids = np.asarray(pages[first_page : self.num_pages(stop)], dtype=np.int64)
        first, stop = first - first_page * self.units_per_page, stop - first_page * self.units_per_page
        if self.units_per_page == 1:
            unit_pages = page_ids[first:stop]
            starts = unit_pages * self.page_bytes
        else:
            units = np.arange(first, stop, dtype=np.int64)
            unit_pages = page_ids[units // self.units_per_page]
            starts = unit_pages * self.page_bytes + units % self.units_per_page * self.unit_stride_bytes
        if len(unit_pages) and int(unit_pages.min()) < 0:
            raise ValueError(f"page ids start at 0, got {int(unit_pages.min())}")
        if len(self.run_offset_R) == 1:  # fast path for short prompts
            offsets: Offsets = starts + self.run_offset_R[0]
            return offsets
        offsets = np.add.outer(starts, self.run_offset_R).reshape(-1)
        return offsets


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """The placement of all bytes that one source rank sends to one destination rank, for any pages.

    `unit_bytes` is 0 when nothing moves between the ranks, see `sent_heads`. `row_bytes` divides
    `run_bytes` and every offset on both sides, so a kernel can treat both pools as tables of rows of this
    size.
    """

    unit_tokens: int
    # In the pages of either side.
    unit_bytes: int
    run_bytes: int
    row_bytes: int
    source: TransferSide = field(repr=False)
    destination: TransferSide = field(repr=False)
    # On the wire.
    sent_unit_bytes: int
    sent_run_bytes: int
    sent_codes: CodedRows | None = None  # None: pages are sent as they are

    def as_stored(self) -> "TransferPlan":
        """Return the plan that moves the bytes of pages as they are."""
        if self.sent_codes is None:
            return self
        return replace(self, sent_unit_bytes=self.unit_bytes, sent_run_bytes=self.run_bytes, sent_codes=None)

    def num_units(self, num_tokens: int) -> int:
        """Return the number of units that hold `num_tokens` tokens. A partly filled last unit moves whole."""
        return -(-num_tokens // self.unit_tokens)


@lru_cache(maxsize=256)
def plan_transfer(
    source: PageLayout,
    destination: PageLayout,
    source_rank: int,
    destination_rank: int,
    layers: tuple[int, int] | None = None,
) -> TransferPlan:
    """Return the plan of a shard between two ranks; a grant and a pull have the same plan.

    layers: the layers [first, stop) of the shard; None: all that both ranks have. Raises ConfigError, with
    the field's name, when the layouts belong to different models; ValueError for a rank or layers out of
    range.
    """
    check_same_model(source, destination)
    shared = sent_heads(source, destination, source_rank, destination_rank)
    mine, theirs = source.heads_of(source_rank), destination.heads_of(destination_rank)
    common = _common_layers(source, destination, source_rank, destination_rank)
    first_layer, stop_layer = layers or (common.start, common.stop)
    if not common.start <= first_layer <= stop_layer <= common.stop or (layers and first_layer == stop_layer):
        raise ValueError(
            f"layers [{first_layer}, {stop_layer}) are out of range: the ranks share "
            f"[{common.start}, {common.stop})"
        )
    unit_tokens = min(source.page_size, destination.page_size)
    heads_per_run = len(shared) if source.page_size == destination.page_size else 1
    is_whole_page = heads_per_run == len(mine) == len(theirs) and source.page_size == destination.page_size
    starts = shared[::heads_per_run] if shared else shared
    # A slab is one layer's keys, or values. The slabs of whole pages are contiguous and form one run.
    num_slabs = source.num_planes * (stop_layer - first_layer)
    slabs = range(0, num_slabs, max(1, num_slabs) if is_whole_page else 1)
    sides = [
        _side(
            layout.of_stage(rank),
            unit_tokens,
            [head - heads.start for head in starts],
            slabs,
            source.num_planes * (first_layer - layout.layers_of(rank).start),
        )
        for layout, rank, heads in (
            (source, source_rank, mine),
            (destination, destination_rank, theirs),
        )
    ]
    num_rows = unit_tokens * num_slabs * len(shared)  # of a unit
    num_runs = len(sides[0].run_offset_R)
    rows_per_run = num_rows // num_runs if num_runs else 0
    run_bytes = rows_per_run * source.row_bytes
    return TransferPlan(
        unit_tokens=unit_tokens,
        unit_bytes=num_rows * source.row_bytes,
        run_bytes=run_bytes,
        sent_unit_bytes=num_rows * source.sent_row_bytes,
        sent_run_bytes=rows_per_run * source.sent_row_bytes,
        sent_codes=sent_codes(source),
        row_bytes=_common_divisor(run_bytes, sides),
        source=sides[0],
        destination=sides[1],
    )


def sent_codes(layout: PageLayout) -> CodedRows | None:
    """Return the codes by which transfers of this layout send rows; None: pages are sent as they are."""
    if layout.transfer_dtype == "auto":
        return None
    return CodedRows(layout.head_dim, TORCH_DTYPES[layout.dtype], TORCH_DTYPES[layout.transfer_dtype])


def sent_heads(source: PageLayout, destination: PageLayout, source_rank: int, destination_rank: int) -> range:
    """Return the heads that a source rank sends to a destination rank.

    Where several source ranks hold copies of a head, each destination rank gets the head from one of them.
    """
    for layout, rank in ((source, source_rank), (destination, destination_rank)):
        if not 0 <= rank < layout.num_ranks:
            raise ValueError(f"rank {rank} is out of range: the layout has {layout.num_ranks} ranks")
    copy, wanted_copy = source_rank % source.num_copies, destination_rank % destination.num_copies
    if copy != wanted_copy * source.num_copies // destination.num_copies:
        return range(0)
    mine, theirs = source.heads_of(source_rank), destination.heads_of(destination_rank)
    return range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))


def check_same_model(source: PageLayout, destination: PageLayout) -> None:
    """Raise ConfigError when the two layouts differ in more than tp_size, stage_layers and page_size."""
    for name in MUST_AGREE:
        ours, theirs = getattr(source, name), getattr(destination, name)
        if ours != theirs:
            raise ConfigError(f"pages cannot move between {name} {ours} and {name} {theirs}")


class ShardRanks(NamedTuple):
    """The ranks and layers of one shard of a transfer.

    There is a shard for each pair of a source rank and a destination rank that share heads and layers, and
    for each group of layers that leaves by itself. Both replicas number the shards from 0, ordered by
    destination rank, source rank and group. Shard 0 is between the two ranks 0.
    """

    source: int
    destination: int
    layers: tuple[int, int]  # [first, stop)
    group: int = 0  # the group of layers that `layers` is a part of


@lru_cache(maxsize=64)
def shards_of(
    source: PageLayout, destination: PageLayout, num_layer_groups: int = 1
) -> tuple[ShardRanks, ...]:
    """Return every shard of a transfer between two replicas, in order.

    Raises ConfigError for different models, ValueError for more groups than layers.
    """
    check_same_model(source, destination)
    groups = source.layer_groups(num_layer_groups)
    shards: list[ShardRanks] = []
    for rank in range(destination.num_ranks):
        for source_rank in range(source.num_ranks):
            if not sent_heads(source, destination, source_rank, rank):
                continue
            common = _common_layers(source, destination, source_rank, rank)
            for group, (start, end) in enumerate(groups):
                first, stop = max(start, common.start), min(end, common.stop)
                if first < stop:
                    shards.append(ShardRanks(source_rank, rank, (first, stop), group))
    return tuple(shards)


def default_layer_groups(source: PageLayout) -> int:
    """Return the number of groups of layers in which a source of this layout sends its last pages."""
    return max(1, min(MAX_DEFAULT_GROUPS, source.num_layers, source.page_bytes // MIN_GROUP_BYTES))


def _common_layers(one: PageLayout, other: PageLayout, rank: int, other_rank: int) -> range:
    """Return the layers that both ranks have; if there is none, an empty range among the layers of `rank`."""
    ours, theirs = one.layers_of(rank), other.layers_of(other_rank)
    first = min(max(ours.start, theirs.start), ours.stop)
    return range(first, max(first, min(ours.stop, theirs.stop)))


def _side(
    layout: PageLayout, unit_tokens: int, starts: Sequence[int], slabs: range, first_slab: int
) -> TransferSide:
    """Return the placement of units in a rank's pages.

    layout: of the rank's stage. starts: the rank's local head at which each run of a slab begins. slabs: the
    slabs in which runs begin, counted from `first_slab`.
    """
    head_bytes = layout.page_size * layout.row_bytes
    first_heads = (np.asarray(slabs, dtype=np.int64) + first_slab) * layout.heads_per_rank
    offsets = np.add.outer(first_heads, np.asarray(starts, dtype=np.int64)) * head_bytes
    offsets = offsets.reshape(-1).astype(np.int64)
    offsets.flags.writeable = False  # plans are shared
    return TransferSide(
        page_bytes=layout.page_bytes,
        units_per_page=layout.page_size // unit_tokens,
        unit_stride_bytes=unit_tokens * layout.row_bytes,
        run_offset_R=offsets,
    )


def _common_divisor(run_bytes: int, sides: Sequence[TransferSide]) -> int:
    lengths = [run_bytes]
    for side in sides:
        lengths += [side.page_bytes, int(np.gcd.reduce(side.run_offset_R, initial=0))]
        if side.units_per_page > 1:
            lengths.append(side.unit_stride_bytes)
    return math.gcd(*lengths)
