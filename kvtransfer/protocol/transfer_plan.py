"""Which bytes of which pages move between two ranks whose pools are cut differently.

A transfer is counted in units of `min(source page_size, destination page_size)` tokens, from its first
token on, which starts a page on both sides. A piece, units [first, stop), is a list of runs: byte ranges of
one length that are contiguous on both sides. They come in one order, unit by unit, and within a unit layer
by layer, keys before values, head by head: the order of the bytes on a wire and of a unit under its digest.

    what differs             a run is                              8B model, 16 tokens a page
    nothing                  a page                                2 MiB
    tp_size                  the shared heads of a layer's keys    32 KiB at tp 1 to 1 of 2 ranks: 16 KiB
    page_size                a unit of one head's keys             4 KiB

Offsets are counted from the start of a rank's pool, in int64: pools pass 2^31 bytes. Suffix N: runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.errors import ConfigError
from baton.pages import DTYPE_BYTES, PageLayout

Offsets: TypeAlias = NDArray[np.int64]
Pages: TypeAlias = Sequence[int] | NDArray[np.int64]  # page ids of one side, in the order of the tokens

MUST_AGREE: Final = ("num_layers", "num_kv_heads", "head_dim", "dtype")


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Run n: `run_bytes` bytes at `source_offset_N[n]` of one pool, `destination_offset_N[n]` of another."""

    source_offset_N: Offsets
    destination_offset_N: Offsets
    run_bytes: int

    @property
    def num_bytes(self) -> int:
        return len(self.source_offset_N) * self.run_bytes


@dataclass(frozen=True, slots=True, eq=False)
class TransferSide:
    """How the units of a transfer lie in one rank's pages."""

    page_bytes: int
    units_per_page: int
    unit_stride_bytes: int  # between the same run of two units of one page
    run_offset_R: Offsets  # the runs of a page's first unit, from the start of the page

    def num_pages(self, num_units: int) -> int:
        """Pages that the first `num_units` units of a transfer lie in."""
        return -(-num_units // self.units_per_page)

    def offsets(self, first: int, stop: int, pages: Pages) -> Offsets:
        """Where the runs of units [first, stop) begin in the pool, in plan order.

        pages: those of the transfer's units from 0 on. ValueError when they do not reach to `stop`, or when
        one is negative; that every page is within the pool is for whoever owns the pool to see to.
        """
        if not 0 <= first <= stop or self.num_pages(stop) > len(pages):
            raise ValueError(
                f"units [{first}, {stop}) at {self.units_per_page} a page do not lie in {len(pages)} pages"
            )
        first_page = first // self.units_per_page  # pages before it cost nothing
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
        if len(self.run_offset_R) == 1:  # a short prompt's pages are found in less time than copied
            offsets: Offsets = starts + self.run_offset_R[0]
            return offsets
        offsets = np.add.outer(starts, self.run_offset_R).reshape(-1)
        return offsets


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """The bytes that one source rank and one destination rank share, for any pages of theirs.

    `unit_bytes` is 0 when the ranks share no head: there is nothing to move between them.
    `row_bytes` divides every offset on both sides and the runs: pools can be taken for tables of such rows.
    """

    unit_tokens: int
    unit_bytes: int  # moved for each unit
    run_bytes: int
    row_bytes: int
    source: TransferSide = field(repr=False)
    destination: TransferSide = field(repr=False)

    def num_units(self, num_tokens: int) -> int:
        """Units that hold `num_tokens` tokens; the last one may be partly filled, it moves whole."""
        return -(-num_tokens // self.unit_tokens)

    def runs(self, first: int, stop: int, source_pages: Pages, destination_pages: Pages) -> Runs:
        """The runs of units [first, stop); see `TransferSide.offsets` for the pages and what is checked."""
        return Runs(
            self.source.offsets(first, stop, source_pages),
            self.destination.offsets(first, stop, destination_pages),
            self.run_bytes,
        )


@lru_cache(maxsize=256)
def plan_transfer(
    source: PageLayout,
    destination: PageLayout,
    source_rank: int,
    destination_rank: int,
    layers: tuple[int, int] | None = None,
) -> TransferPlan:
    """What moves between two ranks, in either direction of time: a push and a pull have the same plan.

    layers: [first, stop), of which alone it is; None: of all. ConfigError, naming the field, when the layouts
    are of different models; ValueError for a rank or layers that a layout does not have.
    """
    check_same_model(source, destination)
    first_layer, stop_layer = layers or (0, source.num_layers)
    if not 0 <= first_layer < stop_layer <= source.num_layers:
        raise ValueError(f"there are no layers [{first_layer}, {stop_layer}) of {source.num_layers}")
    mine, theirs = _heads(source, source_rank), _heads(destination, destination_rank)
    shared = range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))
    unit_tokens = min(source.page_size, destination.page_size)
    heads_per_run = len(shared) if source.page_size == destination.page_size else 1
    is_whole_page = heads_per_run == len(mine) == len(theirs) and source.page_size == destination.page_size
    starts = shared[::heads_per_run] if shared else shared
    # A slab: one layer's keys, or values. Those of whole pages lie one after another, and are one run.
    slabs = range(2 * first_layer, 2 * stop_layer, 2 * source.num_layers if is_whole_page else 1)
    sides = [
        _side(layout, unit_tokens, [head - heads.start for head in starts], slabs)
        for layout, heads in ((source, mine), (destination, theirs))
    ]
    num_layers = stop_layer - first_layer
    unit_bytes = unit_tokens * _token_head_bytes(source) * 2 * num_layers * len(shared)
    num_runs = len(sides[0].run_offset_R)
    run_bytes = unit_bytes // num_runs if num_runs else 0
    return TransferPlan(
        unit_tokens=unit_tokens,
        unit_bytes=unit_bytes,
        run_bytes=run_bytes,
        row_bytes=_common_divisor(run_bytes, sides),
        source=sides[0],
        destination=sides[1],
    )


def peers_of(layout: PageLayout, other: PageLayout, rank: int) -> range:
    """The ranks of `other` that share a head with `rank` of `layout`, whichever of the two is the source."""
    check_same_model(layout, other)
    heads = _heads(layout, rank)
    return range(heads.start // other.heads_per_rank, (heads.stop - 1) // other.heads_per_rank + 1)


def check_same_model(source: PageLayout, destination: PageLayout) -> None:
    """ConfigError unless the two layouts differ in tp_size and page_size alone."""
    for name in MUST_AGREE:
        ours, theirs = getattr(source, name), getattr(destination, name)
        if ours != theirs:
            raise ConfigError(f"pages cannot move between {name} {ours} and {name} {theirs}")


def _heads(layout: PageLayout, rank: int) -> range:
    if not 0 <= rank < layout.tp_size:
        raise ValueError(f"there is no rank {rank} in a layout of tp_size {layout.tp_size}")
    return range(rank * layout.heads_per_rank, (rank + 1) * layout.heads_per_rank)


def _token_head_bytes(layout: PageLayout) -> int:
    """Bytes of one token's key, or value, of one head and layer."""
    return layout.head_dim * DTYPE_BYTES[layout.dtype]


def _side(layout: PageLayout, unit_tokens: int, starts: Sequence[int], slabs: range) -> TransferSide:
    """starts: the rank's own head at which each run of a slab begins. slabs: in which runs begin."""
    head_bytes = layout.page_size * _token_head_bytes(layout)
    first_heads = np.asarray(slabs, dtype=np.int64) * layout.heads_per_rank
    offsets = np.add.outer(first_heads, np.asarray(starts, dtype=np.int64)) * head_bytes
    offsets = offsets.reshape(-1).astype(np.int64)
    offsets.flags.writeable = False  # plans are shared
    return TransferSide(
        page_bytes=layout.page_bytes,
        units_per_page=layout.page_size // unit_tokens,
        unit_stride_bytes=unit_tokens * _token_head_bytes(layout),
        run_offset_R=offsets,
    )


def _common_divisor(run_bytes: int, sides: Sequence[TransferSide]) -> int:
    timeouts = [run_bytes]
    for side in sides:
        timeouts += [side.page_bytes, int(np.gcd.reduce(side.run_offset_R, initial=0))]
        if side.units_per_page > 1:
            timeouts.append(side.unit_stride_bytes)
    return math.gcd(*timeouts)
