"""What one worker holds: where its pages are, by key, and when each was last spoken of.

A worker is believed about itself and about nothing else: what it says changes only its own table, which has a
limit. Past it, what was spoken of longest ago goes, an eighth at a time, so that a flood costs its own
worker's hints and a bounded amount of memory.

A page that a prompt was sent for is expected: it counts as held before the worker says so, until its time is
over.
"""

from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.router.index.table import Cells, Keys, KeyTable

Values: TypeAlias = NDArray[np.uint64]  # bit 63: in the host tier; 32 to 62: page id; 0 to 31: generation

HOST_BIT: Final = np.uint64(1 << 63)
EXPECTED: Final = np.uint64(
    (2**31 - 1) << 32
)  # where the page id would be; below it the expectation's number
_PAGE_SHIFT: Final = np.uint64(32)
_PAGE_MASK: Final = np.uint64((2**31 - 1) << 32)
MOST_ROOM: Final = 4  # times the limit: a table grows once more where keys crowd, or are made to
_LEAST_KEYS: Final = 512  # of a new table


class Change(NamedTuple):
    """Keys that the worker holds now, or does not hold any more, in a tier. In this order."""

    tier: int  # 0 device, 1 host
    joined: Keys
    left: Keys


class Located(NamedTuple):
    """Where a worker keeps the first pages of a prompt; both are as long as what was found.

    Pages of the host tier have generation 0, as no page of a device has.
    """

    pages: tuple[int, ...]
    generations: tuple[int, ...]


class Holder:
    def __init__(self, slot: int, num_own_pages: int, seed: int) -> None:
        self.slot = slot
        self.num_own_pages = num_own_pages  # that it could hold
        self.limit = num_own_pages  # of what is kept of it here
        self.next_number: int | None = None  # of the change that comes next; None: what it holds is unknown
        self.is_asked = False  # for all that it holds
        self.num_given_up = 0  # pages, for want of room
        self._seed = seed
        self._table = self._new_table(_LEAST_KEYS)

    def __len__(self) -> int:
        return len(self._table)

    def keys(self) -> tuple[Keys, Keys]:
        """All that it holds, on the device and on the host."""
        cells = self._table.taken()
        keys, on_host = self._table.keys[cells], self._on_host(cells)
        return keys[~on_host], keys[on_host]

    def entries(self) -> tuple[Keys, Values]:
        """All that it has said it holds: nothing that is only expected."""
        cells = self._table.taken()
        cells = cells[~_is_expected(self._table.values[cells])]
        # In the order of the cells they would fill another's table from one end.
        cells = cells[np.argsort(self._table.keys[cells])]
        return self._table.keys[cells], self._table.values[cells]

    def clear(self) -> list[Change]:
        changes = [_left(tier, keys) for tier, keys in enumerate(self.keys())]
        self._table = self._new_table(_LEAST_KEYS)
        return changes

    def store(self, keys: Keys, values: Values, tier: int, stamp: int) -> list[Change]:
        """Keys are distinct. What was in the other tier has moved."""
        cells, new = self._cells_for(keys)
        moved = np.zeros(0, np.int64)
        if new.size < keys.size:
            elsewhere = self._on_host(cells) != bool(tier)
            elsewhere[new] = False
            moved = np.flatnonzero(elsewhere)
        self._write(cells, values, stamp)
        changes = [Change(tier, keys[np.concatenate((new[cells[new] >= 0], moved))], keys[:0])]
        if moved.size:
            changes.append(_left(1 - tier, keys[moved]))
        return changes + self._shrink()

    def remove(self, keys: Keys, tier: int) -> list[Change]:
        """Keys are distinct. What is in the other tier stays."""
        cells = self._table.find(keys)
        there = (cells >= 0) & (self._on_host(cells) == bool(tier))
        self._table.remove(cells[there])
        return [_left(tier, keys[there])]

    def expect(self, keys: Keys, number: int, stamp: int) -> list[Change]:
        """What it holds is only made young by it. Keys are distinct."""
        cells, new = self._cells_for(keys)
        values = self._table.values[cells]
        is_open = _is_expected(values)
        is_open[new] = True
        values[is_open] = EXPECTED | np.uint64(number)
        self._write(cells, values, stamp)
        return [Change(0, keys[new[cells[new] >= 0]], keys[:0]), *self._shrink()]

    def disappoint(self, keys: Keys, number: int) -> list[Change]:
        """Give up the pages of this expectation that have not come."""
        cells = self._table.find(keys)
        open_cells = (cells >= 0) & (self._table.values[cells] == EXPECTED | np.uint64(number))
        self._table.remove(cells[open_cells])
        return [_left(0, keys[open_cells])]

    def locate(self, keys: Keys) -> Located:
        """The longest run of first keys that it says it holds."""
        cells = self._table.find(keys)
        values = self._table.values[cells]
        missing = np.flatnonzero((cells < 0) | _is_expected(values))
        values = values[: missing[0] if missing.size else keys.size]
        pages = (values & _PAGE_MASK) >> _PAGE_SHIFT
        generations = np.where(values >= HOST_BIT, 0, values.astype(np.uint32))
        return Located(tuple(pages.tolist()), tuple(generations.tolist()))

    def _on_host(self, cells: Cells) -> NDArray[np.bool_]:
        return np.asarray(self._table.values[cells] >= HOST_BIT)

    def _cells_for(self, keys: Keys) -> tuple[Cells, Cells]:
        """Their cells, made where there were none; which rows are new; -1 for the rare one without room."""
        if len(self._table) + keys.size > self._table.num_keys:
            self._grow(max(len(self._table) + keys.size, min(2 * self._table.num_keys, self.limit)))
        cells, new = self._table.place(keys)
        if cells.size and cells.min() < 0 and self._table.num_keys < MOST_ROOM * self.limit:
            self._grow(2 * self._table.num_keys)
            cells, _ = self._table.place(keys)
        return cells, new

    def _write(self, cells: Cells, values: Values, stamp: int) -> None:
        if cells.size and cells.min() < 0:
            values, cells = values[cells >= 0], cells[cells >= 0]
        self._table.values[cells] = values
        self._table.stamps[cells] = stamp

    def _grow(self, num_keys: int) -> None:
        old, cells = self._table, self._table.taken()
        self._table = self._new_table(num_keys)
        new_cells, _ = self._table.place(old.keys[cells])
        cells, new_cells = cells[new_cells >= 0], new_cells[new_cells >= 0]
        self._table.values[new_cells] = old.values[cells]
        self._table.stamps[new_cells] = old.stamps[cells]

    def _shrink(self) -> list[Change]:
        """To seven eighths of the limit, if it is past it: the least lately spoken of go."""
        if len(self._table) <= self.limit:
            return []
        cells = self._table.taken()
        num_left = len(self._table) - self.limit * 7 // 8
        oldest = cells[np.argpartition(self._table.stamps[cells], num_left - 1)[:num_left]]
        keys, on_host = self._table.keys[oldest], self._on_host(oldest)
        self._table.remove(oldest)
        self.num_given_up += num_left
        return [_left(0, keys[~on_host]), _left(1, keys[on_host])]

    def _new_table(self, num_keys: int) -> KeyTable:
        return KeyTable(num_keys, np.uint64, seed=self._seed, has_stamps=True)


def values_of(pages: NDArray[np.int64], generations: NDArray[np.int64], tier: int) -> Values:
    values = pages.astype(np.uint64) << _PAGE_SHIFT | generations.astype(np.uint64)
    return values | HOST_BIT if tier else values


def _is_expected(values: Values) -> NDArray[np.bool_]:
    return np.asarray(values & _PAGE_MASK == EXPECTED)


def _left(tier: int, keys: Keys) -> Change:
    return Change(tier, keys[:0], keys)
