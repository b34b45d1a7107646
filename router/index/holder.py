"""The pages of one worker: where they are, by key, and when each was last mentioned.

A worker's events change only its own table, which has a limit. Past the limit the pages that were mentioned
longest ago are dropped, an eighth at a time: a flood of events costs the hints of its own worker and a
bounded amount of memory.

A page is expected after a prompt with that page was dispatched to the worker: it counts as held until the
worker reports it or the expectation expires.
"""

from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.router.index.table import Cells, Keys, KeyTable

Values: TypeAlias = NDArray[np.uint64]  # bit 63: in the host tier; 32 to 62: page id; 0 to 31: generation

HOST_BIT: Final = np.uint64(1 << 63)
EXPECTED: Final = np.uint64((2**31 - 1) << 32)  # in place of the page id; the low bits number the expectation
_PAGE_SHIFT: Final = np.uint64(32)
_PAGE_MASK: Final = np.uint64((2**31 - 1) << 32)
MOST_ROOM: Final = 4  # a table grows up to so many times the limit where keys crowd
_LEAST_KEYS: Final = 512  # of a new table


class Change(NamedTuple):
    """Keys that the worker holds from now on, then keys that it does not hold any more."""

    joined: Keys
    left: Keys


class Located(NamedTuple):
    """The first pages of a prompt at a worker; both are as long as the run of pages that was found.

    Pages of the host tier have generation 0, which no page of a device has.
    """

    pages: tuple[int, ...]
    generations: tuple[int, ...]


class Holder:
    """The pages of one worker. Methods that change the set of keys return the change; their keys are
    distinct.
    """

    def __init__(self, slot: int, num_own_pages: int, seed: int) -> None:
        """slot: of the worker in the index. num_own_pages: that the worker could hold."""
        self.slot = slot
        self.num_own_pages = num_own_pages
        self.limit = num_own_pages  # pages that are kept here
        self.next_number: int | None = None  # of the worker's next event; None: its pages are unknown
        self.is_asked = False  # for all of its pages
        self._seed = seed
        self._table = self._new_table(_LEAST_KEYS)

    def __len__(self) -> int:
        return len(self._table)

    def keys(self) -> Keys:
        """All pages, expected ones too."""
        return self._table.keys[self._table.taken()]

    def entries(self) -> tuple[Keys, Values]:
        """All pages that the worker has reported."""
        cells = self._table.taken()
        cells = cells[~_is_expected(self._table.values[cells])]
        # In the order of the cells they would fill another's table from one end.
        cells = cells[np.argsort(self._table.keys[cells])]
        return self._table.keys[cells], self._table.values[cells]

    def clear(self) -> Change:
        """Drop all pages."""
        keys = self.keys()
        self._table = self._new_table(_LEAST_KEYS)
        return Change(keys[:0], keys)

    def store(self, keys: Keys, values: Values, stamp: int) -> Change:
        """Add pages, or move pages to another place."""
        cells, new = self._cells_for(keys)
        self._write(cells, values, stamp)
        return Change(keys[new[cells[new] >= 0]], self._shrink())

    def remove(self, keys: Keys, *, on_host: bool) -> Change:
        """Remove pages of one tier. Pages that are in the other tier stay."""
        cells = self._table.find(keys)
        there = (cells >= 0) & ((self._table.values[cells] >= HOST_BIT) == on_host)
        self._table.remove(cells[there])
        return Change(keys[:0], keys[there])

    def expect(self, keys: Keys, number: int, stamp: int) -> Change:
        """Expect pages. Pages that the worker has reported are only marked as mentioned."""
        cells, new = self._cells_for(keys)
        values = self._table.values[cells]
        is_open = _is_expected(values)
        is_open[new] = True
        values[is_open] = EXPECTED | np.uint64(number)
        self._write(cells, values, stamp)
        return Change(keys[new[cells[new] >= 0]], self._shrink())

    def disappoint(self, keys: Keys, number: int) -> Change:
        """Drop the pages of an expectation that the worker has not reported."""
        cells = self._table.find(keys)
        is_open = (cells >= 0) & (self._table.values[cells] == EXPECTED | np.uint64(number))
        self._table.remove(cells[is_open])
        return Change(keys[:0], keys[is_open])

    def locate(self, keys: Keys) -> Located:
        """The longest run of first keys that the worker has reported."""
        cells = self._table.find(keys)
        values = self._table.values[cells]
        missing = np.flatnonzero((cells < 0) | _is_expected(values))
        values = values[: missing[0] if missing.size else keys.size]
        pages = (values & _PAGE_MASK) >> _PAGE_SHIFT
        generations = np.where(values >= HOST_BIT, 0, values.astype(np.uint32))
        return Located(tuple(pages.tolist()), tuple(generations.tolist()))

    def _cells_for(self, keys: Keys) -> tuple[Cells, Cells]:
        """The cells of all keys, -1 for a rare key without room, and the rows of new keys."""
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

    def _shrink(self) -> Keys:
        """Past the limit, drop the pages that were mentioned longest ago, down to seven eighths of it."""
        if len(self._table) <= self.limit:
            return self._table.keys[:0]
        cells = self._table.taken()
        num_left = len(self._table) - self.limit * 7 // 8
        oldest = cells[np.argpartition(self._table.stamps[cells], num_left - 1)[:num_left]]
        keys: Keys = self._table.keys[oldest]
        self._table.remove(oldest)
        return keys

    def _new_table(self, num_keys: int) -> KeyTable:
        return KeyTable(num_keys, np.uint64, seed=self._seed, has_stamps=True)


def values_of(pages: NDArray[np.int64], generations: NDArray[np.int64], *, on_host: bool) -> Values:
    """The values of pages in a holder's table, packed as `Values` says."""
    values = pages.astype(np.uint64) << _PAGE_SHIFT | generations.astype(np.uint64)
    return values | HOST_BIT if on_host else values


def _is_expected(values: Values) -> NDArray[np.bool_]:
    return np.asarray(values & _PAGE_MASK == EXPECTED)
