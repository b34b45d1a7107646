"""From the runs of a prompt's pages to how many of its first pages each worker holds."""

from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.pages import KEY_BYTES
from baton.router.index.table import EMPTY, MAX_SLOTS, Keys, KeyTable, SetIds, SlotSet, SlotSets

Lengths: TypeAlias = NDArray[np.int32]

STRIDE: Final = 16  # between two pages of a prompt that are looked up first
MAX_BISECTED: Final = 32  # pages, before all are looked up at once
MAX_RUN_ENDS: Final = 2**14
_FEW: Final = 8
_NOWHERE: Final = SlotSet(0, 0)


class Match(NamedTuple):
    """How many of a prompt's first pages each worker holds, by its slot (see `PrefixIndex.slot`).

    `num_pages` counts the device's and then the host tier's, so it is never less. To be read only.
    """

    num_device_pages: Lengths
    num_pages: Lengths


class Holdings:
    """The same by sets: nobody is asked one by one. A slot is a bit."""

    __slots__ = ("levels",)

    def __init__(self, levels: list[tuple[int, int]]) -> None:
        """levels: numbers of pages, the most first, and who holds as many or more."""
        self.levels = levels

    def num_pages(self, slot_bit: int) -> int:
        for num_pages, holders in self.levels:
            if holders & slot_bit:
                return num_pages
        return 0

    def most(self, among: int, limit: int, first_slot: int) -> list[int]:
        """At most so many of these slots: none that is left out holds more. Of equals those from the first
        slot on, and then those before it.
        """
        found: list[int] = []
        before = 0
        for _, holders in self.levels:
            holders &= among
            equals, before = holders ^ before, holders
            if not equals:
                continue
            later = equals >> first_slot << first_slot
            for part in (later, equals ^ later):
                while part:
                    if len(found) == limit:
                        return found
                    bit = part & -part
                    found.append(bit.bit_length() - 1)
                    part ^= bit
        return found


def holdings(runs: list[tuple[int, SlotSet]], present: int) -> Holdings:
    """As `measure` counts them, in any tier."""
    levels = []
    holding = present & runs[0][1].anywhere
    for start, places in runs[1:]:
        still = holding & places.anywhere
        if still != holding:
            levels.append((start, holding))
            holding = still
    return Holdings(levels[::-1])


def runs_along(table: KeyTable, sets: SlotSets, keys: Keys) -> list[tuple[int, SlotSet]]:
    """Where each run of pages with the same holders begins, and the end."""
    if not keys.size:
        return [(0, _NOWHERE)]
    ids = _sets_along(table, keys)
    starts = [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist()]
    held_by = map(sets.places, ids[starts].tolist())
    return [*zip(starts, held_by, strict=True), (keys.size, _NOWHERE)]


class RunEnds:
    """Where runs were found to end that began with the same page: where an operator's instructions end, and
    where what a second worker has of a conversation does. A guess, asked before any other page.
    """

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        self._ends: dict[bytes, int] = {}  # by the first page's key

    def guess(self, page_keys: bytes, start: int) -> int:
        """0: nothing is known."""
        return self._ends.get(page_keys[start * KEY_BYTES : (start + 1) * KEY_BYTES], 0)

    def learn(self, page_keys: bytes, start: int, end: int) -> None:
        if len(self._ends) >= MAX_RUN_ENDS:
            self._ends.clear()
        self._ends[page_keys[start * KEY_BYTES : (start + 1) * KEY_BYTES]] = end


def few_runs_along(
    table: KeyTable, sets: SlotSets, page_keys: bytes, run_ends: RunEnds
) -> list[tuple[int, SlotSet]] | None:
    """The same by bisection, page by page: quickest where few workers differ. None: there are many runs.

    page_keys: of at least one page.
    """
    num_pages, set_at = len(page_keys) // KEY_BYTES, table.value_at
    page, set_id = 0, set_at(page_keys, 0) or EMPTY
    runs = [(0, sets.places(set_id))]
    ahead = [(num_pages - 1, set_at(page_keys, num_pages - 1) or EMPTY)]  # that are known, the nearest last
    guess = run_ends.guess(page_keys, 0)
    for _ in range(MAX_BISECTED):
        while ahead and ahead[-1][1] == set_id:
            page = ahead.pop()[0]
        if not ahead:
            return [*runs, (num_pages, _NOWHERE)]
        nearest = ahead[-1][0]
        if page < guess < nearest:
            ahead += [(each, set_at(page_keys, each) or EMPTY) for each in (guess, guess - 1)]
            guess = 0
        elif page + 1 < nearest:
            middle = (page + nearest) // 2
            ahead.append((middle, set_at(page_keys, middle) or EMPTY))
        else:
            run_ends.learn(page_keys, runs[-1][0], nearest)
            page, set_id = ahead.pop()
            runs.append((page, sets.places(set_id)))
            guess = run_ends.guess(page_keys, page)
    return None


def _sets_along(table: KeyTable, keys: Keys) -> SetIds:
    """One page in STRIDE is looked up, and what is between two that differ: what a worker holds is
    prefix-closed, so that between two pages with the same holders no page has others."""
    if keys.size <= 2 * STRIDE:
        return _sets_of(table, keys)
    some = np.arange(0, keys.size, STRIDE)
    some[-1] = keys.size - 1
    found = _sets_of(table, keys[some])
    ids = np.repeat(found, STRIDE)[: keys.size]
    ids[some[-1]] = found[-1]
    before = some[:-1][found[1:] != found[:-1]]
    between = (before[:, None] + np.arange(1, 2 * STRIDE)).ravel()
    between = between[between < keys.size]
    ids[between] = _sets_of(table, keys[between])
    return ids


def _sets_of(table: KeyTable, keys: Keys) -> SetIds:
    cells = table.find(keys)
    return np.where(cells >= 0, table.values[cells], EMPTY).astype(np.int32, copy=False)


def measure(runs: list[tuple[int, int]], present: int, num_slots: int) -> Lengths:
    """runs: where each begins, and the slots that hold its pages; the last is empty. Who holds all pages up
    to some run, and not that one, has as many as there are before it."""
    lengths = np.zeros(num_slots, np.int32)
    holding = present & runs[0][1]
    for start, slots in runs[1:]:
        lost = holding & ~slots
        if lost:
            lengths[_slots(lost)] = start
            holding ^= lost
        if not holding:
            break
    return lengths


def _slots(mask: int) -> list[int] | NDArray[np.int64]:
    if mask.bit_count() > _FEW:
        packed = np.frombuffer(mask.to_bytes(MAX_SLOTS // 8, "little"), np.uint8)
        return np.flatnonzero(np.unpackbits(packed, bitorder="little"))
    slots = []
    while mask:
        slots.append((mask & -mask).bit_length() - 1)
        mask &= mask - 1
    return slots
