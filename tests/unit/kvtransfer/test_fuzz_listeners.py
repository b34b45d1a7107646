"""Damaged greetings: requests of sources to listeners, and offers of pools to sources.

A peer that holds the cluster key may still send anything. A listener drops such a peer, counts it, and serves
the next one. A source refuses a damaged offer, and maps no file that is smaller than the offer says.
"""

import errno
import gc
import logging
import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import psutil
import pytest
import torch

from baton.errors import BatonError, WireError
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.transports import direct, torch_distributed
from baton.kvtransfer.transports.direct import POOL_SCHEMA, PoolOffer, ShmSender, ShmTransport
from baton.kvtransfer.transports.pages import SharedFile, SharedPool
from baton.kvtransfer.transports.torch_distributed import (
    PAIR_SCHEMA,
    GlooTransport,
    GroupListener,
    PairReply,
    PairRequest,
)
from baton.rpc.auth import Role
from baton.rpc.connection import Connection
from tests.flat_memory import memory_stays_flat
from tests.layouts import a_layout
from tests.transfer_ends import PAGE_KEYS, local_rank
from tests.unit.kvtransfer.frame_mutations import BOMBS, ODD_VALUES
from tests.waiting import wait_for

LAYOUT = a_layout()
PLAN = plan_transfer(LAYOUT, LAYOUT, 0, 0)
REQUEST = PairRequest(payload_bytes=GlooTransport.part_bytes)
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


class PairListener:
    """A listener of gloo that has no room: a request without a fault gets as far as that."""

    def __init__(self) -> None:
        pages = torch.zeros(NUM_PAGES, PLAN.sent_unit_bytes, dtype=torch.uint8)
        rank = local_rank(pages, layout=LAYOUT)
        self.dropped = rank.dropped
        self.listener = GroupListener(GlooTransport(), rank)

    def ask(self, body: bytes) -> str | None:
        """The refusal; None for being dropped."""
        with socket.create_connection(("127.0.0.1", int(self.listener.address))) as sock:
            connection = Connection(sock, PAGE_KEYS, Role.CONNECTING, schema=PAIR_SCHEMA)
            with suppress(BatonError):
                connection.handshake()
                connection.send(body)
                return msgspec.msgpack.decode(connection.recv(5.0), type=PairReply).refusal
        return None


@pytest.fixture
def pair_listener(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PairListener]:
    caplog.set_level(logging.CRITICAL)  # kept lines of dropped peers would count as the listener's memory
    monkeypatch.setattr(torch_distributed, "MAX_PAIRS", 0)
    made = PairListener()
    yield made
    made.listener.close()


def ask_often(pair_listener: PairListener, seed: int, num_requests: int) -> None:
    rng, num_dropped, refusals = random.Random(seed), 0, set[str]()
    before = sum(pair_listener.dropped.counts().values())
    for _ in range(num_requests):
        refusal = pair_listener.ask(damaged(rng, REQUEST))
        if refusal is None:
            num_dropped += 1
        else:
            assert refusal, "no pair can be formed"
            refusals.add(refusal)
    wait_for(lambda: sum(pair_listener.dropped.counts().values()) == before + num_dropped)
    assert num_dropped > num_requests // 4
    assert refusals == {"gloo: no more than 0 pairs at once"}  # some requests were whole


def test_three_hundred_damaged_requests_are_dropped_or_refused(pair_listener: PairListener) -> None:
    ask_often(pair_listener, 1, 300)
    assert "pair" in pair_listener.dropped.counts()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_thousand_damaged_requests_take_no_memory(pair_listener: PairListener) -> None:
    ask_often(pair_listener, 2, 1_000)
    with memory_stays_flat():
        ask_often(pair_listener, 3, 20_000)


class PoolListener:
    """A listener of a pool in shared memory."""

    def __init__(self) -> None:
        self.pool = SharedPool()
        pages = self.pool.zeros((NUM_PAGES, PAGE_BYTES), torch.uint8)
        rank = local_rank(pages, shared=self.pool)
        self.dropped = rank.dropped
        listener = ShmTransport().listen(rank)
        assert listener is not None
        self.listener = listener

    def ask(self, incarnation: bytes) -> bool:
        """True when the pool was given."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(self.listener.address)
            connection = Connection(sock, PAGE_KEYS, Role.CONNECTING, schema=POOL_SCHEMA)
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
def pool_listener() -> Iterator[PoolListener]:
    made = PoolListener()
    yield made
    made.listener.close()
    made.pool.close()


@pytest.mark.parametrize("length", [0, 1, 15, 17, 4096])
def test_source_without_an_incarnation_is_given_no_pool(pool_listener: PoolListener, length: int) -> None:
    assert not pool_listener.ask(b"i" * length)
    wait_for(lambda: pool_listener.dropped.counts() == {"length": 1})
    assert pool_listener.ask(b"i" * 16)


def test_new_processes_cannot_take_all_files(
    pool_listener: PoolListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "MAX_WRITERS", 3)
    given = [pool_listener.ask(bytes([number]) * 16) for number in range(5)]
    assert given == [True, True, True, False, False]
    wait_for(lambda: pool_listener.dropped.counts() == {"limit": 2})
    assert pool_listener.ask(bytes(16)), "a known process may come again"


def fail_to_copy(process: int) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def copy_unwatchable(process: int) -> int:
    return os.open(__file__, os.O_RDONLY)  # epoll refuses regular files


@pytest.mark.parametrize("copy", [fail_to_copy, copy_unwatchable])
def test_source_that_could_not_be_watched_is_watched_when_it_returns(
    pool_listener: PoolListener, monkeypatch: pytest.MonkeyPatch, copy: Callable[[int], int]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", copy)
        assert not pool_listener.ask(bytes(16))
    assert pool_listener.ask(bytes(16))
    (watched,) = pool_listener.listener._watch._watched
    assert "pidfd" in os.readlink(f"/proc/self/fd/{watched}")


def test_process_that_leaves_before_it_is_given_the_pool_is_watched(
    pool_listener: PoolListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> tuple[bytes, tuple[int, ...]]:
        raise BrokenPipeError

    monkeypatch.setattr(pool_listener.listener, "_offer", fail)
    gc.collect()  # so that no descriptor of an earlier test is closed meanwhile
    before = psutil.Process().num_fds()
    assert not pool_listener.ask(bytes(16))
    (watched,) = pool_listener.listener._watch._watched
    wait_for(lambda: psutil.Process().num_fds() == before + 1)
    os.fstat(watched)


@pytest.fixture
def descriptor() -> Iterator[int]:
    file = SharedFile("a pool", NUM_PAGES * PAGE_BYTES)
    yield file.descriptor
    file.close()


def judge_offers(descriptor: int, seed: int, num_offers: int) -> None:
    rng, num_taken = random.Random(seed), 0
    rank = local_rank(torch.zeros(2, PAGE_BYTES, dtype=torch.uint8))
    for _ in range(num_offers):
        sender = ShmSender(rank, "nowhere")
        descriptors = rng.choice(([descriptor], [descriptor], [descriptor], [], [descriptor] * 2))
        try:
            num_pages = sender.map_pages(damaged(rng, OFFER), descriptors).num_pages
        except WireError:
            continue
        finally:
            sender.close()
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
