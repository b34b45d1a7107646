"""Who holds how much of a prompt: a replica, in this process, of what all workers say that they hold.

1. A worker joins and is asked for all its pages (PagesWanted). Until it has told them it is not `known`.
2. Its KvEventBatch are applied in order; after a gap it is asked again.
3. `match` says how many of a prompt's first pages each worker holds, `locate` where a chosen one keeps them.
4. What a prompt is sent to, is expected to hold it (`expect`), so that its siblings find it at once.
5. A worker that is gone is forgotten: none of its entries counts from then on.

All entries are hints: a worker verifies page and generation before it reads. Hence keys are cut to their
first 64 bits: that two of ten million are alike has odds of one in 400,000, and would cost a refused hint.

Why it is fast: one array has, for each key, the number of the set of workers that hold the page
(router/index/table.py). From one page of a prompt to the next the set hardly ever changes, as what a worker
holds is prefix-closed; so one page in sixteen is looked up, then what lies between two that differ, all at
once by a few numpy calls (router/index/table.py), however many workers there are. Where a page is, each
holder keeps for itself (router/index/holder.py), and only the chosen one is asked.

Bounds: `max_pages` in all, an equal share of them for each worker, and never more than a worker has.
"""

from collections import Counter, deque
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Final, NamedTuple

import numpy as np

from baton.clock import Clock
from baton.messages.control import KvEventBatch
from baton.messages.workers import Tier, Worker
from baton.pages import KEY_BYTES
from baton.router.index.holder import HOST_BIT, Change, Holder, Located, Values, values_of
from baton.router.index.match import (
    Holdings,
    Match,
    RunEnds,
    few_runs_along,
    holdings,
    measure,
    runs_along,
)
from baton.router.index.table import EMPTY, MAX_SLOTS, Keys, KeyTable, SlotSets, keys_of, without_zero

# Which pages are expected at whom, and until when.

MAX_EXPECTATIONS: Final = 2**16


class Expectation(NamedTuple):
    until_s: float
    number: int  # no two have the same
    holder: Holder
    keys: Keys


class Expectations:
    """The first to end comes first, in whatever order they were made."""

    def __init__(self) -> None:
        self._heap: list[Expectation] = []
        self._num_made = 0

    def number(self) -> int:
        """Of the next one; it fits a generation's bits."""
        self._num_made = (self._num_made + 1) % 2**32
        return self._num_made

    def add(self, expectation: Expectation) -> None:
        heappush(self._heap, expectation)

    def over(self, now_s: float) -> Iterator[Expectation]:
        """Take out those whose time is over, and the first to end where there are too many."""
        while self._heap and (self._heap[0].until_s <= now_s or len(self._heap) > MAX_EXPECTATIONS):
            yield heappop(self._heap)


MAX_PAGES: Final = 2**22
MAX_SETS: Final = 2**17
NUM_SPARE_PAGES: Final = 1024  # of a worker's share: what is expected of it comes on top of what it has
PURGED_AT_ONCE: Final = 8192  # entries of those who left, in one tick


class PrefixIndex:
    """`counters`: gaps, stale (told before), unknown (by who has not joined), malformed, given_up (past a
    worker's share), no_room.

    `version` changes whenever a worker's slot may have.
    """

    def __init__(self, clock: Clock, max_pages: int = MAX_PAGES, *, seed: int = 0) -> None:
        self.counters: Counter[str] = Counter()
        self.version = 0
        self._clock = clock
        self._max_pages = max_pages
        self._seed = seed
        self._table = KeyTable(max_pages, np.int32, seed=seed)
        self._sets = SlotSets(MAX_SETS)
        self._holders: dict[str, Holder] = {}
        self._free_slots = list(reversed(range(MAX_SLOTS)))
        self._present = 0  # a bit for each slot that is a worker's; others' entries are being purged
        self._num_slots = 0  # that were ever used
        self._purges: deque[tuple[int, list[Change]]] = deque()  # slot, what is left of its entries
        self._run_ends = RunEnds()
        self._expectations = Expectations()
        self._stamp = 0

    @property
    def num_pages(self) -> int:
        """That some worker holds."""
        return len(self._table)

    def warm_up(self) -> None:
        """Do at the start what the first prompts would otherwise wait for."""
        np.unique(np.zeros(1))  # imports numpy.ma when it is first called
        self._table.touch()

    def join(self, worker: Worker) -> None:
        """Once for each life of a worker. One that there is no slot for any more is not known: no hits."""
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
        self._num_slots = max(self._num_slots, slot + 1)
        self.version += 1
        self._share_out()

    def forget(self, worker_id: str) -> None:
        """At once for `match`; its entries are taken out little by little, in `tick`."""
        holder = self._holders.pop(worker_id, None)
        if holder is None:
            return
        self._present &= ~(1 << holder.slot)
        self._purges.append((holder.slot, holder.clear()))
        self.version += 1
        self._share_out()

    def slot(self, worker_id: str) -> int | None:
        """Where in a Match this worker is; the same until it is forgotten."""
        holder = self._holders.get(worker_id)
        return None if holder is None else holder.slot

    def is_known(self, worker_id: str) -> bool:
        """Whether it has told what it holds, with no gap since. A decision without is a blind one."""
        holder = self._holders.get(worker_id)
        return holder is not None and holder.next_number is not None

    def num_held(self, worker_id: str) -> int:
        holder = self._holders.get(worker_id)
        return 0 if holder is None else len(holder)

    def apply(self, worker_id: str, events: KvEventBatch) -> bool:
        """False: some were lost before these, the worker should be asked for all its pages (PagesWanted).

        That is said once for each gap: True until the worker has told all afresh.
        """
        holder = self._holders.get(worker_id)
        num_changes = len(events.pages)
        if holder is None:
            self.counters["unknown"] += num_changes
            return True
        if len(events.keys) != KEY_BYTES * num_changes or len(events.generations) != num_changes:
            self.counters["malformed"] += 1
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
        self.counters["stale"] += num_stale
        self.counters["gaps"] += not is_in_order and not holder.is_asked
        self._follow(holder, events, num_stale)
        if is_in_order:
            holder.next_number = max(
                events.first + num_changes, 0 if events.is_afresh else holder.next_number or 0
            )
            holder.is_asked = False
            return True
        was_asked, holder.next_number, holder.is_asked = holder.is_asked, None, True
        return was_asked

    def match(self, keys: bytes) -> Match:
        """keys: 16 bytes for each full page of the prompt, in order."""
        runs = runs_along(self._table, self._sets, keys_of(keys))
        on_devices = [(start, places.devices) for start, places in runs]
        anywhere = [(start, places.anywhere) for start, places in runs]
        lengths = measure(anywhere, self._present, self._num_slots)
        if on_devices == anywhere:
            return Match(lengths, lengths)
        return Match(measure(on_devices, self._present, self._num_slots), lengths)

    def holdings(self, keys: bytes) -> Holdings:
        """What `match` says, for who asks about a few of many workers."""
        runs = few_runs_along(self._table, self._sets, keys, self._run_ends) if keys else None
        return holdings(runs or runs_along(self._table, self._sets, keys_of(keys)), self._present)

    def locate(self, worker_id: str, keys: bytes) -> Located:
        """Where the worker has the first of these pages, as many as it has told of."""
        holder = self._holders.get(worker_id)
        return Located((), ()) if holder is None else holder.locate(keys_of(keys))

    def expect(self, worker_id: str, keys: bytes, ttl_s: float) -> None:
        """The worker was sent a prompt with these pages. What it holds of them already is now young again.

        To be called for everything that is dispatched, or a worker's share is given up in the wrong order.
        """
        holder = self._holders.get(worker_id)
        if holder is None or not keys:
            return
        self._stamp += 1
        distinct, number = np.unique(keys_of(keys)), self._expectations.number()
        self._change(holder.slot, holder.expect(distinct, number, self._stamp))
        now_s = self._clock.now_s()
        self._expectations.add(Expectation(now_s + ttl_s, number, holder, distinct))
        self._end_expectations(now_s)

    def tick(self) -> None:
        """End the expectations whose time is over, and take out some entries of those who left."""
        self._end_expectations(self._clock.now_s())
        self._purge(PURGED_AT_ONCE)

    def next_number(self, worker_id: str) -> int | None:
        """Of the worker's next change; None when it is not known what it holds."""
        holder = self._holders.get(worker_id)
        return None if holder is None else holder.next_number

    def export(self, worker_id: str) -> tuple[Keys, Values]:
        """What a worker that has joined has told and nothing since has undone."""
        return self._holders[worker_id].entries()

    def restore(self, worker_id: str, next_number: int, keys: Keys, values: Values) -> None:
        """The worker, which has joined, holds this and nothing else, as exported before that change."""
        holder = self._holders[worker_id]
        self._stamp += 1
        self._change(holder.slot, holder.clear())
        keys, rows = np.unique(without_zero(keys), return_index=True)
        values, on_host = values[rows], values[rows] >= HOST_BIT
        for tier, chosen in enumerate((~on_host, on_host)):
            if chosen.any():
                self._change(holder.slot, holder.store(keys[chosen], values[chosen], tier, self._stamp))
        holder.next_number, holder.is_asked = next_number, False

    def check_integrity(self) -> None:
        """AssertionError when the table does not say what the holders say, except for want of room."""
        for holder in self._holders.values():
            for tier, keys in enumerate(holder.keys()):
                cells = self._table.find(keys)
                for set_id in self._table.values[cells[cells >= 0]].tolist():
                    assert self._sets.places(set_id)[tier] >> holder.slot & 1
        assert not (self._table.values[self._table.taken()] == EMPTY).any()

    def _follow(self, holder: Holder, events: KvEventBatch, num_stale: int) -> None:
        keys = keys_of(events.keys)[num_stale:]
        pages = np.array(events.pages, np.int64)[num_stale:]
        generations = np.array(events.generations, np.int64)[num_stale:]
        if not keys.size:
            return
        if len(set(keys.tolist())) < keys.size:
            # Of several changes of one page in a message, only the last is left to see.
            _, from_the_end = np.unique(keys[::-1], return_index=True)
            last = keys.size - 1 - from_the_end
            keys, pages, generations = keys[last], pages[last], generations[last]
        tier = int(events.tier is Tier.HOST)
        removed = pages < 0
        if removed.any():
            self._change(holder.slot, holder.remove(keys[removed], tier))
            stored = ~removed
            keys, pages, generations = keys[stored], pages[stored], generations[stored]
        if keys.size:
            values, num_given_up = values_of(pages, generations, tier), holder.num_given_up
            self._change(holder.slot, holder.store(keys, values, tier, self._stamp))
            self.counters["given_up"] += holder.num_given_up - num_given_up

    def _change(self, slot: int, changes: list[Change]) -> None:
        for change in changes:
            place = slot + change.tier * MAX_SLOTS
            if change.joined.size:
                self._enter(change.joined, place)
            if change.left.size:
                self._take_out(change.left, place)

    def _enter(self, keys: Keys, place: int) -> None:
        cells, new = self._table.place(keys)
        sets = self._table.values[cells]
        sets[new] = EMPTY
        sets = self._sets.joined(sets, place)
        if cells.min() < 0:
            self.counters["no_room"] += int(np.count_nonzero(cells < 0))
            self._sets.dropped(sets[(cells < 0) & (sets != EMPTY)])
            cells, sets = cells[cells >= 0], sets[cells >= 0]
        self._table.values[cells] = sets
        if self._sets.num_refused:
            self._table.remove(cells[sets == EMPTY])

    def _take_out(self, keys: Keys, place: int) -> None:
        cells = self._table.find(keys)
        cells = cells[cells >= 0]
        sets = self._sets.left(self._table.values[cells], place)
        self._table.values[cells] = sets
        self._table.remove(cells[sets == EMPTY])

    def _end_expectations(self, now_s: float) -> None:
        for expectation in self._expectations.over(now_s):
            holder = expectation.holder  # if it has been forgotten since, it has nothing any more
            self._change(holder.slot, holder.disappoint(expectation.keys, expectation.number))

    def _purge(self, num_entries: int) -> None:
        while self._purges and num_entries > 0:
            slot, changes = self._purges.popleft()
            change = changes.pop()
            part = change.left[:num_entries]
            self._change(slot, [change._replace(left=part)])
            num_entries -= max(1, part.size)
            if part.size < change.left.size:
                changes.append(change._replace(left=change.left[part.size :]))
            if changes:
                self._purges.appendleft((slot, changes))
            else:
                self._free_slots.append(slot)

    def _share_out(self) -> None:
        share = self._max_pages // max(1, len(self._holders))
        for holder in self._holders.values():
            holder.limit = min(holder.num_own_pages, share)
