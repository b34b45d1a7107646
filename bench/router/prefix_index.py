"""The cost of the prefix index: look-ups, decisions of the policy `cost`, changes and memory.

Times are this process's CPU time, as other processes share the machine. docs/benchmarks.md explains the
figures.
"""

from argparse import Namespace
from random import Random
from statistics import median
from time import process_time, thread_time_ns
from typing import Final, NamedTuple

import numpy as np
import psutil

from baton.bench.report import Report, Row, at_least, at_most, option, percentile, suite
from baton.clock import ManualClock
from baton.messages.bounds import SHORT_KEY_BYTES, Kind
from baton.messages.control import Hello, KvEventBatch
from baton.messages.workers import WorkerRole
from baton.request import Request, SamplingParams, TokenIds
from baton.router.in_flight import InFlight
from baton.router.index.prefix_index import PrefixIndex
from baton.router.membership import Member
from baton.router.policies.base import ClusterView, PolicyContext, WorkerPool
from baton.router.policies.cost import CostPolicy
from baton.router.policies.cost_model import CostModel
from baton.router.sliced_work import Family, PromptKeys
from baton.sim.replay import MutePeer
from baton.sim.timed.fleet import Fleet

PAGE_TOKENS: Final = 16
PROMPT_PAGES: Final = 752  # 12,000 tokens
SHARED_PAGES: Final = 200  # of every prompt, such as an operator's instructions
SIBLING_PAGES: Final = 300  # of a prompt that a second worker has too
LIMIT_BYTES: Final = 1.5e9
SMALL: Final = 4  # workers of the second cluster in which decisions are timed
DECISION_BARS_US: Final = (100.0, 500.0)  # p50, p99


class Stores:
    """An index with workers of so many pages each; counts the CPU time of the changes that it applies."""

    def __init__(self, num_workers: int, pages_each: int, max_pages: int) -> None:
        """max_pages: room of the index."""
        self.index = PrefixIndex(ManualClock(), max_pages)
        fleet = Fleet(
            num_prefill=num_workers // 2,
            num_decode=num_workers // 2,
            num_prefill_pages=pages_each,
            num_decode_pages=pages_each,
            num_decode_seqs=256,
        )
        workers = list(fleet.workers(PAGE_TOKENS, 1.0))
        in_turns = zip(workers[fleet.num_prefill :], workers, strict=False)  # decode and prefill workers
        self.workers = [worker for pair in in_turns for worker in pair]
        self._next = dict.fromkeys((worker.id for worker in self.workers), 0)
        self._num_events, self._seconds = 0, 0.0
        for worker in self.workers:
            self.index.join(worker)

    def store(self, number: int, keys: bytes) -> KvEventBatch:
        """Have the index apply that a worker stores these pages; return the worker's message."""
        worker, num_pages = self.workers[number % len(self.workers)], len(keys) // SHORT_KEY_BYTES
        first = self._next[worker.id]
        self._next[worker.id] = first + num_pages
        events = KvEventBatch(first=first, keys=keys)
        started_s = process_time()
        self.index.apply(worker.id, events)
        self._seconds += process_time() - started_s
        self._num_events += num_pages
        return events

    @property
    def events_per_s(self) -> float:
        return self._num_events / self._seconds


class Loaded(NamedTuple):
    """A filled index, and prompts to look up, as joined page keys."""

    stores: Stores
    prompts: list[bytes]
    index_bytes: int


def load(num_workers: int, num_pages: int, rng: np.random.Generator) -> Loaded:
    """Fill an index: all workers hold the shared pages, one the rest of a prompt, two some of every 40th."""
    before_bytes = _resident_bytes()
    stores = Stores(num_workers, 2 * num_pages // num_workers, num_pages * 5 // 4)
    shared, prompts = rng.bytes(SHORT_KEY_BYTES * SHARED_PAGES), []
    for number in range(num_workers):
        stores.store(number, shared)
    num_own = PROMPT_PAGES - SHARED_PAGES
    for number in range((num_pages - SHARED_PAGES) // num_own):
        own = rng.bytes(SHORT_KEY_BYTES * num_own)
        stores.store(number, own)
        if number % 20 == 0:
            prompts.append(shared + own)
        if number % 40 == 0:
            stores.store(number * 7 + 1, own[: SHORT_KEY_BYTES * (SIBLING_PAGES - SHARED_PAGES)])
    return Loaded(stores, prompts, _resident_bytes() - before_bytes)


def match_times_us(loaded: Loaded, num_matches: int, rng: np.random.Generator) -> list[float]:
    """Return the CPU time of each look-up of a whole prompt."""
    times_us = []
    for number in rng.integers(0, len(loaded.prompts), num_matches).tolist():
        started_ns = thread_time_ns()
        holdings = loaded.stores.index.holdings(loaded.prompts[number])
        times_us.append((thread_time_ns() - started_ns) / 1e3)
        assert holdings.levels[0][0] == PROMPT_PAGES
    return times_us


def _resident_bytes() -> int:
    return psutil.Process().memory_info().rss


class _KnownKeys(PromptKeys):
    """Returns the keys of one prompt, made beforehand."""

    now = b""

    def keys(self, family: Family, request: Request) -> bytes:
        return self.now


def decision_times_us(loaded: Loaded, num_decisions: int, rng: np.random.Generator) -> list[float]:
    """Return the CPU time of each decision, 100 a second by the virtual clock."""
    clock, keys = ManualClock(1.0), _KnownKeys()
    context = PolicyContext(clock, InFlight(clock), loaded.stores.index, CostModel(), keys, Random(0))
    policy = CostPolicy(context)
    members: dict[WorkerRole, list[Member]] = {role: [] for role in WorkerRole}
    for worker in loaded.stores.workers:
        hello = Hello(process=Kind.WORKER, id=worker.id, worker=worker)
        members[worker.role].append(Member(worker, MutePeer(hello), 0.0))
    decode, prefill = (WorkerPool(members[role]) for role in (WorkerRole.DECODE, WorkerRole.PREFILL))
    everyone = frozenset(member.id for member in prefill.members)
    view = ClusterView(decode, prefill, {member.id: everyone for member in decode.members})
    prompt, sampling = tuple(range(PROMPT_PAGES * PAGE_TOKENS)), SamplingParams(max_tokens=100)
    request = Request(request_id="0" * 32, token_ids=TokenIds.of(prompt), sampling=sampling)
    times_us = []
    for number in rng.integers(0, len(loaded.prompts), num_decisions).tolist():
        keys.now = loaded.prompts[number]
        begun_ns = thread_time_ns()
        choice = policy.choose(request, view)
        times_us.append((thread_time_ns() - begun_ns) / 1e3)
        policy.expect(choice, request.num_tokens)
        clock.advance(0.01)
        loaded.stores.index.tick()
    return times_us


def decision_rows(loaded: Loaded, num_decisions: int, rng: np.random.Generator) -> list[Row]:
    """Time decisions among the workers of this index."""
    times_us, (p50_us, p99_us) = decision_times_us(loaded, num_decisions, rng), DECISION_BARS_US
    name = f"decision, {len(loaded.stores.workers):,} workers"
    note = f"{loaded.stores.index.num_pages:,} pages"
    return [
        at_most(f"{name}: p50", median(times_us), "us", p50_us, note),
        at_most(f"{name}: p99", percentile(times_us, 99), "us", p99_us),
    ]


def index_rows(num_pages: int, num_workers: int, num_matches: int, report: Report) -> list[Row]:
    """Time look-ups, decisions and changes, and measure memory."""
    rng = np.random.default_rng(0)
    report.tell("filling the index")
    loaded = load(num_workers, num_pages, rng)
    report.tell("look-ups")
    times_us = match_times_us(loaded, num_matches, rng)
    note = f"{num_workers:,} workers, {loaded.stores.index.num_pages:,} pages"
    name, filled_per_s = f"match of {PROMPT_PAGES} pages", loaded.stores.events_per_s
    rows = [
        at_most(f"{name}, p50", median(times_us), "us", 100, note),
        at_most(f"{name}, p99", percentile(times_us, 99), "us", 500),
        at_most("memory", loaded.index_bytes / 1e9, "GB", LIMIT_BYTES / 1e9, note),
        at_least("events, while filling", filled_per_s / 1e6, "M/s", 0.5, "a prompt's pages a message"),
    ]
    report.tell("decisions")
    rows += decision_rows(loaded, num_matches, rng)
    del loaded
    return rows + decision_rows(load(SMALL, num_pages // 50, rng), num_matches, rng)


@suite(
    "prefix_index",
    "prefix index",
    option("--pages", 10_000_000, "in the index"),
    option("--workers", 1000, "that hold them"),
    option("--matches", 3000, "look-ups and decisions that are timed"),
)
def measure(options: Namespace, report: Report) -> None:
    """Measure the index."""
    report.rows += index_rows(options.pages, options.workers, options.matches, report)
