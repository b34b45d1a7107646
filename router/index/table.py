"""An open-addressing table of 64-bit keys in numpy, made for asking about a whole prompt at once.

A key has two groups of eight cells, a cache line each, and lies in one of them. So one look-up of n keys is
a handful of numpy calls over [n, 8], with no loop over probes and no pointer to follow: one line of memory a
key, two where the first group was crowded. Nothing marks what was removed, so removing never slows the table
down and never needs a rebuild. At the load that `LOAD` keeps, both groups of a key are full about once in a
million keys; that key is then refused, which costs a hint.

Keys are first halves of page keys, uniform by themselves; they are multiplied by an odd number all the
same, so that who makes up keys does not choose their cells. 0 marks an empty cell; key 0 is stored as 1.
"""

from struct import Struct
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.pages import KEY_BYTES

Keys: TypeAlias = NDArray[np.uint64]
Cells: TypeAlias = NDArray[np.int64]  # -1: nowhere
WIDTH: Final = 8  # cells in a group: 64 bytes of keys
LOAD: Final = 0.6
_CROWDED: Final = 6  # a first group with as many cells taken is left to its own, if the second has more room
_FEW: Final = 128
_HALF: Final = np.uint64(32)
_LOW_HALF: Final = np.uint64(0xFFFFFFFF)
_MIXER: Final = 0x9E3779B97F4A7C15  # 2**64 / golden ratio
_first_half = Struct("<Q").unpack_from  # of a page key
_group = Struct(f"={WIDTH}Q").unpack_from


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
        self._multiplier = int(self._mixer)
        self._views = self.keys.data, self.values.data  # of bytes, and of single cells

    def __len__(self) -> int:
        return self.count

    def touch(self) -> None:
        """Have the system provide the memory of all cells. It does so when each page is first written."""
        for cells in (self.keys, self.values, self.stamps):
            cells += 0

    def find(self, keys: Keys) -> Cells:
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
        """Of one of a prompt's pages: of a few, sooner than `find` would have made its arrays."""
        key = _first_half(page_keys, page * KEY_BYTES)[0] or 1
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
        """Distinct keys' cells, and the rows of those that were not there; -1 for one that found no room."""
        first, second = self._groups(keys)
        cells, missing = self._look_up(keys, first, second)
        if missing.size:
            self._settle(keys[missing], first[missing], second[missing], cells, missing)
        return cells, missing

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

    def _look_up(self, keys: Keys, first: Cells, second: Cells) -> tuple[Cells, Cells]:
        """The cells, and the rows that have none."""
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
        """Give cells to keys that have none; of several that want the same one, the last gets it at once."""
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
        """A free cell for each, in its first group unless that is crowded and the second is less so."""
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


# Sets of places that hold a page, each kept once and known by a small number.
#
# There are millions of pages and few different sets: a prompt's pages are held by the same workers from one
# point of divergence to the next. A page therefore costs four bytes, whoever holds it. What number a set gets
# when a place joins or leaves it is remembered, so the pages of a message, which mostly have one set in
# common, change over in one step.
#
# A place is a worker's slot in a tier. A set is an int with a bit a place: and, or and not of a thousand
# places take a tenth of a microsecond.

SetIds: TypeAlias = NDArray[np.int32]
EMPTY: Final = 0
MAX_SLOTS: Final = 2048
DEVICES: Final = (1 << MAX_SLOTS) - 1
NUM_TIERS: Final = 2
_PLACE_BITS: Final = 12  # of NUM_TIERS * MAX_SLOTS places


class SlotSet(NamedTuple):
    """One set: the slots that hold a page on the device, and those that hold it in any tier."""

    devices: int
    anywhere: int


class SlotSets:
    """At most `max_sets` that are in use; where there would be more, a place is not added."""

    def __init__(self, max_sets: int) -> None:
        self.num_refused = 0  # additions, for want of a number
        self._max_sets = max_sets
        self._masks = [0]
        self._places = [SlotSet(0, 0)]
        self._id_of = {0: EMPTY}
        self._unused: list[int] = []  # numbers that may be given out again
        self._steps: dict[int, int] = {}  # (set, place, whether it joins) -> set
        self._uses = np.zeros(1024, np.int64)  # pages by set
        self._num_refusals_left = 0  # before it looks again whether some sets are out of use

    def __len__(self) -> int:
        return len(self._id_of)

    def places(self, set_id: int) -> SlotSet:
        return self._places[set_id]

    def joined(self, sets: SetIds, place: int) -> SetIds:
        """The sets that pages of these sets have when the place holds them too."""
        return self._change(sets, place, 1)

    def left(self, sets: SetIds, place: int) -> SetIds:
        return self._change(sets, place, 0)

    def dropped(self, sets: SetIds) -> None:
        """Pages of these sets are not in the index any more."""
        np.subtract.at(self._uses, sets, 1)

    def _change(self, sets: SetIds, place: int, joins: int) -> SetIds:
        if not sets.size:
            return sets
        if (sets == sets[0]).all():
            new_id = self._step(int(sets[0]), place, joins, sets.size)
            return np.full(sets.size, new_id, np.int32)
        old_ids, inverse, counts = np.unique(sets, return_inverse=True, return_counts=True)
        steps = zip(old_ids.tolist(), counts.tolist(), strict=True)
        new_ids = [self._step(old_id, place, joins, count) for old_id, count in steps]
        return np.array(new_ids, np.int32)[inverse]

    def _step(self, old_id: int, place: int, joins: int, num_pages: int) -> int:
        step = (old_id << _PLACE_BITS | place) << 1 | joins
        new_id = self._steps.get(step)
        if new_id is None:
            bit = 1 << place
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
        places = SlotSet(mask & DEVICES, (mask | mask >> MAX_SLOTS) & DEVICES)
        if self._unused:
            set_id = self._unused.pop()
            self._masks[set_id], self._places[set_id] = mask, places
        else:
            set_id = len(self._masks)
            self._masks.append(mask)
            self._places.append(places)
            if set_id == self._uses.size:
                self._uses = np.concatenate((self._uses, np.zeros_like(self._uses)))
        self._id_of[mask] = set_id
        return set_id

    def _make_room(self) -> bool:
        """Forget the sets that no page has, unless that was tried just now and was worth little."""
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
