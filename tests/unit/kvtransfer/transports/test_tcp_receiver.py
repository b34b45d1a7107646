"""What a peer can do to the pages, with the key and without it: nothing that was not granted."""

import random
import socket
import time
from collections.abc import Iterator

import pytest
import torch

from baton.clock import SystemClock
from baton.errors import PeerGone
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.ranks.pages import PageMemory
from baton.kvtransfer.ranks.receive_registration import ReceiveRegistration, ReceiveRegistrations
from baton.kvtransfer.transports.listener import MAX_NEWCOMERS
from baton.kvtransfer.transports.page_socket import PageSocket
from baton.kvtransfer.transports.tcp import TcpSettings
from baton.kvtransfer.transports.tcp_receiver import TcpReceiver
from baton.kvtransfer.transports.tcp_streams import (
    ANSWER_BYTES,
    HEADER_BYTES,
    PartHeader,
    WriteOutcome,
    decode_answer,
    encode_header,
    stream_key,
)
from baton.pages import PageLayout
from baton.rpc.connection import Connection, Role
from tests.transfer_ends import wait_for

KEY = b"the key of the tests' cluster"
LAYOUT = PageLayout(tp_size=1, page_size=4, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")
PLAN = plan_transfer(LAYOUT, LAYOUT, 0, 0)
UNIT = PLAN.unit_bytes
ID, STALE = b"a" * 16, b"s" * 16
SETTINGS = TcpSettings(connect_s=1.0, stall_s=1.5, part_s=10.0)


class Stream:
    """A stream that a test speaks by hand."""

    def __init__(self, receiver: TcpReceiver) -> None:
        connection = Connection(socket.create_connection(receiver.address), KEY, Role.CONNECTING)
        connection.handshake()
        self.key = stream_key(connection.session_key)
        self.socket = PageSocket(connection.detach(), SystemClock(), stall_s=5.0, limit_s=10.0)
        self.num_sent = self.num_answered = 0

    def send(self, header: PartHeader, body: bytes) -> None:
        self.socket.send_record(encode_header(self.key, self.num_sent, header) + body)
        self.num_sent += 1

    def answer(self) -> WriteOutcome:
        record = self.socket.receive_record(ANSWER_BYTES)
        self.num_answered += 1
        return decode_answer(self.key, self.num_answered - 1, record)

    def is_dropped(self) -> bool:
        try:
            return self.socket.next_record(ANSWER_BYTES) is None
        except PeerGone:
            return True


class Receiver:
    def __init__(self) -> None:
        self.pages = torch.zeros((8, LAYOUT.page_bytes), dtype=torch.uint8)
        self.registrations = ReceiveRegistrations(8)
        self.written: list[tuple[int, int]] = []
        self.tcp = TcpReceiver(
            self.registrations,
            PageMemory.of(self.pages),
            KEY,
            settings=SETTINGS,
            on_written=lambda writing: self.written.append((writing.first, writing.stop)),
        )
        registration = ReceiveRegistration(
            id=ID, epoch=3, plan=PLAN, num_units=4, pages=(5, 1, 6, 2), writer=b"w" * 16
        )
        self.registrations.add(registration)

    def dropped(self) -> dict[str, int]:
        return dict(self.tcp.dropped.counts())


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.tcp.close()
    assert made.tcp.num_streams() == 0


def header(first: int = 0, stop: int = 1, *, transfer: bytes = ID, epoch: int = 3) -> PartHeader:
    return PartHeader(transfer, epoch, first, stop, (stop - first) * UNIT)


def test_units_land_where_the_landing_says(receiver: Receiver) -> None:
    stream = Stream(receiver.tcp)
    stream.send(header(1, 3), b"\1" * UNIT + b"\2" * UNIT)
    stream.send(header(3, 4), b"\3" * UNIT)
    assert [stream.answer(), stream.answer()] == [WriteOutcome.WRITTEN] * 2
    assert receiver.pages[:, 0].tolist() == [0, 1, 3, 0, 0, 0, 2, 0]
    assert bool((receiver.pages == receiver.pages[:, :1]).all())
    wait_for(lambda: receiver.written == [(1, 3), (3, 4)])
    stream.socket.close()


@pytest.mark.parametrize("refused", [header(transfer=STALE), header(epoch=2), header(epoch=4)])
def test_what_was_not_granted_is_drained_and_the_stream_goes_on(
    receiver: Receiver, refused: PartHeader
) -> None:
    stream = Stream(receiver.tcp)
    stream.send(refused, b"\xff" * UNIT)
    assert stream.answer() == WriteOutcome.REFUSED and not receiver.pages.any()
    stream.send(header(), b"\1" * UNIT)
    assert stream.answer() == WriteOutcome.WRITTEN and int((receiver.pages == 1).sum()) == UNIT
    stream.socket.close()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (PartHeader(ID, 3, 0, 2, UNIT), "piece"),
        (PartHeader(ID, 3, 0, 1, UNIT - 1), "piece"),
        (PartHeader(ID, 3, 3, 5, 2 * UNIT), "piece"),
        (PartHeader(ID, 3, 2, 1, UNIT), "piece"),
        (PartHeader(ID, 3, 0, 1, 2**62), "length"),
    ],
)
def test_a_header_that_cannot_be_drops_its_stream_and_no_other(
    receiver: Receiver, wrong: PartHeader, reason: str
) -> None:
    good, bad = Stream(receiver.tcp), Stream(receiver.tcp)
    bad.send(wrong, b"\xff" * 64)
    assert bad.is_dropped() and not receiver.pages.any()
    wait_for(lambda: receiver.dropped() == {reason: 1})
    good.send(header(), b"\1" * UNIT)
    assert good.answer() == WriteOutcome.WRITTEN
    for stream in (good, bad):
        stream.socket.close()


def test_a_repeated_header_drops_its_stream(receiver: Receiver) -> None:
    stream = Stream(receiver.tcp)
    stream.send(header(), b"\1" * UNIT)
    assert stream.answer() == WriteOutcome.WRITTEN
    stream.num_sent = 0
    receiver.pages.zero_()
    stream.send(header(), b"\xff" * UNIT)
    assert stream.is_dropped() and not receiver.pages.any()
    assert receiver.dropped() == {"header": 1}
    stream.socket.close()


def test_bytes_that_stop_coming_end_the_stream_and_the_write(receiver: Receiver) -> None:
    stream = Stream(receiver.tcp)
    stream.send(header(0, 4), b"\1" * UNIT)
    started_s = time.monotonic()
    assert stream.is_dropped()
    assert SETTINGS.stall_s < time.monotonic() - started_s < SETTINGS.stall_s + 5.0
    safe: list[int] = []
    receiver.registrations.close(ID, lambda: safe.append(1))
    wait_for(lambda: safe == [1], 1.0)
    assert receiver.registrations.counters.num_broken == 1
    stream.socket.close()


def test_pages_are_left_at_once_when_their_landing_is_closed(receiver: Receiver) -> None:
    stream = Stream(receiver.tcp)
    stream.send(header(0, 4), b"\1" * UNIT)
    wait_for(lambda: bool(receiver.pages[5].all()))
    safe: list[int] = []
    receiver.registrations.close(ID, lambda: safe.append(1))
    wait_for(lambda: safe == [1])
    receiver.pages.zero_()
    stream.socket.send_record(b"\xff" * (3 * UNIT))
    # The stream lives: it was not the source's silence that ended the write.
    assert stream.answer() == WriteOutcome.REFUSED and not receiver.pages.any()
    stream.socket.close()


def test_who_does_not_prove_himself_is_put_out(receiver: Receiver) -> None:
    with socket.create_connection(receiver.tcp.address) as silent:
        silent.settimeout(5.0)
        started_s = time.monotonic()
        assert silent.recv(100) == b""
        assert time.monotonic() - started_s < SETTINGS.connect_s + 5.0
    with socket.create_connection(receiver.tcp.address) as loud:
        loud.sendall(encode_header(KEY, 0, header()) + b"\xff" * UNIT)
        loud.settimeout(5.0)
        with pytest.raises((ConnectionError, StopIteration)):
            while loud.recv(100):
                pass
            raise StopIteration
    assert not receiver.pages.any()
    wait_for(lambda: sum(receiver.dropped().values()) == 2)


def test_silent_strangers_keep_no_stream_out(receiver: Receiver) -> None:
    silent = [socket.create_connection(receiver.tcp.address) for _ in range(3 * MAX_NEWCOMERS)]
    wait_for(lambda: receiver.dropped().get("crowd", 0) >= MAX_NEWCOMERS)
    stream = Stream(receiver.tcp)
    stream.send(header(), b"\1" * UNIT)
    assert stream.answer() == WriteOutcome.WRITTEN
    stream.socket.close()
    for sock in silent:
        sock.close()


def test_damaged_headers_never_touch_a_page(receiver: Receiver) -> None:
    choose = random.Random(1)
    for _ in range(60):
        stream = Stream(receiver.tcp)
        record = bytearray(encode_header(stream.key, 0, header()))
        for _ in range(choose.randint(1, 4)):
            record[choose.randrange(HEADER_BYTES)] ^= choose.randint(1, 255)
        stream.socket.send_record(bytes(record) + b"\xff" * UNIT)
        assert stream.is_dropped()
        stream.socket.close()
    assert not receiver.pages.any()
    wait_for(lambda: sum(receiver.dropped().values()) == 60)
    wait_for(lambda: receiver.tcp.num_streams() == 0)
