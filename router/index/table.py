"""`KeyTable`, an open-addressing table of 64-bit keys in numpy, and `SlotSets`, numbered sets of workers.

A key has two groups of eight cells, a cache line each, and lies in one of them. Looking up n keys is a
handful of numpy calls over [n, 8], without a loop over probes: one line of memory a key, two where the first
group was crowded. There are no tombstones, so removals never slow the table down and never need a rebuild. At
the load that `LOAD` keeps, both groups of a key are full about once in a million keys; that key is refused,
which costs a hint.

Keys are short page keys, which are uniform. They are multiplied by an odd number, so that a client
cannot choose the cells of its keys. 0 marks an empty cell; key 0 is stored as 1.
"""

from struct import Struct
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.messages.bounds import SHORT_KEY_BYTES

Keys: TypeAlias = NDArray[np.uint64]
Cells: TypeAlias = NDArray[np.int64]  # -1: no cell
WIDTH: Final = 8  # cells in a group: 64 bytes of keys
LOAD: Final = 0.6
_CROWDED: Final = 6  # taken cells of a first group from which on keys go to a second group with more room
_FEW: Final = 128
_HALF: Final = np.uint64(32)
_LOW_HALF: Final = np.uint64(0xFFFFFFFF)
_MIXER: Final = 0x9E3779B97F4A7C15  # 2**64 / golden ratio
_key = Struct("<Q").unpack_from
_group = Struct(f"={WIDTH}Q").unpack_from


def keys_of(joined: bytes) -> Keys:
    """A copy of joined keys, with 1 in place of 0, which marks an empty cell."""
    keys: Keys = np.maximum(np.frombuffer(joined, "<u8"), np.uint64(1))
    return keys


class KeyTable:
    """A table for `num_keys` keys. `values` and `stamps` have an entry a cell, which the owner writes."""

    def __init__(self, num_keys: int, value_type: Any, *, seed: int = 0, has_stamps: bool = False) -> None:
        self.num_keys = num_keys
        self._num_groups = max(2, int(num_keys / (WIDTH * LOAD)) + 1)
        self._mixer = np.uint64((_MIXER + 2 * seed) % 2**64 | 1)
        self._lines = np.zeros((self._num_groups, WIDTH), np.uint64)
        self.keys = self._lines.reshape(-1)
        self.values: NDArray[Any] = np.zeros(self.keys.size, value_type)
        self.stamps: NDArray[np.uint32] = np.zeros(self.keys.size if has_stamps else 0, np.uint32)
        self.count = 0
        self._multiplier = int(self._mixer)
        self._views = self.keys.data, self.values.data  # of bytes, and of single cells

    def __len__(self) -> int:
        return self.count

    def __getstate__(self) -> tuple[object, ...]:
        """The taken cells; the others hold nothing that is read."""
        cells = self.taken()
        stamps = self.stamps[cells] if self.stamps.size else self.stamps
        cut = self.keys[cells], self.values[cells], stamps, bool(self.stamps.size)
        return self.num_keys, self._multiplier, self.count, cells, *cut

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        num_keys, multiplier, count, cells, keys, values, stamps, has_stamps = state
        KeyTable.__init__(self, num_keys, values.dtype, has_stamps=has_stamps)
        self._mixer, self._multiplier = np.uint64(multiplier), multiplier
        self.keys[cells], self.values[cells] = keys, values
        if has_stamps:
            self.stamps[cells] = stamps
        self.count = count

    def touch(self) -> None:
        """Write all cells once, so that the system provides their memory now."""
        for cells in (self.keys, self.values, self.stamps):
            cells += 0

    def find(self, keys: Keys) -> Cells:
        """The cells of keys; -1 for a key that is not in the table."""
        first, second = self._groups(keys)
        if keys.size > _FEW:
            return self._look_up(keys, first, second)[0]
        # Both groups at once: more memory to read, half the calls.
        groups = np.concatenate((first, second))
        hits = (self._lines.take(groups, axis=0).reshape(2, -1, WIDTH) == keys[:, None]).ravel().nonzero()[0]
        rows = hits >> 3
        cells = np.full(keys.size, -1, np.int64)
        cells[rows % max(1, keys.size)] = (groups[rows] << 3) + (hits & 7)
        return cells

    def value_at(self, page_keys: bytes, page: int) -> int | None:
        """The value of one of a prompt's pages, None when absent. Faster than `find` for a few pages."""
        key = _key(page_keys, page * SHORT_KEY_BYTES)[0] or 1
        mixed = key * self._multiplier
        lines, values = self._views
        first = ((mixed >> 32 & 0xFFFFFFFF) * self._num_groups >> 32) * WIDTH
        group = _group(lines, 8 * first)
        if key not in group:
            first = ((mixed & 0xFFFFFFFF) * self._num_groups >> 32) * WIDTH
            group = _group(lines, 8 * first)
            if key not in group:
                return None
        value: int = values[first + group.index(key)]
        return value

    def place(self, keys: Keys) -> tuple[Cells, Cells]:
        """Add distinct keys. Returns their cells, -1 for a key without room, and the rows of new keys."""
        first, second = self._groups(keys)
        cells, missing = self._look_up(keys, first, second)
        if missing.size:
            self._settle(keys[missing], first[missing], second[missing], cells, missing)
        return cells, missing

    def remove(self, cells: Cells) -> None:
        """Remove the keys of these cells; each cell is taken and named once."""
        self.keys[cells] = 0
        self.count -= cells.size

    def taken(self) -> Cells:
        """The cells that hold a key."""
        return np.flatnonzero(self.keys)

    def _groups(self, keys: Keys) -> tuple[Cells, Cells]:
        mixed = keys * self._mixer
        num_groups = np.uint64(self._num_groups)
        first = ((mixed >> _HALF) * num_groups) >> _HALF
        second = ((mixed & _LOW_HALF) * num_groups) >> _HALF
        return first.view(np.int64), second.view(np.int64)

    def _look_up(self, keys: Keys, first: Cells, second: Cells) -> tuple[Cells, Cells]:
        """The cells, and the rows of keys without one."""
        hits = (self._lines.take(first, axis=0) == keys[:, None]).ravel().nonzero()[0]
        cells = np.full(keys.size, -1, np.int64)
        rows = hits >> 3
        cells[rows] = (first[rows] << 3) + (hits & 7)
        if hits.size == keys.size:
            return cells, hits[:0]
        missing = (cells < 0).nonzero()[0]
        groups = second[missing]
        hits = (self._lines.take(groups, axis=0) == keys[missing][:, None]).ravel().nonzero()[0]
        if not hits.size:
            return cells, missing
        rows = hits >> 3
        cells[missing[rows]] = (groups[rows] << 3) + (hits & 7)
        return cells, (cells < 0).nonzero()[0]

    def _settle(self, keys: Keys, first: Cells, second: Cells, cells: Cells, rows: Cells) -> None:
        """Give cells to keys without one. Of several keys that want a cell, one gets it; the others try
        again.
        """
        while rows.size:
            wanted = self._vacancies(first, second)
            has_room = wanted >= 0
            if not has_room.all():
                keys, first, second = keys[has_room], first[has_room], second[has_room]
                rows, wanted = rows[has_room], wanted[has_room]
            self.keys[wanted] = keys
            lost = self.keys[wanted] != keys
            cells[rows] = wanted
            self.count += rows.size
            if not lost.any():
                return
            keys, first, second, rows = keys[lost], first[lost], second[lost], rows[lost]
            cells[rows] = -1
            self.count -= rows.size

    def _vacancies(self, first: Cells, second: Cells) -> Cells:
        """A free cell for each key: in its first group, unless that is crowded and the second is less so."""
        free = self._lines.take(first, axis=0) == 0
        num_free = np.bitwise_count(free.view(np.uint64)).ravel()
        vacancies: Cells = (first << 3) + free.argmax(axis=1)
        crowded = (num_free <= WIDTH - _CROWDED).nonzero()[0]
        if crowded.size:
            others = second[crowded]
            free = self._lines.take(others, axis=0) == 0
            num_free_there = np.bitwise_count(free.view(np.uint64)).ravel()
            vacancies_there = (others << 3) + free.argmax(axis=1)
            is_roomier = num_free_there > num_free[crowded]
            vacancies[crowded] = np.where(is_roomier, vacancies_there, vacancies[crowded])
            vacancies[crowded[np.maximum(num_free_there, num_free[crowded]) == 0]] = -1
        return vacancies


# Sets of workers that hold a page. Each set is kept once and has a small number.
#
# There are millions of pages and few different sets: a prompt's pages are held by the same workers from one
# point of divergence to the next. So a page costs four bytes, however many workers hold it. The number of the
# set that results when a worker joins or leaves a set is cached, so all pages of a message change in one
# step.
#
# A worker is a slot, and a set is an int with a bit a slot: and, or and not of a thousand slots take a tenth
# of a microsecond.

SetIds: TypeAlias = NDArray[np.int32]
EMPTY: Final = 0
MAX_SLOTS: Final = 2048
_SLOT_BITS: Final = 11


class SlotSets:
    """Up to `max_sets` sets in use. Where there would be more, slots are not added."""

    def __init__(self, max_sets: int) -> None:
        self.num_refused = 0  # pages that a slot was not added to
        self._max_sets = max_sets
        self._masks = [0]
        self._id_of = {0: EMPTY}
        self._unused: list[int] = []  # numbers that are free
        self._steps: dict[int, int] = {}  # (set, slot, joins) -> set
        self._uses = np.zeros(1024, np.int64)  # pages by set
        self._num_refusals_left = 0  # before sets out of use are looked for again

    def __len__(self) -> int:
        return len(self._id_of)

    def slots(self, set_id: int) -> int:
        """The slots of a set, a bit each."""
        return self._masks[set_id]

    def joined(self, sets: SetIds, slot: int) -> SetIds:
        """The sets of pages when `slot` holds them too. sets: one for each page."""
        return self._change(sets, slot, 1)

    def left(self, sets: SetIds, slot: int) -> SetIds:
        """The sets of pages when `slot` does not hold them any more. sets: one for each page."""
        return self._change(sets, slot, 0)

    def dropped(self, sets: SetIds) -> None:
        """Pages of these sets have left the index."""
        np.subtract.at(self._uses, sets, 1)

    def _change(self, sets: SetIds, slot: int, joins: int) -> SetIds:
        if not sets.size:
            return sets
        if (sets == sets[0]).all():
            new_id = self._step(int(sets[0]), slot, joins, sets.size)
            return np.full(sets.size, new_id, np.int32)
        old_ids, inverse, counts = np.unique(sets, return_inverse=True, return_counts=True)
        steps = zip(old_ids.tolist(), counts.tolist(), strict=True)
        new_ids = [self._step(old_id, slot, joins, count) for old_id, count in steps]
        return np.array(new_ids, np.int32)[inverse]

    def _step(self, old_id: int, slot: int, joins: int, num_pages: int) -> int:
        step = (old_id << _SLOT_BITS | slot) << 1 | joins
        new_id = self._steps.get(step)
        if new_id is None:
            bit = 1 << slot
            mask = self._masks[old_id] | bit if joins else self._masks[old_id] & ~bit
            new_id = self._number(mask)
            if new_id is None:
                self.num_refused += num_pages
                return old_id
            self._steps[step] = new_id
        if old_id != EMPTY:
            self._uses[old_id] -= num_pages
        if new_id != EMPTY:
            self._uses[new_id] += num_pages
        return new_id

    def _number(self, mask: int) -> int | None:
        known = self._id_of.get(mask)
        if known is not None:
            return known
        if len(self._id_of) >= self._max_sets and not self._make_room():
            return None
        if self._unused:
            set_id = self._unused.pop()
            self._masks[set_id] = mask
        else:
            set_id = len(self._masks)
            self._masks.append(mask)
            if set_id == self._uses.size:
                self._uses = np.concatenate((self._uses, np.zeros_like(self._uses)))
        self._id_of[mask] = set_id
        return set_id

    def _make_room(self) -> bool:
        """Free the numbers of unused sets, unless that freed few a moment ago. True: some are free."""
        if self._num_refusals_left:
            self._num_refusals_left -= 1
            return False
        idle = [set_id for set_id in self._id_of.values() if set_id != EMPTY and not self._uses[set_id]]
        for set_id in idle:
            del self._id_of[self._masks[set_id]]
        self._unused += idle
        self._steps.clear()
        if len(idle) < self._max_sets // 16:
            self._num_refusals_left = self._max_sets // 16
        return bool(idle)
