"""The prefix index: which worker holds how much of a prompt, by all workers' reports.

1. A worker joins and is asked for all its pages (KvEventsWanted). Until it has reported them it is not known.
2. Its KvEventBatches are applied in order; after a gap the worker is asked again.
3. `holdings` says how many of a prompt's first pages each worker holds, `num_reported` how many one worker
   has reported.
4. A worker that a prompt was dispatched to is expected to hold the prompt (`expect`), so later prompts find
   it at once.
5. A worker that has left is forgotten: none of its entries counts from then on.

All entries are hints: a worker looks the whole keys up before it reads. Hence routers know pages by the
first 64 bits of their keys (`short_keys`). Two of ten million keys are alike with odds of one in 400,000,
which would cost a refused hint.

One array has, for each key, the number of the set of workers that hold the page (router/index/table.py). The
set hardly ever changes from one page of a prompt to the next, because the pages of a worker are
prefix-closed. So a few pages of a prompt are looked up by bisection, or one page in sixteen and the pages
between two that differ, however many workers there are. The tier of a page is kept per worker
(`Holder`), and only the chosen worker's table is read.

Bounds: `max_pages` in all, an equal share of them for each worker, and never more than a worker has.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.clock import Clock
from baton.messages.bounds import SHORT_KEY_BYTES
from baton.messages.control import KvEventBatch
from baton.messages.workers import Tier, Worker
from baton.router.index.table import (
    EMPTY,
    MAX_SLOTS,
    Cells,
    Keys,
    KeyTable,
    SetIds,
    SlotSets,
    keys_of,
)
from baton.router.sliced_work import PAGES_PER_SLICE, SlicedWork

# Of a page at a worker: the number of its tier, or from EXPECTED on the number of an expectation.
Values: TypeAlias = NDArray[np.uint32]

TIER_VALUES: Final = {tier: np.uint32(number) for number, tier in enumerate(Tier)}
EXPECTED: Final = len(TIER_VALUES)
MOST_ROOM: Final = 4  # a table grows up to so many times the limit where keys crowd
_LEAST_KEYS: Final = 512  # of a new table


class Change(NamedTuple):
    """Keys that the worker holds from now on, then keys that it does not hold any more."""

    joined: Keys
    left: Keys


class Outside(NamedTuple):
    """The numbers of a prompt's pages that a worker holds outside its device."""

    num_on_host: int
    num_on_disk: int


class Holder:
    """The pages of one worker: their tiers by key, and when each page was last mentioned.

    The events of a worker change only its own table, which has a limit. Past the limit the pages that were
    mentioned longest ago are dropped, an eighth at a time: a flood of events costs the hints of its own
    worker and a bounded amount of memory.

    A page is expected after a prompt with that page was dispatched to the worker. An expected page counts as
    held until the worker reports the page or the expectation expires.

    Methods that change the set of keys return the change; their keys are distinct.
    """

    def __init__(self, slot: int, num_own_pages: int, seed: int) -> None:
        """slot: of the worker in the index. num_own_pages: that the worker could hold."""
        self.slot = slot
        self.num_own_pages = num_own_pages
        self.limit = num_own_pages  # pages that are kept here
        self.next_number: int | None = None  # of the worker's next event; None: its pages are unknown
        self.is_asked = False  # for all of its pages
        self.has_outside = False  # a page has been in host memory or on disk
        self._seed = seed
        self._table = self._new_table(_LEAST_KEYS)

    def __len__(self) -> int:
        return len(self._table)

    def keys(self) -> Keys:
        """All pages, expected ones too."""
        return self._table.keys[self._table.taken()]

    def reported(self) -> dict[Tier, Keys]:
        """All pages that the worker has reported, by tier, in order of their keys."""
        cells = self._table.taken()
        keys, values = self._table.keys[cells], self._table.values[cells]
        # In the order of the cells they would fill another's table from one end.
        return {tier: np.sort(keys[values == value]) for tier, value in TIER_VALUES.items()}

    def clear(self) -> Change:
        """Drop all pages."""
        keys = self.keys()
        self._table = self._new_table(_LEAST_KEYS)
        return Change(keys[:0], keys)

    def store(self, keys: Keys, tier: Tier, stamp: int) -> Change:
        """Add pages to a tier, or move pages there."""
        cells, new = self._cells_for(keys)
        self._write(cells, np.full(cells.size, TIER_VALUES[tier]), stamp)
        self.has_outside = self.has_outside or tier is not Tier.DEVICE
        return Change(keys[new[cells[new] >= 0]], self._shrink())

    def remove(self, keys: Keys) -> Change:
        """Remove pages, expected ones too."""
        cells = self._table.find(keys)
        there = cells >= 0
        self._table.remove(cells[there])
        return Change(keys[:0], keys[there])

    def expect(self, keys: Keys, number: int, stamp: int) -> Change:
        """Expect pages. Pages that the worker has reported are only marked as mentioned."""
        cells, new = self._cells_for(keys)
        values = self._table.values[cells]
        is_open = values >= EXPECTED
        is_open[new] = True
        values[is_open] = number
        self._write(cells, values, stamp)
        return Change(keys[new[cells[new] >= 0]], self._shrink())

    def expire(self, keys: Keys, number: int) -> Change:
        """Drop the pages of an expectation that the worker has not reported."""
        cells = self._table.find(keys)
        is_open = (cells >= 0) & (self._table.values[cells] == number)
        self._table.remove(cells[is_open])
        return Change(keys[:0], keys[is_open])

    def num_reported(self, keys: Keys) -> int:
        """The number of first keys that the worker has reported."""
        cells = self._table.find(keys)
        missing = np.flatnonzero((cells < 0) | (self._table.values[cells] >= EXPECTED))
        return int(missing[0]) if missing.size else keys.size

    def outside(self, keys: Keys) -> Outside:
        """Count the pages of a prompt that are in host memory or on disk.

        Pages on the device are prefix-closed: where the last page is there, all are.
        """
        if not self.has_outside or not keys.size or self._num_outside(keys[-1:]) == (0, 0):
            return Outside(0, 0)
        return self._num_outside(keys)

    def _num_outside(self, keys: Keys) -> Outside:
        cells = self._table.find(keys)
        values = self._table.values[cells[cells >= 0]]
        return Outside(*(int((values == TIER_VALUES[tier]).sum()) for tier in (Tier.HOST, Tier.DISK)))

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
        return KeyTable(num_keys, np.uint32, seed=self._seed, has_stamps=True)


def _distinct(keys: Keys) -> Keys:
    """The keys without repeats, in any order. Keys of one prompt hardly ever repeat."""
    return keys if len(set(keys.tolist())) == keys.size else np.unique(keys)


MAX_PAGES: Final = 2**22
MAX_SETS: Final = 2**17
NUM_SPARE_PAGES: Final = 1024  # of a worker's share: expected pages come on top of held ones
PURGED_AT_ONCE: Final = 8192  # entries of workers that left, in one tick
MAX_EXPECTATIONS: Final = 2**16
EXPECTED_FOR_S: Final = 2.0  # after their prompt should be computed, pages are still expected
STRIDE: Final = 16  # between two pages of a prompt that are looked up first
MAX_BISECTED: Final = 32  # pages; then all are looked up at once
MAX_RUN_ENDS: Final = 2**14

# The first page of a run, and the slots, a bit each, that hold all pages up to the next run.
Run: TypeAlias = tuple[int, int]


class Holdings:
    """The number of a prompt's first pages that each worker holds, in any tier. A worker is its bit, see
    `slot`.
    """

    __slots__ = ("levels",)

    def __init__(self, levels: list[tuple[int, int]]) -> None:
        """levels: (number of pages, slots that hold as many or more), the most pages first."""
        self.levels = levels

    def num_pages(self, slot_bit: int) -> int:
        """The number of first pages that a worker holds."""
        for num_pages, holders in self.levels:
            if holders & slot_bit:
                return num_pages
        return 0

    def most(self, among: int, limit: int, first_slot: int) -> list[int]:
        """Up to `limit` slots of `among` that hold most. Of equals, slots from `first_slot` on come first."""
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


class _Expectation(NamedTuple):
    until_s: float
    number: int  # unique, so that holders are never compared
    holder: Holder
    keys: Keys


class _Change(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    pass


class IndexJoined(_Change, frozen=True, kw_only=True):
    """Another router's worker enters the index."""

    worker: Worker


class IndexForgotten(_Change, frozen=True, kw_only=True):
    """Another router's worker leaves the index."""

    worker: str


class IndexEvents(_Change, frozen=True, kw_only=True):
    """Events of another router's worker."""

    worker: str
    events: KvEventBatch


class IndexRestored(_Change, frozen=True, kw_only=True):
    """All pages of another router's worker, as `PrefixIndex.export` returns them."""

    worker: str
    next_number: int
    pages: dict[Tier, bytes]


IndexChange: TypeAlias = IndexJoined | IndexForgotten | IndexEvents | IndexRestored


class PrefixIndex:
    """Which worker holds which pages. `version` changes whenever a worker's slot may have."""

    def __init__(
        self,
        clock: Clock,
        max_pages: int = MAX_PAGES,
        *,
        seed: int = 0,
        sliced_work: SlicedWork | None = None,
        pages_per_slice: int = PAGES_PER_SLICE,
    ) -> None:
        """sliced_work: does the work of `expect`; None does it at once. pages_per_slice: of that work."""
        self.version = 0
        self._sliced_work = sliced_work or SlicedWork()
        self._pages_per_slice = pages_per_slice
        self._clock = clock
        self._max_pages = max_pages
        self._seed = seed
        self._table = KeyTable(max_pages, np.int32, seed=seed)
        self._sets = SlotSets(MAX_SETS)
        self._holders: dict[str, Holder] = {}
        self._free_slots = list(reversed(range(MAX_SLOTS)))
        self._present = 0  # a bit for each slot of a worker; the entries of other slots are being purged
        self._purges: deque[tuple[int, Keys]] = deque()  # slot, its entries that are left
        self._run_ends: dict[bytes, int] = {}  # key of a run's first page -> end of the run when last seen
        self._expectations: list[_Expectation] = []  # a heap
        self._expectation = EXPECTED  # the number of the last one
        self._stamp = 0

    @property
    def num_pages(self) -> int:
        """The number of pages that some worker holds."""
        return len(self._table)

    def warm_up(self) -> None:
        """Do at the start the work that the first prompts would otherwise wait for."""
        np.unique(np.zeros(1))  # imports numpy.ma when it is first called
        self._table.touch()

    def join(self, worker: Worker) -> None:
        """Add a worker, once for each of its lives. Without a free slot the worker has no hits."""
        if worker.id in self._holders:
            return
        while not self._free_slots and self._purges:
            self._purge(PURGED_AT_ONCE)
        if not self._free_slots:
            return
        slot = self._free_slots.pop()
        num_pages = worker.num_pages + worker.num_host_pages + NUM_SPARE_PAGES
        self._holders[worker.id] = Holder(slot, num_pages, self._seed)
        self._present |= 1 << slot
        self.version += 1
        self._share_out()

    def forget(self, worker_id: str) -> None:
        """Drop a worker: at once for `holdings`; `tick` removes its entries little by little."""
        holder = self._holders.pop(worker_id, None)
        if holder is None:
            return
        self._present &= ~(1 << holder.slot)
        self._purges.append((holder.slot, holder.clear().left))
        self.version += 1
        self._share_out()

    def slot(self, worker_id: str) -> int | None:
        """The slot of a worker in `Holdings`; it stays until the worker is forgotten."""
        holder = self._holders.get(worker_id)
        return None if holder is None else holder.slot

    def is_known(self, worker_id: str) -> bool:
        """True when the worker has reported its pages, with no gap since. Other decisions are blind."""
        holder = self._holders.get(worker_id)
        return holder is not None and holder.next_number is not None

    def apply(self, worker_id: str, events: KvEventBatch) -> bool:
        """Apply a worker's events. False: earlier events were lost; ask the worker for all its pages.

        False is returned once for each gap, then True until the worker has reported all its pages.
        """
        holder = self._holders.get(worker_id)
        num_changes = events.num_changes
        if holder is None or len(events.keys) % SHORT_KEY_BYTES:
            return True
        self._stamp += 1
        is_in_order = True
        num_stale = 0
        if events.is_snapshot:
            self._change(holder.slot, holder.clear())
        elif holder.next_number is not None:
            num_stale = min(max(0, holder.next_number - events.first), num_changes)
            is_in_order = events.first <= holder.next_number
        else:
            is_in_order = events.first == 0 and not holder.is_asked
        self._follow(holder, events, num_stale)
        if is_in_order:
            known = 0 if events.is_snapshot else holder.next_number or 0
            holder.next_number = max(events.first + num_changes, known)
            holder.is_asked = False
            return True
        was_asked, holder.next_number, holder.is_asked = holder.is_asked, None, True
        return was_asked

    def holdings(self, keys: bytes) -> Holdings:
        """The pages of a prompt that each worker holds. keys: the `short_keys` of its full pages."""
        runs = (self._few_runs(keys) if keys else None) or self._runs(keys_of(keys))
        levels = []
        holding = self._present & runs[0][1]
        for start, slots in runs[1:]:
            still = holding & slots
            if still != holding:
                levels.append((start, holding))
                holding = still
        return Holdings(levels[::-1])

    def num_reported(self, worker_id: str, keys: bytes) -> int:
        """The number of a prompt's first pages that the worker has reported, without expected pages."""
        holder = self._holders.get(worker_id)
        return 0 if holder is None else holder.num_reported(keys_of(keys))

    def outside(self, worker_id: str, keys: bytes, num_pages: int) -> Outside:
        """Count the first `num_pages` of these pages that the worker has in host memory or on disk."""
        holder = self._holders.get(worker_id)
        if holder is None or not holder.has_outside:
            return Outside(0, 0)
        return holder.outside(keys_of(keys[: num_pages * SHORT_KEY_BYTES]))

    def expect(self, worker_id: str, keys: bytes, ttl_s: float) -> None:
        """Expect the pages of a dispatched prompt at a worker for `ttl_s`, and keep its held ones longer.

        Many pages are expected in slices. To be called for all dispatches; otherwise a worker's share is
        given up in the wrong order.
        """
        self._sliced_work.add(self._expect(worker_id, keys, ttl_s))

    def tick(self) -> None:
        """End the expectations that have expired, and remove some entries of workers that left."""
        self._end_expectations(self._clock.now_s())
        self._purge(PURGED_AT_ONCE)

    def next_number(self, worker_id: str) -> int | None:
        """The number of the worker's next event; None when its pages are unknown."""
        holder = self._holders.get(worker_id)
        return None if holder is None else holder.next_number

    def export(self, worker_id: str) -> dict[Tier, bytes]:
        """The keys of all pages that a worker has reported, by tier. The worker must have joined."""
        reported = self._holders[worker_id].reported()
        return {tier: keys.astype("<u8").tobytes() for tier, keys in reported.items()}

    def restore(self, worker_id: str, next_number: int, pages: Mapping[Tier, bytes]) -> None:
        """Replace the pages of a worker by an export before its event `next_number`. The worker must have
        joined.
        """
        holder = self._holders[worker_id]
        self._stamp += 1
        self._change(holder.slot, holder.clear())
        for tier, joined in pages.items():
            keys = np.unique(keys_of(joined))
            if keys.size:
                self._change(holder.slot, holder.store(keys, tier, self._stamp))
        holder.next_number, holder.is_asked = next_number, False

    def change(self, change: IndexChange) -> bool:
        """Make a change. Returns False when `apply` does, True for any other change."""
        match change:
            case IndexJoined(worker=worker):
                self.join(worker)
            case IndexForgotten(worker=worker_id):
                self.forget(worker_id)
            case IndexEvents(worker=worker_id, events=events):
                return self.apply(worker_id, events)
            case IndexRestored(worker=worker_id):
                self.restore(worker_id, change.next_number, change.pages)
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError when the table and the holders differ, except for want of room."""
        for holder in self._holders.values():
            cells = self._table.find(holder.keys())
            for set_id in self._table.values[cells[cells >= 0]].tolist():
                assert self._sets.slots(set_id) >> holder.slot & 1
        assert not (self._table.values[self._table.taken()] == EMPTY).any()

    def _expect(self, worker_id: str, keys: bytes, ttl_s: float) -> Iterator[None]:
        num_bytes = SHORT_KEY_BYTES * self._pages_per_slice
        for first in range(0, len(keys), num_bytes):
            if first:
                yield
            holder = self._holders.get(worker_id)
            if holder is None:
                return
            self._stamp += 1
            self._expectation = number = max(EXPECTED, (self._expectation + 1) % 2**32)
            distinct = _distinct(keys_of(keys[first : first + num_bytes]))
            self._change(holder.slot, holder.expect(distinct, number, self._stamp))
            now_s = self._clock.now_s()
            heappush(self._expectations, _Expectation(now_s + ttl_s, number, holder, distinct))
            self._end_expectations(now_s)

    def _runs(self, keys: Keys) -> list[Run]:
        """The runs of pages with the same holders, and the end: by a few numpy calls over all pages."""
        if not keys.size:
            return [(0, 0)]
        ids = self._sets_along(keys)
        starts = [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist()]
        held_by = map(self._sets.slots, ids[starts].tolist())
        return [*zip(starts, held_by, strict=True), (keys.size, 0)]

    def _sets_along(self, keys: Keys) -> SetIds:
        """Look up one page in STRIDE, and the pages between two that differ. Between two pages with the same
        holders all pages have these holders, because the pages of a worker are prefix-closed.
        """
        if keys.size <= 2 * STRIDE:
            return self._sets_of(keys)
        some = np.arange(0, keys.size, STRIDE)
        some[-1] = keys.size - 1
        found = self._sets_of(keys[some])
        ids = np.repeat(found, STRIDE)[: keys.size]
        ids[some[-1]] = found[-1]
        before = some[:-1][found[1:] != found[:-1]]
        between = (before[:, None] + np.arange(1, 2 * STRIDE)).ravel()
        between = between[between < keys.size]
        ids[between] = self._sets_of(keys[between])
        return ids

    def _sets_of(self, keys: Keys) -> SetIds:
        cells = self._table.find(keys)
        return np.where(cells >= 0, self._table.values[cells], EMPTY).astype(np.int32, copy=False)

    def _few_runs(self, page_keys: bytes) -> list[Run] | None:
        """The same runs by bisection, page by page; None when there are many. page_keys: not empty.

        Fastest where few workers differ. The first guess is where a run that began with the same page ended
        when last seen, such as the end of an operator's instructions.
        """
        num_pages, set_at, slots = len(page_keys) // SHORT_KEY_BYTES, self._table.value_at, self._sets.slots
        page, set_id = 0, set_at(page_keys, 0) or EMPTY
        runs = [(0, slots(set_id))]
        # Looked-up pages, the nearest last.
        ahead = [(num_pages - 1, set_at(page_keys, num_pages - 1) or EMPTY)]
        guess = self._run_ends.get(page_keys[:SHORT_KEY_BYTES], 0)
        for _ in range(MAX_BISECTED):
            while ahead and ahead[-1][1] == set_id:
                page = ahead.pop()[0]
            if not ahead:
                return [*runs, (num_pages, 0)]
            nearest = ahead[-1][0]
            if page < guess < nearest:
                ahead += [(each, set_at(page_keys, each) or EMPTY) for each in (guess, guess - 1)]
                guess = 0
            elif page + 1 < nearest:
                middle = (page + nearest) // 2
                ahead.append((middle, set_at(page_keys, middle) or EMPTY))
            else:
                self._learn_run_end(page_keys, runs[-1][0], nearest)
                page, set_id = ahead.pop()
                runs.append((page, slots(set_id)))
                guess = self._run_ends.get(
                    page_keys[page * SHORT_KEY_BYTES : (page + 1) * SHORT_KEY_BYTES], 0
                )
        return None

    def _learn_run_end(self, page_keys: bytes, start: int, end: int) -> None:
        if len(self._run_ends) >= MAX_RUN_ENDS:
            self._run_ends.clear()
        self._run_ends[page_keys[start * SHORT_KEY_BYTES : (start + 1) * SHORT_KEY_BYTES]] = end

    def _follow(self, holder: Holder, events: KvEventBatch, num_stale: int) -> None:
        keys, tier = _distinct(keys_of(events.keys)[num_stale:]), events.tier
        if not keys.size:
            return
        change = holder.remove(keys) if tier is None else holder.store(keys, tier, self._stamp)
        self._change(holder.slot, change)

    def _change(self, slot: int, change: Change) -> None:
        if change.joined.size:
            self._enter(change.joined, slot)
        if change.left.size:
            self._take_out(change.left, slot)

    def _enter(self, keys: Keys, slot: int) -> None:
        cells, new = self._table.place(keys)
        sets = self._table.values[cells]
        sets[new] = EMPTY
        sets = self._sets.joined(sets, slot)
        if cells.min() < 0:
            self._sets.dropped(sets[(cells < 0) & (sets != EMPTY)])
            cells, sets = cells[cells >= 0], sets[cells >= 0]
        self._table.values[cells] = sets
        if self._sets.num_refused:
            self._table.remove(cells[sets == EMPTY])

    def _take_out(self, keys: Keys, slot: int) -> None:
        cells = self._table.find(keys)
        cells = cells[cells >= 0]
        sets = self._sets.left(self._table.values[cells], slot)
        self._table.values[cells] = sets
        self._table.remove(cells[sets == EMPTY])

    def _end_expectations(self, now_s: float) -> None:
        heap = self._expectations
        while heap and (heap[0].until_s <= now_s or len(heap) > MAX_EXPECTATIONS):
            _, number, holder, keys = heappop(heap)
            self._change(holder.slot, holder.expire(keys, number))  # a forgotten holder has nothing left

    def _purge(self, num_entries: int) -> None:
        while self._purges and num_entries > 0:
            slot, keys = self._purges.popleft()
            part = keys[:num_entries]
            if part.size:
                self._take_out(part, slot)
            num_entries -= max(1, part.size)
            if part.size < keys.size:
                self._purges.appendleft((slot, keys[part.size :]))
            else:
                self._free_slots.append(slot)

    def _share_out(self) -> None:
        share = self._max_pages // max(1, len(self._holders))
        for holder in self._holders.values():
            holder.limit = min(holder.num_own_pages, share)
