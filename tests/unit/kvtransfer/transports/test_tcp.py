"""The source of the tcp transport, against destinations that misbehave."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import pytest
import torch

from baton.errors import ConfigError, TransferFailed
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.ranks.pages import PageMemory
from baton.kvtransfer.ranks.receive_registration import ReceiveRegistration, ReceiveRegistrations, Writing
from baton.kvtransfer.transports.base import OutgoingTransfer, Piece, TransferStatus
from baton.kvtransfer.transports.page_socket import SLICE_S
from baton.kvtransfer.transports.tcp import TcpSettings, TcpTransport
from baton.kvtransfer.transports.tcp_receiver import TcpReceiver
from baton.kvtransfer.transports.tcp_streams import (
    ANSWER_BYTES,
    HEADER_BYTES,
    WriteOutcome,
    encode_answer,
    stream_key,
)
from baton.pages import PageLayout
from baton.rpc.connection import Connection, Role
from tests.transfer_ends import outcome, wait_for

KEY = b"the key of the tests' cluster"
LAYOUT = PageLayout(tp_size=1, page_size=16, num_layers=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
PLAN = plan_transfer(LAYOUT, LAYOUT, 0, 0)
SETTINGS = TcpSettings(num_streams=1, connect_s=5.0, stall_s=1.0, part_s=10.0)
NUM_PAGES = 40  # of 1 MiB: more than the buffers between two sockets hold
Answering = Callable[[socket.socket, bytes], None]  # (stream, its key)


class BadDestination:
    """Accepts one stream and treats it as it was told."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        connection = Connection(sock, KEY, Role.ACCEPTING).handshake()
        stream = connection.detach()
        stream.setblocking(True)
        with stream:
            self._answering(stream, stream_key(connection.session_key))

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


def piece(num_units: int = 2, transfer: bytes = b"a" * 16) -> Piece:
    pages = tuple(range(num_units))
    outgoing = OutgoingTransfer(
        id=transfer,
        epoch=1,
        plan=PLAN,
        source_pages=pages,
        destination_pages=pages,
        destination_generations=pages,
    )
    return Piece(outgoing, 0, num_units)


@pytest.fixture(scope="module")
def memory() -> PageMemory:
    return PageMemory.of(torch.ones((NUM_PAGES, LAYOUT.page_bytes), dtype=torch.uint8))


def receive_part(stream: socket.socket) -> None:
    stream.recv(2 * PLAN.unit_bytes, socket.MSG_WAITALL)


def answer_noise(stream: socket.socket, _: bytes) -> None:
    receive_part(stream)
    stream.sendall(b"\7" * ANSWER_BYTES)
    stream.recv(1)


def answer_out_of_turn(stream: socket.socket, key: bytes) -> None:
    receive_part(stream)
    stream.sendall(encode_answer(key, 1, WriteOutcome.WRITTEN))
    stream.recv(1)


def hang_up(stream: socket.socket, _: bytes) -> None:
    receive_part(stream)


def say_nothing(stream: socket.socket, _: bytes) -> None:
    while stream.recv(2**20):
        pass


@pytest.mark.parametrize("answering", [answer_noise, answer_out_of_turn, hang_up, say_nothing])
def test_a_destination_that_breaks_the_rules_fails_the_transport_in_time(
    memory: PageMemory, answering: Answering
) -> None:
    destination = BadDestination(answering)
    transport = TcpTransport(destination.address, KEY, memory, settings=SETTINGS)
    transport.open()
    started_s = time.monotonic()
    progress = outcome(transport, transport.push(piece()))
    assert progress.status == TransferStatus.FAILED and progress.reason.startswith("tcp: ")
    assert time.monotonic() - started_s < SETTINGS.stall_s + 5.0
    wait_for(lambda: transport.is_broken)
    assert outcome(transport, transport.push(piece())).status == TransferStatus.FAILED
    transport.close()
    transport.close()
    destination.close()


def test_a_refusal_fails_its_ticket_alone(memory: PageMemory) -> None:
    def refuse_once(stream: socket.socket, key: bytes) -> None:
        for number, said in enumerate((WriteOutcome.REFUSED, WriteOutcome.WRITTEN)):
            stream.recv(2 * PLAN.unit_bytes + HEADER_BYTES, socket.MSG_WAITALL)
            stream.sendall(encode_answer(key, number, said))
        stream.recv(1)

    destination = BadDestination(refuse_once)
    transport = TcpTransport(destination.address, KEY, memory, settings=SETTINGS)
    transport.open()
    first, second = transport.push(piece()), transport.push(piece())
    assert outcome(transport, first).status == TransferStatus.FAILED
    assert outcome(transport, second).status == TransferStatus.DONE
    assert not transport.is_broken
    transport.close()
    destination.close()


def test_pages_out_of_the_pool_are_refused_when_pushed(memory: PageMemory) -> None:
    transport = TcpTransport(("127.0.0.1", 1), KEY, memory)
    with pytest.raises(ValueError, match="40 pages"):
        transport.push(piece(NUM_PAGES + 1))


def test_a_page_larger_than_a_stream_takes_is_named(memory: PageMemory) -> None:
    layout = msgspec.structs.replace(LAYOUT, page_size=2048)
    transfer = msgspec.structs.replace(piece(1).transfer, plan=plan_transfer(layout, layout, 0, 0))
    transport = TcpTransport(("127.0.0.1", 1), KEY, memory)
    with pytest.raises(ConfigError, match="page_size"):
        transport.push(Piece(transfer, 0, 1))


def test_a_name_that_nobody_has_cannot_be_opened(memory: PageMemory) -> None:
    transport = TcpTransport(("nobody.invalid", 1), KEY, memory, settings=SETTINGS)
    with pytest.raises(TransferFailed, match=r"nobody\.invalid"):
        transport.open()
    transport.close()


class Held:
    """A receiver whose stream stands still after its first part, until `go` is set."""

    def __init__(self) -> None:
        self.pages = torch.zeros((NUM_PAGES, LAYOUT.page_bytes), dtype=torch.uint8)
        self.registrations = ReceiveRegistrations(NUM_PAGES)
        self.go = threading.Event()
        self.receiver = TcpReceiver(
            self.registrations,
            PageMemory.of(self.pages),
            KEY,
            settings=SETTINGS,
            on_written=self._hold_once,
        )
        self._has_held = False

    def _hold_once(self, _: Writing) -> None:
        if not self._has_held:
            self._has_held = True
            self.go.wait(10.0)

    def grant(self, granted: Piece) -> Piece:
        transfer = granted.transfer
        self.registrations.add(
            ReceiveRegistration(
                id=transfer.id,
                epoch=1,
                plan=PLAN,
                num_units=granted.stop,
                pages=transfer.destination_pages,
                writer=b"w" * 16,
            )
        )
        return granted


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.go.set()
    made.receiver.close()


def test_an_abort_in_the_middle_of_a_part_costs_others_nothing_but_time(
    memory: PageMemory, held: Held
) -> None:
    settings = TcpSettings(num_streams=1, connect_s=2.0, stall_s=8.0, part_s=10.0)
    transport = TcpTransport(held.receiver.address, KEY, memory, settings=settings)
    transport.open()
    blocking = held.grant(piece(1))
    large = held.grant(piece(NUM_PAGES, b"b" * 16))
    small = held.grant(piece(3, b"c" * 16))
    transfer_queue = [transport.push(each) for each in (blocking, large, small)]
    wait_for(lambda: transport.poll(transfer_queue[1]).status == TransferStatus.SENDING)
    time.sleep(0.05)  # until the buffers are full
    started_s = time.monotonic()
    transport.abort(large.transfer.id)
    assert time.monotonic() - started_s < SLICE_S / 2
    assert outcome(transport, transfer_queue[0]).status == TransferStatus.DONE
    assert outcome(transport, transfer_queue[2]).status == TransferStatus.DONE
    assert transport.poll(transfer_queue[1]).status == TransferStatus.FAILED
    assert bool(held.pages[:3].all()) and not transport.is_broken
    transport.close()


def is_sending(transport: TcpTransport, handle: int) -> bool:
    return transport.poll(handle).status == TransferStatus.SENDING


def test_no_number_of_aborts_costs_another_transfer_its_pages(memory: PageMemory) -> None:
    num_aborts = 5
    settings = TcpSettings(num_streams=1, connect_s=2.0, stall_s=8.0, part_s=10.0)
    listener = socket.create_server(("127.0.0.1", 0))
    streams: list[socket.socket] = []

    def serve() -> None:
        while len(streams) <= num_aborts:
            connection = Connection(listener.accept()[0], KEY, Role.ACCEPTING).handshake()
            streams.append(connection.detach())
        streams[-1].setblocking(True)
        streams[-1].recv(HEADER_BYTES + PLAN.unit_bytes, socket.MSG_WAITALL)
        streams[-1].sendall(encode_answer(stream_key(connection.session_key), 0, WriteOutcome.WRITTEN))

    thread = threading.Thread(target=serve)
    thread.start()
    transport = TcpTransport(listener.getsockname()[:2], KEY, memory, settings=settings)
    innocent = transport.push(piece(1))
    aborted = [piece(NUM_PAGES, bytes([number]) * 16) for number in range(num_aborts)]
    transfer_queue = [transport.push(each) for each in aborted]
    transport.open()
    for number, handle in enumerate(transfer_queue):
        wait_for(partial(is_sending, transport, handle))
        time.sleep(0.05)
        transport.abort(aborted[number].transfer.id)
        while len(streams) < number + 2:
            time.sleep(0.001)
    assert outcome(transport, innocent).status == TransferStatus.DONE
    thread.join()
    transport.close()
    for end in (listener, *streams):
        end.close()


def test_closing_ends_an_open_that_waits(memory: PageMemory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        transport = TcpTransport(silent.getsockname()[:2], KEY, memory, settings=SETTINGS)
        failures = []

        def open_it() -> None:
            try:
                transport.open()
            except TransferFailed as error:
                failures.append(error)

        opening = threading.Thread(target=open_it)
        opening.start()
        time.sleep(0.1)
        started_s = time.monotonic()
        transport.close()
        opening.join()
        assert time.monotonic() - started_s < 0.5 and len(failures) == 1
