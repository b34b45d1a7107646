"""The channel that carries records over gloo and payloads over NCCL, with gloo standing in for NCCL too."""

import threading
from collections.abc import Iterator
from typing import cast

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from baton.errors import TransferFailed
from baton.kvtransfer.ranks.pages import DevicePages
from baton.kvtransfer.transports.rank_pair import (
    DESTINATION,
    NUM_SLOTS,
    SOURCE,
    NcclChannel,
    join_gloo,
    join_nccl,
)
from baton.kvtransfer.transports.tcp_streams import ANSWER_BYTES, HEADER_BYTES

PAYLOAD_BYTES = 5000


class CpuInPlaceOfGpu:
    """What NcclChannel needs of a GPU's pool; streams are none, so everything is done when it is called."""

    stream = None

    def staging(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def finish(self, timeout_s: float = 0.0) -> None: ...


def join(store: Store, rank: int, made: dict[int, NcclChannel]) -> None:
    records, bulk = (
        join_gloo(PrefixStore(name, store), rank, "127.0.0.1", 10.0) for name in ("records", "bulk")
    )
    packing = cast(DevicePages, CpuInPlaceOfGpu())
    channel = NcclChannel(records, bulk, 1 - rank, PAYLOAD_BYTES, packing)
    channel.connect(rank, 10.0)
    made[rank] = channel


@pytest.fixture
def channels() -> Iterator[tuple[NcclChannel, NcclChannel]]:
    """The source's and the destination's."""
    store, made = HashStore(), dict[int, NcclChannel]()
    other = threading.Thread(target=join, args=(store, DESTINATION, made))
    other.start()
    join(store, SOURCE, made)
    other.join()
    yield made[SOURCE], made[DESTINATION]
    for channel in made.values():
        channel.abort()


def test_records_payloads_and_answers_arrive_in_their_order(
    channels: tuple[NcclChannel, NcclChannel],
) -> None:
    source, destination = channels
    for slot in range(NUM_SLOTS):
        destination.post(slot)
    for number in range(2 * NUM_SLOTS):
        slot, num_bytes = number % NUM_SLOTS, PAYLOAD_BYTES - 7 * number
        source.payload(slot, num_bytes).fill_(number + 1)
        source.send(slot, bytes([number]) * HEADER_BYTES, num_bytes)
        assert destination.receive(slot) == bytes([number]) * HEADER_BYTES
        assert bool((destination.fetch(slot, num_bytes, 5.0) == number + 1).all())
        destination.post(slot)
        destination.answer(slot, bytes([100 + number]) * ANSWER_BYTES, 5.0)
        assert source.receive_answer(slot, 5.0) == bytes([100 + number]) * ANSWER_BYTES


def test_an_abort_ends_the_waits_of_both_sides(channels: tuple[NcclChannel, NcclChannel]) -> None:
    source, destination = channels
    destination.post(0)
    ended: list[str] = []

    def wait() -> None:
        with pytest.raises(TransferFailed) as raised:
            destination.receive(0)
        ended.append(str(raised.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    source.abort()
    waiting.join(10)
    assert len(ended) == 1 and "closed" in ended[0]
    with pytest.raises(TransferFailed):
        source.send(0, b"r" * HEADER_BYTES, 10)
        source.receive_answer(0, 5.0)


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_says_so() -> None:
    with pytest.raises(TransferFailed, match="has no NCCL"):
        join_nccl(HashStore(), SOURCE, 1.0)
