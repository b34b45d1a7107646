"""What is put down to be told to Redis, without one."""

from collections import Counter

import numpy as np
import pytest

from baton.clock import ManualClock
from baton.messages.control import KvEventBatch
from baton.messages.workers import Tier
from baton.pages import KEY_BYTES
from baton.router.index.prefix_index import PrefixIndex
from baton.router.redis import outbox as redis_outbox
from baton.router.redis.client import Command, Names
from baton.router.redis.outbox import RedisOutbox
from tests.node_peers import a_worker, id_of
from tests.unit.router.redis_routers import CODEC

W0 = a_worker("w0", num_pages=9000)
RNG = np.random.default_rng(5)
KEYS = RNG.bytes(5000 * KEY_BYTES)
MESSAGE_AT = 7  # of the arguments of `apply`


class Said:
    """An outbox and an index; what comes out of the outbox is applied to a second index."""

    def __init__(self) -> None:
        self.index, self.other = (PrefixIndex(ManualClock(), 20_000) for _ in range(2))
        self.counters: Counter[str] = Counter()
        self.outbox = RedisOutbox(Names.of("f"), CODEC, id_of("router"), self.index, self.counters)
        self.index.join(W0)
        self.other.join(W0)
        self._number = 0

    def says(self, keys: bytes, tier: Tier = Tier.DEVICE) -> None:
        num_pages = len(keys) // KEY_BYTES
        events = KvEventBatch(
            first=self._number,
            keys=keys,
            pages=tuple(range(num_pages)),
            generations=(2,) * num_pages,
            tier=tier,
        )
        self._number += num_pages
        self.index.apply(W0.id, events)
        self.outbox.pages(W0.id, events)

    def drain(self) -> list[Command]:
        commands = []
        while batch := self.outbox.take_batch():
            commands += batch
        for command in commands:
            if command.script == "apply":
                message = command.arguments[MESSAGE_AT]
                assert isinstance(message, bytes)
                events = CODEC.decode_pages(W0.id, message)
                assert self.other.apply(W0.id, events)
        return commands

    def agree(self) -> bool:
        lengths = [index.holdings(KEYS).levels[:1] for index in (self.index, self.other)]
        located = [index.locate(W0.id, KEYS) for index in (self.index, self.other)]
        return lengths[0] == lengths[1] and located[0] == located[1]


def test_while_the_link_is_down_nothing_queues() -> None:
    said = Said()
    said.outbox.joined(W0)
    said.says(KEYS)
    assert said.drain() == []


def test_after_the_link_was_down_a_worker_is_told_afresh_and_then_goes_on() -> None:
    said = Said()
    said.outbox.joined(W0)
    said.outbox.close()
    said.says(KEYS[: 3000 * KEY_BYTES])
    said.says(KEYS[3000 * KEY_BYTES : 4000 * KEY_BYTES], Tier.HOST)
    said.outbox.open()
    said.says(KEYS[4000 * KEY_BYTES :])
    commands = said.drain()
    assert {command.script for command in commands} == {"apply"}
    assert len(commands) == 3, (
        "two chunks of the device's, one of the host's, which has the rest of the device's first"
    )
    assert said.agree()
    said.says(RNG.bytes(KEY_BYTES))
    assert len(said.drain()) == 1
    assert said.other.is_known(W0.id)


def test_a_worker_that_holds_nothing_is_told_so() -> None:
    said = Said()
    said.outbox.open()
    said.outbox.joined(W0)
    said.says(b"")
    said.outbox.close()
    said.outbox.open()
    (command,) = said.drain()
    assert command.script == "apply"
    assert said.other.is_known(W0.id)


def test_too_much_at_once_is_told_out_of_the_replica_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_outbox, "MAX_QUEUED", 50)
    said = Said()
    said.outbox.open()
    said.outbox.joined(W0)
    for number in range(200):
        said.says(KEYS[number * KEY_BYTES : (number + 1) * KEY_BYTES])
        assert len(said.outbox) <= 60
    assert said.counters["redis_overflows"] >= 1
    said.drain()
    assert said.agree()


def test_a_gap_that_redis_finds_is_mended_and_a_fenced_life_is_told_no_more() -> None:
    said = Said()
    said.outbox.open()
    said.outbox.joined(W0)
    said.says(KEYS[: 10 * KEY_BYTES])
    join, _share, apply = said.drain()
    said.outbox.answered(apply, -2)
    (again,) = said.drain()
    assert again.script == "apply"
    assert said.agree()
    assert said.outbox.snapshot(W0.id, "1-0") is not None
    said.outbox.answered(join, -2)
    said.says(KEYS[10 * KEY_BYTES :])
    assert said.drain() == []
    assert said.counters["redis_fenced"] == 1
    assert said.outbox.next_to_snapshot() is None, "what it was has ended in Redis"


def test_a_snapshot_is_due_when_something_has_changed() -> None:
    said = Said()
    said.outbox.open()
    said.outbox.joined(W0)
    assert said.outbox.next_to_snapshot() is None, "nobody knows what it holds"
    said.says(KEYS[: 10 * KEY_BYTES])
    assert said.outbox.next_to_snapshot() == W0.id
    assert said.outbox.snapshot(W0.id, "1-0") is not None
    assert said.outbox.next_to_snapshot() is None
    said.says(KEYS[10 * KEY_BYTES :])
    assert said.outbox.next_to_snapshot() == W0.id


def test_the_worker_with_the_oldest_snapshot_is_next_however_much_others_change() -> None:
    workers, index = [a_worker(f"w{number}") for number in range(3)], PrefixIndex(ManualClock(), 1000)
    outbox = RedisOutbox(Names.of("f"), CODEC, id_of("router"), index, Counter())
    outbox.open()
    for worker in workers:
        index.join(worker)
        outbox.joined(worker)
    due = []
    for number in range(6):
        for worker in workers[: 3 if number < 4 else 1]:  # later the first alone
            events = KvEventBatch(
                first=number, keys=KEYS[number * KEY_BYTES :][:KEY_BYTES], pages=(number,), generations=(2,)
            )
            assert index.apply(worker.id, events)
        worker_id = outbox.next_to_snapshot()
        assert worker_id is not None and outbox.snapshot(worker_id, "1-0") is not None
        due.append(worker_id)
    w0, w1, w2 = (worker.id for worker in workers)
    assert due == [w0, w1, w2, w0, w1, w2]
    assert outbox.next_to_snapshot() == w0
    assert outbox.snapshot(w0, "1-0") is not None and outbox.next_to_snapshot() is None
