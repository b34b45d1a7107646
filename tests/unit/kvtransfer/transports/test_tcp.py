"""The two ends of the tcp transport, each against a peer that breaks the rules."""

import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch

from baton.clock import SystemClock
from baton.errors import ConfigError, PeerGone, TransferFailed
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.transports import page_socket
from baton.kvtransfer.transports.base import LocalRank, Piece
from baton.kvtransfer.transports.page_socket import PageSocket
from baton.kvtransfer.transports.receive_registration import ReceiveRegistrations, Writing
from baton.kvtransfer.transports.records import (
    ANSWER_BYTES,
    PartHeader,
    WriteOutcome,
    decode_answers,
    encode_answers,
    encode_headers,
    stream_key,
)
from baton.kvtransfer.transports.tcp import TcpReceiver, TcpSender, TcpSettings
from baton.rpc.auth import Role
from baton.rpc.connection import Connection
from baton.rpc.listener import port_of
from tests.layouts import a_layout
from tests.transfer_ends import PAGE_KEYS, Push, local_rank, piece_of, registration_of
from tests.waiting import wait_for

LAYOUT = a_layout(num_layers=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
PLAN = plan_transfer(LAYOUT, LAYOUT, 0, 0)
SETTINGS = TcpSettings(num_streams=1, connect_s=5.0, stall_s=1.0, part_s=10.0)
PATIENT = TcpSettings(num_streams=1, connect_s=2.0, stall_s=8.0, part_s=10.0)
NUM_PAGES = 40  # of 1 MiB: more than the buffers between two sockets hold
Answering = Callable[[socket.socket, bytes], None]  # (stream, its key)


def piece(num_units: int = 2, transfer: bytes = b"a" * 16) -> Piece:
    return piece_of(PLAN, tuple(range(num_units)), transfer=transfer)


@pytest.fixture(scope="module")
def source() -> LocalRank:
    return local_rank(torch.ones((NUM_PAGES, LAYOUT.page_bytes), dtype=torch.uint8))


class BadDestination:
    """Accepts streams and answers each as the test says."""

    def __init__(self, *answering: Answering) -> None:
        self._answering = answering
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.num_streams = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        for answer in self._answering:
            sock, _ = self._listener.accept()
            connection = Connection(sock, PAGE_KEYS, Role.ACCEPTING).handshake()
            stream = connection.detach()
            stream.setblocking(True)
            self.num_streams += 1
            with stream:
                answer(stream, stream_key(connection.session_key))

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


def receive_part(stream: socket.socket) -> None:
    stream.recv(2 * PLAN.sent_unit_bytes, socket.MSG_WAITALL)


def answer_noise(stream: socket.socket, _: bytes) -> None:
    receive_part(stream)
    stream.sendall(b"\7" * ANSWER_BYTES)
    stream.recv(1)


def answer_out_of_turn(stream: socket.socket, key: bytes) -> None:
    receive_part(stream)
    stream.sendall(encode_answers(key, 1, [WriteOutcome.WRITTEN]))
    stream.recv(1)


def hang_up(stream: socket.socket, _: bytes) -> None:
    receive_part(stream)


def say_nothing(stream: socket.socket, _: bytes) -> None:
    while stream.recv(2**20):
        pass


def open_sender(source: LocalRank, address: tuple[str, int], settings: TcpSettings = SETTINGS) -> TcpSender:
    sender = TcpSender(source, address, settings)
    sender.open()
    return sender


@pytest.mark.parametrize("answering", [answer_noise, answer_out_of_turn, hang_up, say_nothing])
def test_destination_that_breaks_the_rules_breaks_the_sender_in_time(
    source: LocalRank, answering: Answering
) -> None:
    destination = BadDestination(answering)
    sender = open_sender(source, destination.address)
    started_s = time.monotonic()
    outcome = Push(sender, piece()).outcome()
    assert not outcome.is_done and outcome.reason.startswith("tcp: ")
    assert time.monotonic() - started_s < SETTINGS.stall_s + 5.0
    wait_for(lambda: sender.is_broken)
    assert not Push(sender, piece()).outcome().is_done
    sender.close()
    sender.close()
    destination.close()


def test_sender_refuses_pages_that_it_cannot_move(source: LocalRank) -> None:
    sender = TcpSender(source, ("127.0.0.1", 1))
    with pytest.raises(ValueError, match="40 pages"):
        Push(sender, piece(NUM_PAGES + 1))
    layout = msgspec.structs.replace(LAYOUT, page_size=2048)
    large = msgspec.structs.replace(piece(1), plan=plan_transfer(layout, layout, 0, 0))
    with pytest.raises(ConfigError, match="page_size"):
        Push(sender, large)


def test_address_that_is_none_is_refused(source: LocalRank) -> None:
    sender = TcpSender(source, ("nobody.invalid", 1), SETTINGS)
    with pytest.raises(TransferFailed, match=r"nobody\.invalid"):
        sender.open()
    sender.close()
    for text in ("", "x", "-1", "0", "65536", "1.5"):
        with pytest.raises(TransferFailed, match="TCP port"):
            port_of(text)


class HoldingRegistrations(ReceiveRegistrations):
    """The stream that has written the first part stands still until `go` is set."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.go = threading.Event()
        self._has_held = False

    def end(self, writing: Writing, *, is_whole: bool) -> None:
        super().end(writing, is_whole=is_whole)
        if not self._has_held:
            self._has_held = True
            self.go.wait(10.0)


def test_abort_in_the_middle_of_a_part_costs_other_transfers_nothing_but_time(
    source: LocalRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_socket, "SLICE_S", 2.0)  # an abort that only waits for a slice takes so long
    pages = torch.zeros((NUM_PAGES, LAYOUT.page_bytes), dtype=torch.uint8)
    rank = local_rank(pages)
    rank.registrations = held = HoldingRegistrations(NUM_PAGES)
    receiver = TcpReceiver(rank, settings=SETTINGS)
    pieces = [piece(1), piece(NUM_PAGES, b"b" * 16), piece(3, b"c" * 16)]
    for each in pieces:
        held.add(registration_of(each))
    sender = open_sender(source, ("127.0.0.1", int(receiver.address)), PATIENT)
    blocking, large, small = [Push(sender, each) for each in pieces]
    time.sleep(0.1)  # until the buffers are full
    started_s = time.monotonic()
    sender.abort(pieces[1].transfer)
    assert time.monotonic() - started_s < 1.0
    assert blocking.outcome().is_done and small.outcome().is_done and not large.outcome().is_done
    assert bool(pages[:3].all()) and not sender.is_broken
    held.go.set()
    sender.close()
    receiver.close()


def test_closing_ends_an_open_that_waits(source: LocalRank) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sender = TcpSender(source, silent.getsockname()[:2], SETTINGS)
        failures = []

        def open_it() -> None:
            try:
                sender.open()
            except TransferFailed as error:
                failures.append(error)

        opening = threading.Thread(target=open_it)
        opening.start()
        time.sleep(0.1)
        started_s = time.monotonic()
        sender.close()
        opening.join()
        assert time.monotonic() - started_s < 0.5 and len(failures) == 1


# The receiver, against streams that a test writes by hand. Damaged records: test_fuzz_records.py.

SMALL = a_layout(page_size=4)
SMALL_PLAN = plan_transfer(SMALL, SMALL, 0, 0)
UNIT = SMALL_PLAN.sent_unit_bytes
ID = b"a" * 16
STRICT = TcpSettings(connect_s=1.0, stall_s=1.5, part_s=10.0)


class Stream:
    """A stream to a receiver."""

    def __init__(self, receiver: TcpReceiver) -> None:
        sock = socket.create_connection(("127.0.0.1", int(receiver.address)))
        connection = Connection(sock, PAGE_KEYS, Role.CONNECTING).handshake()
        self.key = stream_key(connection.session_key)
        self.socket = PageSocket(connection.detach(), SystemClock(), stall_s=5.0, limit_s=10.0)
        self.num_sent = self.num_answered = 0

    def send(self, header: PartHeader, body: bytes) -> None:
        self.socket.send_record(encode_headers(self.key, self.num_sent, [header]) + body)
        self.num_sent += 1

    def answer(self) -> WriteOutcome:
        record = self.socket.receive_record(ANSWER_BYTES)
        self.num_answered += 1
        (outcome,) = decode_answers(self.key, self.num_answered - 1, record, 1)
        return outcome

    def is_dropped(self) -> bool:
        try:
            return self.socket.next_record(ANSWER_BYTES) is None
        except PeerGone:
            return True


class Receiver:
    """A receiver with one registration: units 0 to 3 in pages 5, 1, 6, 2."""

    def __init__(self) -> None:
        self.pages = torch.zeros((8, SMALL.page_bytes), dtype=torch.uint8)
        self.rank = local_rank(self.pages)
        self.registrations = self.rank.registrations
        self.tcp = TcpReceiver(self.rank, settings=STRICT)
        self.registrations.add(registration_of(piece_of(SMALL_PLAN, (5, 1, 6, 2), transfer=ID)))

    def dropped(self) -> dict[str, int]:
        return dict(self.rank.dropped.counts())


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    threads = set(threading.enumerate())
    made = Receiver()
    yield made
    made.tcp.close()
    assert set(threading.enumerate()) <= threads


def header(first: int = 0, stop: int = 1, *, transfer: bytes = ID, epoch: int = 1) -> PartHeader:
    return PartHeader(transfer, epoch, first, stop, (stop - first) * UNIT)


def test_bytes_that_stop_coming_end_the_stream_and_the_write(receiver: Receiver) -> None:
    stream = Stream(receiver.tcp)
    stream.send(header(0, 4), b"\1" * UNIT)
    started_s = time.monotonic()
    assert stream.is_dropped()
    assert STRICT.stall_s < time.monotonic() - started_s < STRICT.stall_s + 5.0
    safe: list[int] = []
    receiver.registrations.close(ID, lambda: safe.append(1))
    wait_for(lambda: safe == [1], 1.0)
    assert receiver.registrations.counts()["broken_pieces"] == 1
    stream.socket.close()


def test_pages_are_left_at_once_when_their_registration_closes(receiver: Receiver) -> None:
    stream = Stream(receiver.tcp)
    stream.send(header(0, 4), b"\1" * UNIT)
    wait_for(lambda: bool(receiver.pages[5].all()))
    safe: list[int] = []
    receiver.registrations.close(ID, lambda: safe.append(1))
    wait_for(lambda: safe == [1])
    receiver.pages.zero_()
    stream.socket.send_record(b"\xff" * (3 * UNIT))
    # The stream lives: the source's silence has not ended the write.
    assert stream.answer() == WriteOutcome.REFUSED and not receiver.pages.any()
    stream.socket.close()
