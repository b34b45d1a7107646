"""What a destination makes of a source that has met it and then says what it should not."""

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import torch

from baton.errors import TransferFailed
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.ranks.pages import packing_of
from baton.kvtransfer.ranks.receive_registration import ReceiveRegistration, ReceiveRegistrations, Writing
from baton.kvtransfer.transports import group_receiver
from baton.kvtransfer.transports.group_receiver import GroupReceiver
from baton.kvtransfer.transports.rank_pair import SOURCE, GroupSettings, PairChannel, join_pair, payload_bytes
from baton.kvtransfer.transports.rendezvous import Rendezvous, reach
from baton.kvtransfer.transports.tcp_streams import PartHeader, WriteOutcome, decode_answer, encode_header
from baton.pages import PageLayout
from baton.rpc.connection import DroppedPeers
from tests.fakes import refuse_threads
from tests.transfer_ends import wait_for

LAYOUT = PageLayout(tp_size=1, page_size=16, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")
PLAN = plan_transfer(LAYOUT, LAYOUT, 0, 0)
SETTINGS = GroupSettings(connect_s=5.0, stall_s=5.0)
TRANSFER = b"t" * 16


class Pair:
    """A destination with one landing of pages 3 and 1, and the bare channel of a source."""

    def __init__(self) -> None:
        self.pool = torch.zeros(4, PLAN.unit_bytes, dtype=torch.uint8)
        self.registrations = ReceiveRegistrations(4)
        self.dropped = DroppedPeers()
        self.written: list[tuple[int, int]] = []
        self.receiver = GroupReceiver(
            "gloo",
            self.registrations,
            self.pool,
            settings=SETTINGS,
            dropped=self.dropped,
            on_written=self._note,
        )
        self.registrations.add(
            ReceiveRegistration(id=TRANSFER, epoch=2, plan=PLAN, num_units=2, pages=(3, 1), writer=b"w" * 16)
        )
        self.meeting: Rendezvous = self.receiver.invite(PLAN, secrets.token_bytes(32))
        self.key = self.meeting.record_key
        packing = packing_of(torch.zeros(4, PLAN.unit_bytes, dtype=torch.uint8))
        with contextlib.closing(reach(self.meeting, SETTINGS.connect_s, "gloo")) as store:
            self.channel: PairChannel = join_pair("gloo", store, SOURCE, packing, PLAN, SETTINGS)

    def send(self, slot: int, record: bytes, value: int, num_bytes: int) -> None:
        self.channel.payload(slot, num_bytes).fill_(value)
        self.channel.send(slot, record, num_bytes)

    def is_dropped_for(self, reason: str) -> bool:
        deadline_s = time.monotonic() + 10
        while self.receiver.num_pairs():
            assert time.monotonic() < deadline_s, "the pair is still there"
            threading.Event().wait(0.002)
        return self.dropped.counts() == {reason: 1} and not self.pool.any()

    def _note(self, writing: Writing) -> None:
        self.written.append((writing.first, writing.stop))


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.channel.abort()
    made.receiver.close()


def header(first: int, stop: int, epoch: int = 2, num_bytes: int | None = None) -> PartHeader:
    size = (stop - first) * PLAN.unit_bytes if num_bytes is None else num_bytes
    return PartHeader(TRANSFER, epoch, first, stop, size)


def listening_ports() -> set[int]:
    """The TCP ports on which this process listens."""
    connections = psutil.Process().net_connections("tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("lacks", ["room", "thread"])
def test_invitation_that_fails_leaves_no_port_open(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    if lacks == "room":
        monkeypatch.setattr(group_receiver, "MAX_PAIRS", 1)
    else:
        refuse_threads(monkeypatch, "gloo-receive")
    before = listening_ports()
    with pytest.raises(TransferFailed):
        pair.receiver.invite(PLAN, secrets.token_bytes(32))
    wait_for(lambda: listening_ports() <= before)
    assert pair.receiver.num_pairs() == 1


def test_parts_are_answered_in_turn_and_noted(pair: Pair) -> None:
    for number, part in enumerate((header(1, 2), header(0, 1, epoch=1), header(0, 1))):
        pair.send(number, encode_header(pair.key, number, part), number + 5, part.num_bytes)
    outcomes = [decode_answer(pair.key, n, pair.channel.receive_answer(n, 5.0)) for n in range(3)]
    assert outcomes == [WriteOutcome.WRITTEN, WriteOutcome.REFUSED, WriteOutcome.WRITTEN]
    assert [int(page[0]) for page in pair.pool] == [0, 5, 0, 7]
    pair.channel.abort()
    assert pair.is_dropped_for("nothing") is False and pair.dropped.counts() == {}
    assert pair.written == [(1, 2), (0, 1)]


def test_a_record_under_another_key_ends_the_pair(pair: Pair) -> None:
    part = header(0, 1)
    pair.send(0, encode_header(b"k" * 32, 0, part), 9, part.num_bytes)
    assert pair.is_dropped_for("seal")
    with pytest.raises(TransferFailed, match="closed|reset"):
        pair.channel.receive_answer(0, 5.0)


def test_a_repeated_record_ends_the_pair(pair: Pair) -> None:
    part = header(0, 1, epoch=1)  # stale: answered, not written
    for slot in (0, 1):
        pair.send(slot, encode_header(pair.key, 0, part), 9, part.num_bytes)
    assert pair.is_dropped_for("header")


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (header(0, 3), "piece"),
        (header(1, 1, num_bytes=64), "piece"),
        (header(0, 2, num_bytes=PLAN.unit_bytes), "piece"),
        (header(0, 1, num_bytes=payload_bytes(PLAN) + 1), "length"),
        (header(0, 1, num_bytes=0), "length"),
    ],
)
def test_a_part_that_the_plan_does_not_have_ends_the_pair(pair: Pair, part: PartHeader, reason: str) -> None:
    pair.send(0, encode_header(pair.key, 0, part), 9, min(part.num_bytes, PLAN.unit_bytes))
    assert pair.is_dropped_for(reason)
