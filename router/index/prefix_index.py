"""The prefix index: which worker holds how much of a prompt, by all workers' reports.

1. A worker joins and is asked for all its pages (KvEventsWanted). Until it has reported them it is not known.
2. Its KvEventBatches are applied in order; after a gap the worker is asked again.
3. `holdings` says how many of a prompt's first pages each worker holds, `locate` where one worker keeps them.
4. A worker that a prompt was dispatched to is expected to hold the prompt (`expect`), so later prompts find
   it at once.
5. A worker that has left is forgotten: none of its entries counts from then on.

All entries are hints: a worker verifies page and generation before it reads. Hence keys are cut to their
first 64 bits. Two of ten million keys are alike with odds of one in 400,000, which would cost a refused hint.

One array has, for each key, the number of the set of workers that hold the page (router/index/table.py). The
set hardly ever changes from one page of a prompt to the next, because the pages of a worker are
prefix-closed. So a few pages of a prompt are looked up by bisection, or one page in sixteen and the pages
between two that differ, however many workers there are. The place of a page is kept per worker
(router/index/holder.py), and only the chosen worker's table is read.

Bounds: `max_pages` in all, an equal share of them for each worker, and never more than a worker has.
"""

from collections import deque
from heapq import heappop, heappush
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from baton.clock import Clock
from baton.messages.control import KvEventBatch
from baton.messages.workers import Tier, Worker
from baton.pages import KEY_BYTES
from baton.router.index.holder import Change, Holder, Located, Values, values_of
from baton.router.index.table import EMPTY, MAX_SLOTS, Keys, KeyTable, SetIds, SlotSets, keys_of, without_zero

MAX_PAGES: Final = 2**22
MAX_SETS: Final = 2**17
NUM_SPARE_PAGES: Final = 1024  # of a worker's share: expected pages come on top of held ones
PURGED_AT_ONCE: Final = 8192  # entries of workers that left, in one tick
MAX_EXPECTATIONS: Final = 2**16
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


class PrefixIndex:
    """Which worker holds which pages. `version` changes whenever a worker's slot may have."""

    def __init__(self, clock: Clock, max_pages: int = MAX_PAGES, *, seed: int = 0) -> None:
        self.version = 0
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
        self._num_expectations = 0
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
        num_changes = len(events.pages)
        if holder is None:
            return True
        if len(events.keys) != KEY_BYTES * num_changes or len(events.generations) != num_changes:
            return True
        self._stamp += 1
        is_in_order = True
        num_stale = 0
        if events.is_afresh:
            self._change(holder.slot, holder.clear())
        elif holder.next_number is not None:
            num_stale = min(max(0, holder.next_number - events.first), num_changes)
            is_in_order = events.first <= holder.next_number
        else:
            is_in_order = events.first == 0 and not holder.is_asked
        self._follow(holder, events, num_stale)
        if is_in_order:
            known = 0 if events.is_afresh else holder.next_number or 0
            holder.next_number = max(events.first + num_changes, known)
            holder.is_asked = False
            return True
        was_asked, holder.next_number, holder.is_asked = holder.is_asked, None, True
        return was_asked

    def holdings(self, keys: bytes) -> Holdings:
        """The pages of a prompt that each worker holds. keys: 16 bytes for each full page, in order."""
        runs = (self._few_runs(keys) if keys else None) or self._runs(keys_of(keys))
        levels = []
        holding = self._present & runs[0][1]
        for start, slots in runs[1:]:
            still = holding & slots
            if still != holding:
                levels.append((start, holding))
                holding = still
        return Holdings(levels[::-1])

    def locate(self, worker_id: str, keys: bytes) -> Located:
        """The places of the first of these pages that the worker has reported."""
        holder = self._holders.get(worker_id)
        return Located((), ()) if holder is None else holder.locate(keys_of(keys))

    def expect(self, worker_id: str, keys: bytes, ttl_s: float) -> None:
        """Expect the pages of a dispatched prompt at a worker for `ttl_s`, and keep its held ones longer.

        To be called for all dispatches; otherwise a worker's share is given up in the wrong order.
        """
        holder = self._holders.get(worker_id)
        if holder is None or not keys:
            return
        self._stamp += 1
        self._num_expectations = (self._num_expectations + 1) % 2**32  # it fits a generation's bits
        distinct, number = np.unique(keys_of(keys)), self._num_expectations
        self._change(holder.slot, holder.expect(distinct, number, self._stamp))
        now_s = self._clock.now_s()
        heappush(self._expectations, _Expectation(now_s + ttl_s, number, holder, distinct))
        self._end_expectations(now_s)

    def tick(self) -> None:
        """End the expectations that have expired, and remove some entries of workers that left."""
        self._end_expectations(self._clock.now_s())
        self._purge(PURGED_AT_ONCE)

    def next_number(self, worker_id: str) -> int | None:
        """The number of the worker's next event; None when its pages are unknown."""
        holder = self._holders.get(worker_id)
        return None if holder is None else holder.next_number

    def export(self, worker_id: str) -> tuple[Keys, Values]:
        """All pages that a worker has reported. The worker must have joined."""
        return self._holders[worker_id].entries()

    def restore(self, worker_id: str, next_number: int, keys: Keys, values: Values) -> None:
        """Replace the pages of a worker by an export before its event `next_number`. The worker must have
        joined.
        """
        holder = self._holders[worker_id]
        self._stamp += 1
        self._change(holder.slot, holder.clear())
        keys, rows = np.unique(without_zero(keys), return_index=True)
        if keys.size:
            self._change(holder.slot, holder.store(keys, values[rows], self._stamp))
        holder.next_number, holder.is_asked = next_number, False

    def check_integrity(self) -> None:
        """Raise AssertionError when the table and the holders differ, except for want of room."""
        for holder in self._holders.values():
            cells = self._table.find(holder.keys())
            for set_id in self._table.values[cells[cells >= 0]].tolist():
                assert self._sets.slots(set_id) >> holder.slot & 1
        assert not (self._table.values[self._table.taken()] == EMPTY).any()

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
        num_pages, set_at, slots = len(page_keys) // KEY_BYTES, self._table.value_at, self._sets.slots
        page, set_id = 0, set_at(page_keys, 0) or EMPTY
        runs = [(0, slots(set_id))]
        # Looked-up pages, the nearest last.
        ahead = [(num_pages - 1, set_at(page_keys, num_pages - 1) or EMPTY)]
        guess = self._run_ends.get(page_keys[:KEY_BYTES], 0)
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
                guess = self._run_ends.get(page_keys[page * KEY_BYTES : (page + 1) * KEY_BYTES], 0)
        return None

    def _learn_run_end(self, page_keys: bytes, start: int, end: int) -> None:
        if len(self._run_ends) >= MAX_RUN_ENDS:
            self._run_ends.clear()
        self._run_ends[page_keys[start * KEY_BYTES : (start + 1) * KEY_BYTES]] = end

    def _follow(self, holder: Holder, events: KvEventBatch, num_stale: int) -> None:
        keys = keys_of(events.keys)[num_stale:]
        pages = np.array(events.pages, np.int64)[num_stale:]
        generations = np.array(events.generations, np.int64)[num_stale:]
        if not keys.size:
            return
        if len(set(keys.tolist())) < keys.size:
            # Of several changes of one page in a message, only the last counts.
            _, from_the_end = np.unique(keys[::-1], return_index=True)
            last = keys.size - 1 - from_the_end
            keys, pages, generations = keys[last], pages[last], generations[last]
        on_host = events.tier is Tier.HOST
        removed = pages < 0
        if removed.any():
            self._change(holder.slot, holder.remove(keys[removed], on_host=on_host))
            stored = ~removed
            keys, pages, generations = keys[stored], pages[stored], generations[stored]
        if keys.size:
            values = values_of(pages, generations, on_host=on_host)
            self._change(holder.slot, holder.store(keys, values, self._stamp))

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
            self._change(holder.slot, holder.disappoint(keys, number))  # a forgotten holder has nothing left

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
