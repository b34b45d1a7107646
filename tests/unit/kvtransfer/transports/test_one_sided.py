"""Pairs over NIXL and Mooncake. Behaviour common to transports: faults/test_transports.py."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import msgspec
import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from baton.errors import ConfigError, TransferFailed, WireError
from baton.kvtransfer.transports.one_sided import (
    NixlTransport,
    OneSidedChannel,
    OneSidedTransport,
    PeerMemory,
)
from baton.kvtransfer.transports.rank_pair import (
    DESTINATION,
    NUM_SLOTS,
    SOURCE,
    PairStore,
    join_gloo,
    staging,
)
from baton.kvtransfer.transports.records import BATCH_ANSWER_BYTES, BATCH_BYTES
from baton.kvtransfer.transports.registry import TRANSPORTS
from tests.transfer_ends import OPTIONAL, local_rank, needs
from tests.waiting import wait_for

PAYLOAD_BYTES = 300_000
EACH = pytest.mark.parametrize("name", OPTIONAL)


class MissingLibrary(NixlTransport):
    """A transport whose library is not installed."""

    module = "no_such_library"


def new_store() -> PairStore:
    """Return a store that both ends share, in place of one for each end."""
    return cast(PairStore, HashStore())


def open_channel(name: str, store: PairStore, rank: int) -> OneSidedChannel:
    transport = TRANSPORTS[name]
    assert isinstance(transport, OneSidedTransport)
    group = join_gloo(PrefixStore("records", store), rank, "127.0.0.1", 10.0)
    return transport.open_channel(group, 1 - rank, staging(PAYLOAD_BYTES), "127.0.0.1")


def open_pair(name: str, store: PairStore) -> tuple[OneSidedChannel, OneSidedChannel]:
    """Return the channels of the destination and of the source, which do not know each other yet."""
    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(open_channel, name, store, rank) for rank in (DESTINATION, SOURCE)]
        return ends[0].result(), ends[1].result()


def connect(store: PairStore, *ends: OneSidedChannel) -> None:
    with ThreadPoolExecutor(2) as threads:
        connecting = [
            threads.submit(end.connect, store, rank, 10.0)
            for end, rank in zip(ends, (DESTINATION, SOURCE), strict=True)
        ]
        for each in connecting:
            each.result()


def test_missing_library_is_a_wrong_setting_when_the_rank_listens() -> None:
    rank = local_rank(torch.zeros((1, 1024), dtype=torch.uint8))
    with pytest.raises(ConfigError, match=r"nixl needs no_such_library.*pip install '\.\[nixl\]'"):
        MissingLibrary().listen(rank)


@EACH
def test_records_payloads_and_answers_arrive_in_order(name: str) -> None:
    store = new_store()
    destination, source = open_pair(name, store)
    connect(store, destination, source)
    for number in range(NUM_SLOTS):
        destination.post_record(number)
        destination.post_payload(number)
    for batch in range(2 * NUM_SLOTS):
        parts, num_bytes = range(2 * batch, 2 * batch + 2), PAYLOAD_BYTES - 7 * batch
        source.send_record(batch, bytes([batch]) * BATCH_BYTES, parts)
        for part in parts:
            source.payload(part, num_bytes).fill_(part + 1)
            source.send_payload(part, num_bytes, 0)
        source.end_batch()
        with ThreadPoolExecutor(1) as answers:
            answer = answers.submit(source.receive_answer, batch, parts, 5.0)
            assert destination.receive_record(batch) == bytes([batch]) * BATCH_BYTES
            destination.post_record(batch + NUM_SLOTS)
            for part in parts:
                destination.expect_payload(part, num_bytes, 0)
                assert bool((destination.fetch_payload(part, num_bytes, 0, 5.0) == part + 1).all())
                destination.post_payload(part + NUM_SLOTS)
            destination.answer(batch, bytes([100 + batch]) * BATCH_ANSWER_BYTES, 5.0)
            assert answer.result() == bytes([100 + batch]) * BATCH_ANSWER_BYTES
    source.close()
    destination.close()


@EACH
def test_no_payload_is_taken_before_it_is_in_its_slot(name: str) -> None:
    store, parts = new_store(), range(2)
    destination, source = open_pair(name, store)
    connect(store, destination, source)
    for number in range(NUM_SLOTS):
        destination.post_record(number)
        destination.post_payload(number)

    def receive() -> list[bool]:
        destination.receive_record(0)
        return [
            bool((destination.fetch_payload(part, PAYLOAD_BYTES, 0, 5.0) == part + 1).all()) for part in parts
        ]

    with ThreadPoolExecutor(1) as receiving:
        received = receiving.submit(receive)
        source.send_record(0, bytes(BATCH_BYTES), parts)
        for part in parts:
            time.sleep(0.1)  # in which a destination that knew of the part would take it
            source.payload(part, PAYLOAD_BYTES).fill_(part + 1)
            source.send_payload(part, PAYLOAD_BYTES, 0)
        source.end_batch()
        with ThreadPoolExecutor(1) as answers:
            answer = answers.submit(source.receive_answer, 0, parts, 5.0)
            assert received.result() == [True, True]
            destination.answer(0, bytes(BATCH_ANSWER_BYTES), 5.0)
            answer.result()
    source.close()
    destination.close()


@EACH
def test_closed_pairs_leave_no_engine(name: str) -> None:
    def live_and_die() -> None:
        store = new_store()
        ends = open_pair(name, store)
        connect(store, *ends)
        for end in ends:
            end.close()
            end.close()

    def num_native_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    live_and_die()
    before = num_native_threads()
    for _ in range(3):
        live_and_die()
    wait_for(lambda: num_native_threads() <= before)


@EACH
def test_abort_ends_the_wait_for_a_payload(name: str) -> None:
    destination, source = open_pair(name, new_store())
    ended: list[str] = []

    def wait() -> None:
        with pytest.raises(TransferFailed) as raised:
            destination.wait_until(lambda: False, 60.0)
        ended.append(str(raised.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    destination.abort()
    waiting.join(10)
    assert ended == [f"{name}: the pair has ended"]
    with pytest.raises(TransferFailed, match="did not move within 0 s"):
        source.wait_until(lambda: False, 0.0)
    for end in (source, destination):
        end.close()


@EACH
@pytest.mark.parametrize("rank", [DESTINATION, SOURCE])
def test_peer_that_describes_no_memory_is_refused(name: str, rank: int) -> None:
    store = new_store()
    store.set(f"memory {1 - rank}", b"no message")
    ends = open_pair(name, store)
    with pytest.raises(WireError, match="cannot decode PeerMemory"):
        ends[rank].connect(store, rank, 2.0)
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    ("name", "rank"),  # of the end that moves payloads
    [
        pytest.param("nixl", SOURCE, marks=needs("nixl")),
        pytest.param("mooncake", DESTINATION, marks=needs("mooncake")),
    ],
)
def test_engine_that_does_not_exist_is_not_reached(name: str, rank: int) -> None:
    store = new_store()
    unreachable = PeerMemory(engine=b"127.0.0.1:1", addresses=(4096,) * NUM_SLOTS, device=0)
    store.set(f"memory {1 - rank}", msgspec.msgpack.encode(unreachable))
    ends = open_pair(name, store)
    with pytest.raises(TransferFailed, match=name):
        ends[rank].connect(store, rank, 2.0)
    for end in ends:
        end.close()
