"""Pairs of ranks over torch.distributed. Behaviour common to transports: faults/test_transports.py."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import cast

import msgspec
import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from baton.errors import TransferFailed
from baton.kvtransfer.protocol.messages import PeerRank
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.transports import torch_distributed
from baton.kvtransfer.transports.pages import DevicePages
from baton.kvtransfer.transports.rank_pair import (
    DESTINATION,
    NUM_SLOTS,
    SOURCE,
    join_gloo,
    part_bytes,
    payload_bytes,
)
from baton.kvtransfer.transports.records import ANSWER_BYTES, HEADER_BYTES, MAX_PART_BYTES
from baton.kvtransfer.transports.torch_distributed import (
    PAIR_SCHEMA,
    GlooTransport,
    GroupListener,
    GroupSender,
    GroupSettings,
    NcclChannel,
    NcclTransport,
    PairReply,
    PairRequest,
    join_nccl,
)
from baton.pages import PageLayout
from baton.rpc.auth import Role
from baton.rpc.connection import Connection
from tests.transfer_ends import KEY, Push, local_rank, peer_rank, piece_of, registration_of
from tests.waiting import wait_for

LAYOUT = PageLayout(tp_size=1, page_size=16, num_layers=3, num_kv_heads=4, head_dim=1024, dtype="bfloat16")
OTHER_MODEL = msgspec.structs.replace(LAYOUT, num_layers=2)
PLAN = plan_transfer(LAYOUT, LAYOUT, 0, 0)
NUM_PAGES = 60  # of 768 KiB: many parts
SETTINGS = GroupSettings(connect_s=5.0, stall_s=2.0)
GLOO = GlooTransport()
REQUEST = PairRequest(
    transport="gloo", layout=LAYOUT, rank=0, payload_bytes=payload_bytes(PLAN, GlooTransport.part_bytes)
)
PIECE = piece_of(PLAN, tuple(range(50)), tuple(range(50))[::-1])


class Destination:
    def __init__(self) -> None:
        self.pages = torch.zeros((NUM_PAGES, LAYOUT.page_bytes), dtype=torch.uint8)
        self.rank = local_rank(self.pages, layout=LAYOUT)
        self.listener = GroupListener(GLOO, self.rank, SETTINGS)
        self.rank.registrations.add(registration_of(PIECE.transfer))

    def peer(self) -> PeerRank:
        return peer_rank("gloo", self.listener.address, LAYOUT)

    def refusal(self, request: PairRequest) -> str:
        with socket.create_connection(("127.0.0.1", int(self.listener.address))) as sock:
            connection = Connection(sock, KEY, Role.CONNECTING, schema=PAIR_SCHEMA)
            with contextlib.closing(connection.handshake()):
                connection.send(msgspec.msgpack.encode(request))
                return msgspec.msgpack.decode(connection.recv(5.0), type=PairReply).refusal


@pytest.fixture
def destination() -> Iterator[Destination]:
    made = Destination()
    yield made
    made.listener.close()


@pytest.fixture
def sender(destination: Destination) -> Iterator[GroupSender]:
    pages = torch.randint(0, 256, (NUM_PAGES, LAYOUT.page_bytes), dtype=torch.uint8)
    made = GroupSender(GLOO, local_rank(pages, layout=LAYOUT), destination.peer(), SETTINGS)
    yield made
    made.close()


def num_pairs() -> int:
    return sum(thread.name == "gloo-answer" for thread in threading.enumerate())


@pytest.mark.parametrize("unit_mib", [1, 8, 20, 40, 63])
def test_message_has_room_for_a_part_of_any_units(unit_mib: int) -> None:
    layout = msgspec.structs.replace(LAYOUT, num_layers=4 * unit_mib)
    plan = plan_transfer(layout, layout, 0, 0)
    assert plan.unit_bytes == unit_mib * 2**20
    for transport in (GlooTransport, NcclTransport):
        size, room = (count(plan, transport.part_bytes) for count in (part_bytes, payload_bytes))
        assert size + size // 2 + plan.unit_bytes == room <= MAX_PART_BYTES
        assert (size == transport.part_bytes) == (
            3 * transport.part_bytes // 2 + plan.unit_bytes <= MAX_PART_BYTES
        )


def test_long_piece_goes_in_a_few_large_messages(destination: Destination, sender: GroupSender) -> None:
    sender.open()
    outcome = Push(sender, PIECE).outcome()
    assert outcome.is_done and outcome.num_messages < 12 and outcome.num_bytes == PIECE.num_bytes > 35e6


def test_closed_sender_fails_its_pieces_and_ends_the_pair_on_both_sides(
    destination: Destination, sender: GroupSender
) -> None:
    sender.open()
    num_threads = threading.active_count()
    push = Push(sender, PIECE)
    sender.close()
    sender.close()
    assert push.outcome().reason == "the transport was closed" and sender.is_broken
    wait_for(lambda: threading.active_count() <= num_threads - 3 and num_pairs() == 0)


def test_closed_destination_ends_its_pairs(destination: Destination, sender: GroupSender) -> None:
    sender.open()
    destination.listener.close()
    assert num_pairs() == 0
    assert not Push(sender, PIECE).outcome().is_done


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"transport": "nccl"}, "a listener of gloo"),
        ({"rank": 1}, "rank 1 is out of range"),
        ({"layout": OTHER_MODEL}, "num_layers"),
        ({"payload_bytes": 1}, "of 1 there"),
    ],
)
def test_source_that_does_not_fit_is_told_why(
    destination: Destination, change: dict[str, object], reason: str
) -> None:
    assert reason in destination.refusal(msgspec.structs.replace(REQUEST, **change))
    wait_for(lambda: num_pairs() == 0)


def test_destination_without_room_forms_no_pair(
    destination: Destination, sender: GroupSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_distributed, "MAX_PAIRS", 0)
    with pytest.raises(TransferFailed, match="gloo: no more than 0 pairs"):
        sender.open()
    wait_for(lambda: num_pairs() == 0)


def test_nccl_is_refused_for_pages_of_a_cpu() -> None:
    nccl = NcclTransport()
    rank = local_rank(torch.zeros((1, LAYOUT.page_bytes), dtype=torch.uint8), layout=LAYOUT)
    assert nccl.listen(rank) is None
    with contextlib.closing(GroupListener(nccl, rank, SETTINGS)) as listener:
        sender = GroupSender(nccl, rank, peer_rank("nccl", listener.address, LAYOUT), SETTINGS)
        with contextlib.closing(sender), pytest.raises(TransferFailed, match="nccl: .* not on a GPU"):
            sender.open()


def test_closing_ends_an_open_whose_peer_never_joins() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = str(server.getsockname()[1])
        settings = GroupSettings(connect_s=2.0)
        pages = torch.zeros((1, LAYOUT.page_bytes), dtype=torch.uint8)
        rank = local_rank(pages, layout=LAYOUT)
        sender = GroupSender(GLOO, rank, peer_rank("gloo", address, LAYOUT), settings)
        outcomes: list[str] = []

        def open_it() -> None:
            with pytest.raises(TransferFailed) as raised:
                sender.open()
            outcomes.append(str(raised.value))

        opening = threading.Thread(target=open_it)
        opening.start()
        sock, _ = server.accept()
        connection = Connection(sock, KEY, Role.ACCEPTING, schema=PAIR_SCHEMA).handshake()
        connection.recv(5.0)
        connection.send(msgspec.msgpack.encode(PairReply()))
        time.sleep(0.1)
        sender.close()
        opening.join(0.5)
        assert outcomes == ["gloo: the transport was closed"]
        for thread in threading.enumerate():  # torch lets the thread go when its own wait is over
            if thread.name == "gloo-join":
                thread.join(10)
        connection.close()


# The channel that carries records over gloo and payloads over NCCL. Another gloo group stands in for NCCL.

PAYLOAD_BYTES = 5000


class CpuInPlaceOfGpu:
    """The methods that NcclChannel calls of a GPU's pool. Without streams, every call has ended on return."""

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


def test_records_payloads_and_answers_arrive_in_order(channels: tuple[NcclChannel, NcclChannel]) -> None:
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


def test_abort_ends_the_waits_of_both_sides(channels: tuple[NcclChannel, NcclChannel]) -> None:
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
def test_torch_without_nccl_is_named() -> None:
    with pytest.raises(TransferFailed, match="has no NCCL"):
        join_nccl(HashStore(), SOURCE, 1.0)
