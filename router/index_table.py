"""An open-addressing table of 64-bit keys in numpy, made for asking about a whole prompt at once.

A key has two groups of eight cells, a cache line each, and lies in one of them. So one look-up of n keys is
a handful of numpy calls over [n, 8], with no loop over probes and no pointer to follow: one line of memory a
key, two where the first group was crowded. Nothing marks what was removed, so removing never slows the table
down and never needs a rebuild. At the load that `LOAD` keeps, both groups of a key are full about once in a
million keys; that key is then refused, which costs a hint.

Keys are first halves of page keys, uniform by themselves; they are multiplied by an odd number all the
same, so that who makes up keys does not choose their cells. 0 marks an empty cell; key 0 is stored as 1.
"""

from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Keys: TypeAlias = NDArray[np.uint64]
Cells: TypeAlias = NDArray[np.int64]  # -1: nowhere

WIDTH: Final = 8  # cells in a group: 64 bytes of keys
LOAD: Final = 0.6
_CROWDED: Final = 6  # a first group with as many cells taken is left to its own, if the second has more room
_HALF: Final = np.uint64(32)
_LOW_HALF: Final = np.uint64(0xFFFFFFFF)
_MIXER: Final = 0x9E3779B97F4A7C15  # 2**64 / golden ratio


def keys_of(page_keys: bytes) -> Keys:
    """The first eight bytes of each 16-byte page key."""
    keys: Keys = np.frombuffer(page_keys, dtype="<u8")[::2]
    return without_zero(keys)


def without_zero(keys: Keys) -> Keys:
    """A contiguous copy in which the key that marks an empty cell is another one."""
    return np.maximum(keys, np.uint64(1))


class KeyTable:
    """Room for `num_keys`; `values` and `stamps` have an entry a cell, for the owner to write."""

    def __init__(self, num_keys: int, value_type: Any, *, seed: int = 0, has_stamps: bool = False) -> None:
        self.num_keys = num_keys  # that it is made for
        self._num_groups = max(2, int(num_keys / (WIDTH * LOAD)) + 1)
        self._mixer = np.uint64((_MIXER + 2 * seed) % 2**64 | 1)
        self._lines = np.zeros((self._num_groups, WIDTH), np.uint64)
        self.keys = self._lines.reshape(-1)
        self.values: NDArray[Any] = np.zeros(self.keys.size, value_type)
        self.stamps: NDArray[np.uint32] = np.zeros(self.keys.size if has_stamps else 0, np.uint32)
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def find(self, keys: Keys) -> Cells:
        cells = np.full(keys.size, -1, np.int64)
        if not self.count:
            return cells
        first, second = self._groups(keys)
        self._find_in(first, keys, cells, None)
        missing = np.flatnonzero(cells < 0)
        if missing.size:
            self._find_in(second[missing], keys[missing], cells, missing)
        return cells

    def insert(self, keys: Keys) -> Cells:
        """Keys are distinct and none is in the table. The cells they have got; -1 where there was no room."""
        cells = np.full(keys.size, -1, np.int64)
        first, second = self._groups(keys)
        left = np.arange(keys.size)
        while left.size:
            groups = self._roomier(first[left], second[left])
            free = self._lines[groups] == 0
            columns = free.argmax(axis=1)
            wanted = groups * WIDTH + columns
            has_room = free[np.arange(left.size), columns]
            left, wanted = left[has_room], wanted[has_room]
            self.keys[wanted] = keys[left]  # of several that want one cell, the last has it
            got = self.keys[wanted] == keys[left]
            cells[left[got]] = wanted[got]
            left = left[~got]
        self.count += int((cells >= 0).sum())
        return cells

    def remove(self, cells: Cells) -> None:
        """Of keys that are in the table, each once."""
        self.keys[cells] = 0
        self.count -= cells.size

    def taken(self) -> Cells:
        return np.flatnonzero(self.keys)

    def _groups(self, keys: Keys) -> tuple[Cells, Cells]:
        mixed = keys * self._mixer
        num_groups = np.uint64(self._num_groups)
        first = ((mixed >> _HALF) * num_groups) >> _HALF
        second = ((mixed & _LOW_HALF) * num_groups) >> _HALF
        return first.view(np.int64), second.view(np.int64)

    def _find_in(self, groups: Cells, keys: Keys, cells: Cells, rows: Cells | None) -> None:
        hits = np.flatnonzero(self._lines.take(groups, axis=0) == keys[:, None])
        found = hits >> 3
        cells[found if rows is None else rows[found]] = groups[found] * WIDTH + (hits & 7)

    def _roomier(self, first: Cells, second: Cells) -> Cells:
        num_first = np.count_nonzero(self._lines.take(first, axis=0), axis=1)
        num_second = np.count_nonzero(self._lines.take(second, axis=0), axis=1)
        return np.where((num_first < _CROWDED) | (num_first <= num_second), first, second)
