"""Sets of places that hold a page, each kept once and known by a small number.

There are millions of pages and few different sets: a prompt's pages are held by the same workers from one
point of divergence to the next. A page therefore costs four bytes, whoever holds it. What number a set gets
when a place joins or leaves it is remembered, so the pages of a message, which mostly have one set in common,
change over in one step.

A place is a worker's slot in a tier. A set is an int with a bit a place: and, or and not of a thousand places
take a tenth of a microsecond.
"""

from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

SetIds: TypeAlias = NDArray[np.int32]

EMPTY: Final = 0
MAX_SLOTS: Final = 2048
DEVICES: Final = (1 << MAX_SLOTS) - 1
NUM_TIERS: Final = 2
_PLACE_BITS: Final = 12  # of NUM_TIERS * MAX_SLOTS places


class Places(NamedTuple):
    """One set: the slots that hold a page on the device, and those that hold it in any tier."""

    devices: int
    anywhere: int


class PlaceSets:
    """At most `max_sets` that are in use; where there would be more, a place is not added."""

    def __init__(self, max_sets: int) -> None:
        self.num_refused = 0  # additions, for want of a number
        self._max_sets = max_sets
        self._masks = [0]
        self._places = [Places(0, 0)]
        self._id_of = {0: EMPTY}
        self._unused: list[int] = []  # numbers that may be given out again
        self._steps: dict[int, int] = {}  # (set, place, whether it joins) -> set
        self._uses = np.zeros(1024, np.int64)  # pages by set
        self._num_refusals_left = 0  # before it looks again whether some sets are out of use

    def __len__(self) -> int:
        return len(self._id_of)

    def places(self, set_id: int) -> Places:
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
        places = Places(mask & DEVICES, (mask | mask >> MAX_SLOTS) & DEVICES)
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
