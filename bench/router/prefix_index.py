"""What the prefix index costs: a decision's look-up, a change of a page, its memory, and the same in Redis.

python -m baton.bench.router.prefix_index [--pages 10000000] [--workers 1000] [--matches 3000]
[--without-redis]

Times of the index are of this process's CPU, as other processes share the machine; those of Redis are by the
clock.
"""

import argparse
import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time, thread_time_ns
from typing import Final

import numpy as np

from baton.bench.machine import machine_description, one_line
from baton.bench.report import RESULTS, Row, at_least, at_most, format_number, print_table, write_json
from baton.clock import ManualClock
from baton.messages.control import KvEventBatch
from baton.messages.workers import Address, Worker, WorkerRole
from baton.pages import KEY_BYTES
from baton.router.index.prefix_index import PrefixIndex
from baton.router.redis.link import RedisLink, RedisMatcher
from baton.router.redis.messages import Codec
from baton.router.redis.server import PrivateRedis, find_program

PROMPT_PAGES: Final = 752  # 12,000 tokens
SHARED_PAGES: Final = 200  # of every prompt: what an operator's instructions take
SIBLING_PAGES: Final = 300  # of a prompt that a second worker has too
LIMIT_BYTES: Final = 1.5e9
MESSAGE_PAGES: Final = (752, 64)
REDIS_PROMPTS: Final = 200


@dataclass(frozen=True)
class Loaded:
    index: PrefixIndex
    workers: list[Worker]
    prompts: list[bytes]
    events_per_s: float
    index_bytes: int


class Teller:
    """Workers' messages, numbered as theirs are."""

    def __init__(self, index: PrefixIndex) -> None:
        self.num_events = 0
        self.seconds = 0.0
        self._index = index
        self._next: dict[str, int] = {}

    def stores(self, worker: Worker, keys: bytes) -> KvEventBatch:
        events = self.message(worker, keys)
        started_s = process_time()
        self._index.apply(worker.id, events)
        self.seconds += process_time() - started_s
        self.num_events += len(events.pages)
        return events

    def message(self, worker: Worker, keys: bytes) -> KvEventBatch:
        num_pages = len(keys) // KEY_BYTES
        first = self._next.get(worker.id, 0)
        self._next[worker.id] = first + num_pages
        pages = tuple(number % worker.num_pages for number in range(first, first + num_pages))
        return KvEventBatch(first=first, keys=keys, pages=pages, generations=(1,) * num_pages)

    @property
    def events_per_s(self) -> float:
        return self.num_events / self.seconds


def workers_with(num_workers: int, num_pages: int) -> list[Worker]:
    return [
        Worker(
            id=f"{number:032x}",
            name=f"decode-{number}",
            role=WorkerRole.DECODE,
            model="bench",
            fingerprint="bench",
            address=Address("127.0.0.1", 1),
            kv_address=Address("127.0.0.1", 1),
            page_size=16,
            num_pages=num_pages,
            max_num_seqs=256,
            max_model_len=1 << 20,
        )
        for number in range(num_workers)
    ]


def load(num_workers: int, num_pages: int, rng: np.random.Generator) -> Loaded:
    """Every worker holds the shared pages; each prompt's rest is on one, and a part of every 40th on two."""
    before_bytes = resident_bytes()
    index = PrefixIndex(ManualClock(), num_pages * 5 // 4)
    workers = workers_with(num_workers, 2 * num_pages // num_workers)
    shared, teller, prompts = rng.bytes(KEY_BYTES * SHARED_PAGES), Teller(index), []
    for worker in workers:
        index.join(worker)
        teller.stores(worker, shared)
    num_own = PROMPT_PAGES - SHARED_PAGES
    for number in range((num_pages - SHARED_PAGES) // num_own):
        own = rng.bytes(KEY_BYTES * num_own)
        teller.stores(workers[number % num_workers], own)
        if number % 20 == 0:
            prompts.append(shared + own)
        if number % 40 == 0:
            sibling = workers[(number * 7 + 1) % num_workers]
            teller.stores(sibling, own[: KEY_BYTES * (SIBLING_PAGES - SHARED_PAGES)])
    return Loaded(index, workers, prompts, teller.events_per_s, resident_bytes() - before_bytes)


def match_times_us(loaded: Loaded, num_matches: int, rng: np.random.Generator) -> list[float]:
    times_us = []
    for number in rng.integers(0, len(loaded.prompts), num_matches).tolist():
        started_ns = thread_time_ns()
        match = loaded.index.match(loaded.prompts[number])
        times_us.append((thread_time_ns() - started_ns) / 1e3)
        assert match.num_pages.max() == PROMPT_PAGES
    return times_us


def ingest_rates(num_pages: int, rng: np.random.Generator) -> Iterator[tuple[int, float]]:
    """Events a second, by how many come in a message: a prompt's pages, and what a busy step changes."""
    for message_pages in MESSAGE_PAGES:
        index = PrefixIndex(ManualClock(), 2 * num_pages)
        workers = workers_with(100, num_pages // 50)
        for worker in workers:
            index.join(worker)
        teller = Teller(index)
        for number in range(num_pages // message_pages):
            teller.stores(workers[number % len(workers)], rng.bytes(KEY_BYTES * message_pages))
        yield message_pages, teller.events_per_s


def growth_percent(num_prefixes: int, rng: np.random.Generator) -> float:
    """Of resident memory, while distinct prefixes go through an index with room for a twentieth of them."""
    index = PrefixIndex(ManualClock(), num_prefixes // 20)
    workers = workers_with(8, num_prefixes)
    for worker in workers:
        index.join(worker)
    teller = Teller(index)
    num_messages, settled_bytes = num_prefixes // 500, 0
    for number in range(num_messages):
        teller.stores(workers[number % 8], rng.bytes(KEY_BYTES * 500))
        if number == num_messages // 4:
            settled_bytes = resident_bytes()
    return 100 * (resident_bytes() / settled_bytes - 1)


async def redis_times_ms(num_matches: int, rng: np.random.Generator) -> list[float]:
    """One after another over one connection, each one round trip."""
    async with PrivateRedis() as redis:
        index = PrefixIndex(ManualClock())
        link = RedisLink(redis.url, "bench", Codec(bytes(32)), "0" * 32, index, lambda message: None)
        linking = asyncio.create_task(link.run())
        workers = workers_with(8, 2 * REDIS_PROMPTS * PROMPT_PAGES)
        shared, teller, prompts = rng.bytes(KEY_BYTES * SHARED_PAGES), Teller(index), []
        for worker in workers:
            index.join(worker)
            link.joined(worker)
            link.pages(worker.id, teller.stores(worker, shared))
        for number in range(REDIS_PROMPTS):
            own = rng.bytes(KEY_BYTES * (PROMPT_PAGES - SHARED_PAGES))
            link.pages(workers[number % 8].id, teller.stores(workers[number % 8], own))
            prompts.append(shared + own)
        async with asyncio.timeout(60):
            while not link.is_up or link.num_untold:
                await asyncio.sleep(0.01)
        linking.cancel()
        await asyncio.gather(linking, return_exceptions=True)
        return await _ask(RedisMatcher(redis.url, "bench"), prompts, num_matches)


async def _ask(matcher: RedisMatcher, prompts: list[bytes], num_matches: int) -> list[float]:
    times_ms = []
    for number in range(num_matches):
        started_s = perf_counter()
        found = await matcher.match(prompts[number % len(prompts)])
        times_ms.append(1e3 * (perf_counter() - started_s))
        assert max(found.values()) == PROMPT_PAGES
    await matcher.aclose()
    return times_ms


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def index_rows(num_pages: int, num_workers: int, num_matches: int) -> list[Row]:
    rng = np.random.default_rng(0)
    loaded = load(num_workers, num_pages, rng)
    times_us = match_times_us(loaded, num_matches, rng)
    note = f"{num_workers:,} workers, {loaded.index.num_pages:,} pages"
    name = f"match of {PROMPT_PAGES} pages"
    rows = [
        at_most(f"{name}, p50", median(times_us), "us", 100, note),
        at_most(f"{name}, p99", quantiles(times_us, n=100)[98], "us", 500),
        at_most("memory", loaded.index_bytes / 1e9, "GB", LIMIT_BYTES / 1e9, note),
        at_least(
            "events, while filling", loaded.events_per_s / 1e6, "M/s", 0.5, "a prompt's pages a message"
        ),
    ]
    del loaded
    for message_pages, events_per_s in ingest_rates(min(num_pages, 1_000_000), rng):
        bar = 0.5 if message_pages == PROMPT_PAGES else None
        name = f"events, {message_pages} a message"
        value = events_per_s / 1e6
        rows.append(Row(name, value, "M/s") if bar is None else at_least(name, value, "M/s", bar))
    growth = growth_percent(min(num_pages, 1_000_000), rng)
    rows.append(
        at_most("growth over 1 M prefixes", growth, "%", 2.0, "room for 50,000; after the first quarter")
    )
    return rows


def redis_rows(num_matches: int) -> list[Row]:
    if find_program() is None:
        return [Row("Redis", None, "", note="there is no redis-server on PATH")]
    times_ms = asyncio.run(redis_times_ms(num_matches, np.random.default_rng(0)))
    per_s = PROMPT_PAGES / median(times_ms) / 1e3
    note = f"one round trip each; {format_number(1e3 / median(times_ms))} prompts a second"
    return [
        at_most(f"Redis: match of {PROMPT_PAGES} pages, p50", median(times_ms), "ms", 1.0, note),
        at_most(f"Redis: match of {PROMPT_PAGES} pages, p99", quantiles(times_ms, n=100)[98], "ms", 3.0),
        at_least("Redis: pages looked up", per_s, "M/s", 1.0, "at the median; most by their neighbours"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the prefix index, in memory and in Redis.")
    parser.add_argument("--pages", type=int, default=10_000_000)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--matches", type=int, default=3000)
    parser.add_argument("--without-redis", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS / "prefix_index.json")
    options = parser.parse_args()
    rows = index_rows(options.pages, options.workers, options.matches)
    if not options.without_redis:
        rows += redis_rows(options.matches)
    title = f"prefix index · {one_line(machine_description())}"
    print_table(title, rows)
    write_json(options.output, title, rows, {})


if __name__ == "__main__":
    main()
