"""The commands that a router sends to Redis, without a Redis."""

import math
from collections import Counter
from random import Random

import numpy as np
import pytest

from baton.clock import ManualClock
from baton.messages.bounds import SHORT_KEY_BYTES
from baton.messages.workers import Tier
from baton.router.index.prefix_index import MAX_PAGES, PrefixIndex
from baton.router.redis import outbox
from baton.router.redis.client import Command
from baton.router.redis.messages import pages_of, snapshot_of
from baton.router.redis.outbox import (
    MAX_STREAM_BYTES,
    STREAM_ENTRIES,
    RedisOutbox,
    max_entries,
    stream_budget,
)
from tests.node_peers import a_worker, id_of
from tests.unit.router.redis_routers import CODEC, NAMES
from tests.unit.router.router_cluster import stored

W0 = a_worker("w0", num_pages=9000)
RNG = np.random.default_rng(5)
KEYS = RNG.bytes(5000 * SHORT_KEY_BYTES)


class OutboxCase:
    """An outbox and its index, and the index of another router that receives all commands."""

    def __init__(self) -> None:
        self.index, self.other = (PrefixIndex(ManualClock(), 20_000) for _ in range(2))
        self.counters: Counter[str] = Counter()
        self.outbox = RedisOutbox(NAMES, CODEC, id_of("router"), self.index, self.counters)
        self.index.join(W0)
        self.other.join(W0)
        self._number = 0

    def report(self, keys: bytes, tier: Tier = Tier.DEVICE) -> None:
        events = stored(keys, self._number, tier=tier)
        self._number += events.num_changes
        self.index.apply(W0.id, events)
        self.outbox.pages(W0.id, events)

    def send(self) -> list[str]:
        """Send all commands to the other router. Returns the scripts, and the words of plain commands."""
        sent: list[Command] = []
        while len(self.outbox):
            commands = self.outbox.take_batch()
            if self.outbox.has_stale:
                commands = self.outbox.snapshot(self.outbox.next_to_snapshot() or "", "1-0")
            sent += commands
            for command in commands:
                self._receive(command)
        return [command.script or str(command.arguments[0]) for command in sent]

    def _receive(self, command: Command) -> None:
        bodies = [body for body in command.arguments if isinstance(body, bytes)]
        if command.script == "publish":
            assert self.other.apply(W0.id, CODEC.decode(pages_of(W0.id), bodies[0])), "there is no gap"
        elif command.arguments[0] == "SET":
            snapshot = CODEC.decode(snapshot_of(W0.id), bodies[0])
            self.other.restore(W0.id, snapshot.next_number, snapshot.pages)

    def agree(self) -> bool:
        """True when the other router knows the same of the worker."""
        return self.index.export(W0.id) == self.other.export(W0.id) and self.other.is_known(W0.id)


def test_nothing_queues_while_the_link_is_down() -> None:
    case = OutboxCase()
    case.outbox.joined(W0)
    case.report(KEYS)
    assert case.send() == []


def test_stale_worker_joins_and_gets_a_snapshot_before_later_events() -> None:
    case = OutboxCase()
    case.outbox.joined(W0)
    case.outbox.close()
    case.report(KEYS[: 3000 * SHORT_KEY_BYTES])
    case.report(KEYS[3000 * SHORT_KEY_BYTES : 4000 * SHORT_KEY_BYTES], Tier.HOST)
    case.outbox.open()
    case.report(KEYS[4000 * SHORT_KEY_BYTES :])
    assert case.send() == ["join", "SET", "publish"]
    assert case.agree()
    case.report(RNG.bytes(SHORT_KEY_BYTES))
    assert case.send() == ["publish"]
    assert case.agree()


def test_stale_worker_without_pages_gets_an_empty_snapshot() -> None:
    case = OutboxCase()
    case.outbox.open()
    case.outbox.joined(W0)
    case.report(b"")
    case.outbox.close()
    case.outbox.open()
    assert case.send() == ["join", "SET", "publish"]
    assert case.agree()


def test_too_many_events_are_replaced_by_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_QUEUED", 50)
    case = OutboxCase()
    case.outbox.open()
    case.outbox.joined(W0)
    for number in range(200):
        case.report(KEYS[number * SHORT_KEY_BYTES : (number + 1) * SHORT_KEY_BYTES])
        assert len(case.outbox) <= 51
    assert case.counters["redis_overflows"] == 1
    case.send()
    assert case.agree()


def test_gap_that_redis_finds_is_closed_by_a_snapshot() -> None:
    case = OutboxCase()
    case.outbox.open()
    case.outbox.joined(W0)
    case.report(KEYS[: 10 * SHORT_KEY_BYTES])
    join, publish = case.outbox.take_batch()
    assert (join.script, publish.script) == ("join", "publish")
    case.report(KEYS[10 * SHORT_KEY_BYTES : 20 * SHORT_KEY_BYTES])  # is in the snapshot, too
    case.outbox.answered(publish, -2)
    assert case.send() == ["join", "SET", "publish"]
    assert case.agree() and case.counters["redis_gaps"] == 1


def test_nothing_more_is_sent_of_a_fenced_worker() -> None:
    case = OutboxCase()
    case.outbox.open()
    case.outbox.joined(W0)
    case.report(KEYS[: 10 * SHORT_KEY_BYTES])
    join, publish = case.outbox.take_batch()
    case.outbox.answered(join, -2)
    case.outbox.answered(publish, -1)
    case.report(KEYS[10 * SHORT_KEY_BYTES :])
    assert case.send() == [] and case.outbox.next_to_snapshot() is None
    assert case.counters["redis_fenced"] == 1


def test_changed_workers_get_snapshots_in_turn_the_oldest_snapshot_first() -> None:
    workers, index = [a_worker(f"w{number}") for number in range(3)], PrefixIndex(ManualClock(), 1000)
    outbox = RedisOutbox(NAMES, CODEC, id_of("router"), index, Counter())
    outbox.open()
    for worker in workers:
        index.join(worker)
        outbox.joined(worker)
    assert outbox.next_to_snapshot() is None, "the pages of all workers are unknown"
    due = []
    for number in range(6):
        for worker in workers[: 3 if number < 4 else 1]:  # later the first alone
            assert index.apply(worker.id, stored(KEYS[number * SHORT_KEY_BYTES :][:SHORT_KEY_BYTES], number))
        worker_id = outbox.next_to_snapshot()
        assert worker_id is not None and len(outbox.snapshot(worker_id, "1-0")) == 1
        due.append(worker_id)
    w0, w1, w2 = (worker.id for worker in workers)
    assert due == [w0, w1, w2, w0, w1, w2]
    assert outbox.next_to_snapshot() == w0
    assert outbox.snapshot(w0, "1-0") and outbox.next_to_snapshot() is None


def test_stream_and_snapshots_fit_the_memory_of_redis() -> None:
    for max_memory_bytes in (2**28, 2**30, 2**31):
        budget_bytes = stream_budget(max_memory_bytes)
        stream_bytes = budget_bytes * (1 + math.log(2**19 * STREAM_ENTRIES / budget_bytes))
        assert 1.25 * (16 * MAX_PAGES + stream_bytes) < max_memory_bytes
    assert stream_budget(0) == MAX_STREAM_BYTES == stream_budget(2**40)


def test_stream_keeps_fewer_entries_the_larger_they_are() -> None:
    budget_bytes = stream_budget(2**30)
    assert max_entries(0, budget_bytes) == max_entries(2048, budget_bytes) == STREAM_ENTRIES
    assert max_entries(2**19, budget_bytes) == 64
    assert max_entries(2**19, stream_budget(2**20)) == 1


@pytest.mark.parametrize("seed", range(3))
def test_stream_stays_within_its_bound_for_any_sequence_of_sizes(seed: int) -> None:
    random, budget_bytes, entries = Random(seed), stream_budget(2**25), list[int]()
    least = budget_bytes / STREAM_ENTRIES
    for number in range(30_000):
        steady = 2**19 / (1 + number / 50)
        entries.append(max(64, int(steady if seed == 0 else 2 ** random.uniform(6, 19))))
        del entries[: -max_entries(entries[-1], budget_bytes)]
        if number % 100 == 0:
            assert sum(entries) <= budget_bytes * (1 + math.log(2**19 / least))
