"""Damaged messages at the doors: what a source knocks with, and what a source is given.

Whoever holds the cluster key may still say anything. A door drops it and counts, and opens for the next one;
a source refuses what it is given, and maps nothing that is smaller than it was said to be.
"""

import errno
import gc
import logging
import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import psutil
import pytest
import torch

from baton.errors import BatonError, WireError
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.ranks.pages import PageMemory, SharedFile, SharedPool
from baton.kvtransfer.ranks.receive_registration import ReceiveRegistrations
from baton.kvtransfer.transports import shm
from baton.kvtransfer.transports.group_receiver import (
    GroupListener,
    GroupReceiver,
    RendezvousReply,
    RendezvousRequest,
    request_rendezvous,
)
from baton.kvtransfer.transports.listener import MAX_NEWCOMERS
from baton.kvtransfer.transports.rank_pair import GroupSettings, payload_bytes
from baton.kvtransfer.transports.shm import PoolOffer, ShmListener, ShmTransport
from baton.pages import PageLayout
from baton.rpc.connection import Connection, DroppedPeers, Role
from tests.transfer_ends import wait_for
from tests.unit.kvtransfer.frame_mutations import BOMBS, ODD_VALUES

KEY = b"the cluster's key"
LAYOUT = PageLayout(tp_size=1, page_size=16, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")
PLAN = plan_transfer(LAYOUT, LAYOUT, 0, 0)
KNOCK = RendezvousRequest(name="gloo", layout=LAYOUT, rank=0, payload_bytes=payload_bytes(PLAN))
NUM_PAGES, PAGE_BYTES = 6, 4096
OFFER = PoolOffer(num_pages=NUM_PAGES, page_bytes=PAGE_BYTES)
NUMBERS = [0, 1, 2, 3, 12, 16, 2**16, 2**31, 2**40, 2**63 - 1, 2**64 - 1, -1, -2]


def damaged(rng: random.Random, message: msgspec.Struct) -> bytes:
    """The message with bytes or fields of it changed, nested ones too."""
    fields: dict[str, Any] = msgspec.to_builtins(message)
    owners = [fields, *(value for value in fields.values() if isinstance(value, dict))]
    for _ in range(rng.randint(0, 2)):
        owner = rng.choice(owners)
        name = rng.choice([*owner, "extra"])
        match rng.randrange(4):
            case 0:
                owner.pop(name, None)
            case 1:
                owner[name] = rng.choice(ODD_VALUES)
            case _:
                owner[name] = rng.choice(NUMBERS)
    body = bytearray(msgspec.msgpack.encode(fields))
    match rng.randrange(8):
        case 0:
            body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        case 1:
            body = body[: rng.randrange(len(body))]
        case 2:
            body += rng.randbytes(rng.randint(1, 40))
        case 3:
            body = bytearray(rng.choice((*BOMBS, rng.randbytes(40))))
    return bytes(body)


class House:
    """A door of gloo that finds everybody too much: whoever is welcome gets as far as that."""

    def __init__(self) -> None:
        pool = torch.zeros(NUM_PAGES, PLAN.unit_bytes, dtype=torch.uint8)
        settings = GroupSettings(connect_s=5.0, stall_s=2.0)
        receiver = GroupReceiver("gloo", ReceiveRegistrations(NUM_PAGES), pool, settings=settings)
        receiver.close()
        self.dropped = DroppedPeers()
        self.door = GroupListener(receiver, LAYOUT, 0, KEY, dropped=self.dropped)

    def rendezvous_request(self, body: bytes) -> str | None:
        """The refusal; None for being dropped."""
        with socket.create_connection(self.door.address) as sock:
            connection = Connection(sock, KEY, Role.CONNECTING)
            with suppress(BatonError):
                connection.handshake()
                connection.send(body)
                return msgspec.msgpack.decode(connection.recv(5.0), type=RendezvousReply).refusal
        return None


@pytest.fixture
def house(caplog: pytest.LogCaptureFixture) -> Iterator[House]:
    caplog.set_level(logging.CRITICAL)  # a line for each dropped peer would be kept, and counted as ours
    made = House()
    yield made
    made.door.close()


def knock_often(house: House, seed: int, num_knocks: int) -> None:
    rng, num_dropped, refusals = random.Random(seed), 0, set[str]()
    before = sum(house.dropped.counts().values())
    for _ in range(num_knocks):
        refusal = house.rendezvous_request(damaged(rng, KNOCK))
        if refusal is None:
            num_dropped += 1
        else:
            assert refusal, "nobody was to be let in"
            refusals.add(refusal)
    wait_for(lambda: sum(house.dropped.counts().values()) == before + num_dropped)
    assert num_dropped > num_knocks // 4
    # Not by dropping all: some got as far as the pairs, others did not fit.
    assert len(refusals) > 3 and any("pairs at once" in refusal for refusal in refusals)


def test_three_hundred_damaged_knocks_are_dropped_or_refused(house: House) -> None:
    knock_often(house, 1, 300)
    assert "knock" in house.dropped.counts()
    with pytest.raises(BatonError, match="pairs at once"):
        request_rendezvous(house.door.address, KEY, KNOCK, 5.0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_thousand_damaged_knocks_take_no_memory(house: House) -> None:
    process = psutil.Process()
    knock_often(house, 2, 1_000)
    gc.collect()
    before = process.memory_info().rss
    knock_often(house, 3, 20_000)
    gc.collect()
    assert process.memory_info().rss - before < 32 << 20


class PoolHouse:
    """A pool in shared memory, and its door."""

    def __init__(self) -> None:
        self.pool = SharedPool()
        self.pool.zeros((NUM_PAGES, PAGE_BYTES), torch.uint8)
        self.dropped = DroppedPeers()
        registrations = ReceiveRegistrations(NUM_PAGES)
        self.door = ShmListener(self.pool, registrations, KEY, lambda _: None, dropped=self.dropped)

    def rendezvous_request(self, incarnation: bytes) -> bool:
        """Whether the pool was given."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(self.door.address)
            connection = Connection(sock, KEY, Role.CONNECTING)
            try:
                connection.handshake()
                connection.send(incarnation)
                connection.recv(5.0)
            except BatonError:
                return False
            finally:
                connection.close()
        return True


@pytest.fixture
def pool_house() -> Iterator[PoolHouse]:
    made = PoolHouse()
    yield made
    made.door.close()
    made.pool.close()


@pytest.mark.parametrize("length", [0, 1, 15, 17, 4096])
def test_who_names_no_incarnation_is_given_no_pool(pool_house: PoolHouse, length: int) -> None:
    assert not pool_house.rendezvous_request(b"i" * length)
    wait_for(lambda: pool_house.dropped.counts() == {"length": 1})
    assert pool_house.rendezvous_request(b"i" * 16)


def test_a_process_that_is_new_each_time_does_not_take_all_files(
    pool_house: PoolHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "MAX_WRITERS", 3)
    given = [pool_house.rendezvous_request(bytes([number]) * 16) for number in range(5)]
    assert given == [True, True, True, False, False]
    wait_for(lambda: pool_house.dropped.counts() == {"crowd": 2})
    assert pool_house.rendezvous_request(bytes(16)), "one that is known may come again"


def test_source_that_came_while_no_descriptor_was_free_is_watched_when_it_comes_again(
    pool_house: PoolHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", fail)
        assert not pool_house.rendezvous_request(bytes(16))
    assert pool_house.rendezvous_request(bytes(16))
    assert len(pool_house.door._watch._watched) == 1


def test_a_process_that_leaves_before_it_is_given_the_pool_is_watched_all_the_same(
    pool_house: PoolHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> tuple[bytes, tuple[int, ...]]:
        raise BrokenPipeError

    monkeypatch.setattr(pool_house.door, "_offer", fail)
    before = psutil.Process().num_fds()
    assert not pool_house.rendezvous_request(bytes(16))
    (watched,) = pool_house.door._watch._watched
    wait_for(lambda: psutil.Process().num_fds() == before + 1)
    os.fstat(watched)


def test_silent_strangers_keep_nobody_from_the_pool(pool_house: PoolHouse) -> None:
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3 * MAX_NEWCOMERS)]
    for sock in silent:
        sock.connect(pool_house.door.address)
    wait_for(lambda: pool_house.dropped.counts().get("crowd", 0) >= MAX_NEWCOMERS)
    assert pool_house.rendezvous_request(bytes(16))
    for sock in silent:
        sock.close()


@pytest.fixture
def descriptor() -> Iterator[int]:
    file = SharedFile("a pool", NUM_PAGES * PAGE_BYTES)
    yield file.descriptor
    file.close()


def judge_offers(descriptor: int, seed: int, num_offers: int) -> None:
    rng, num_taken = random.Random(seed), 0
    source = torch.zeros(2, PAGE_BYTES, dtype=torch.uint8)
    for _ in range(num_offers):
        transport = ShmTransport("nowhere", KEY, PageMemory.of(source), b"i" * 16)
        descriptors = rng.choice(([descriptor], [descriptor], [descriptor], [], [descriptor] * 2))
        try:
            num_pages = transport.map_pages(damaged(rng, OFFER), descriptors)
        except WireError:
            continue
        finally:
            transport.unmap_pages()
        assert num_pages > 0 and NUM_PAGES * PAGE_BYTES % num_pages == 0
        num_taken += 1
    assert 0 < num_taken < num_offers
    assert os.fstat(descriptor).st_size == NUM_PAGES * PAGE_BYTES


def test_ten_thousand_damaged_offers_of_a_pool_are_refused_or_fit(descriptor: int) -> None:
    judge_offers(descriptor, 1, 10_000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_damaged_offers_of_a_pool_are_refused_or_fit(descriptor: int) -> None:
    judge_offers(descriptor, 2, 1_000_000)
