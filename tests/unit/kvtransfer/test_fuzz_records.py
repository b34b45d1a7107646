"""Damaged data streams against what reads them: the receivers of tcp and of gloo.

A peer may send whatever it likes. It is dropped and counted or found gone, nothing else is raised, no page is
written that was not granted, nobody stays inside pages, and memory has a bound.
"""

import gc
import logging
import random
import socket
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest
import torch
from torch import Tensor

from baton.clock import SystemClock
from baton.errors import PeerGone, WireError
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.ranks.pages import PageMemory
from baton.kvtransfer.ranks.receive_registration import ReceiveRegistration, ReceiveRegistrations
from baton.kvtransfer.transports.group_receiver import GroupReceiver, _Pair
from baton.kvtransfer.transports.page_socket import PageSocket
from baton.kvtransfer.transports.rank_pair import (
    FOREVER,
    GlooChannel,
    GroupSettings,
    PairChannel,
    PairGroup,
    PendingJoin,
    payload_bytes,
)
from baton.kvtransfer.transports.rendezvous import Rendezvous
from baton.kvtransfer.transports.tcp_receiver import TcpReceiver, TcpStream
from baton.kvtransfer.transports.tcp_streams import WriteOutcome, decode_answer
from baton.pages import PageLayout
from tests.unit.kvtransfer.record_mutations import (
    ANSWER,
    SEAL_BYTES,
    SentPart,
    Target,
    damaged,
    valid_parts,
)

KEY = b"k" * 32
NUM_PAGES = 12
LAYOUT = PageLayout(tp_size=1, page_size=4, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")
LARGE_PAGES = PageLayout(tp_size=1, page_size=8, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")
WHOLE = plan_transfer(LAYOUT, LAYOUT, 0, 0)
IN_RUNS = plan_transfer(LARGE_PAGES, LAYOUT, 0, 0)  # the same units in the same pages, run by run
OPEN = (
    ReceiveRegistration(id=b"a" * 16, epoch=3, plan=WHOLE, num_units=4, pages=(5, 1, 6, 2), writer=b"w" * 16),
    ReceiveRegistration(id=b"b" * 16, epoch=1, plan=IN_RUNS, num_units=3, pages=(9, 8, 3), writer=b"w" * 16),
)
ENDED = ReceiveRegistration(id=b"e" * 16, epoch=2, plan=WHOLE, num_units=1, pages=(0,), writer=b"w" * 16)
GRANTED = sorted(page for registration in OPEN for page in registration.pages)
NOT_GRANTED = [page for page in range(NUM_PAGES) if page not in GRANTED]
TARGETS = [
    *(
        Target(registration.id, registration.epoch, registration.num_units, WHOLE.unit_bytes)
        for registration in OPEN * 3
    ),
    Target(ENDED.id, ENDED.epoch, ENDED.num_units, WHOLE.unit_bytes),
    Target(b"?" * 16, 1, 2, WHOLE.unit_bytes),
]
KINDS = {"seal", "header", "length", "piece"}


class Destination:
    """A pool with some landings, and who serves one stream after the other."""

    key: bytes  # of the records

    def __init__(self) -> None:
        self.pages = torch.zeros((NUM_PAGES, LAYOUT.page_bytes), dtype=torch.uint8)
        self.registrations = ReceiveRegistrations(NUM_PAGES)
        self.num_answers: Counter[WriteOutcome] = Counter()
        self.registrations.add(ENDED)
        self.registrations.close(ENDED.id, lambda: None)
        for registration in OPEN:
            self.registrations.add(registration)

    def serve(self, parts: list[SentPart]) -> bool:
        """Whether the peer was dropped. It hangs up at the end of its parts."""
        raise NotImplementedError

    def dropped(self) -> dict[str, int]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def read_answers(self, answers: bytes) -> None:
        """Whatever was said is the answer that was due."""
        size = ANSWER.size + SEAL_BYTES
        assert len(answers) % size == 0
        for number in range(len(answers) // size):
            record = answers[number * size : (number + 1) * size]
            self.num_answers[decode_answer(self.key, number, record)] += 1

    def check(self) -> None:
        assert not self.pages[NOT_GRANTED].any(), "a page was written that nobody was granted"
        for registration in OPEN:
            self.registrations.close(registration.id, lambda: None)
            assert not self.registrations.is_written(registration.id), (
                "a writer that is gone is still inside the pages"
            )
            self.registrations.reopen(registration)


def what_waits_at(sock: socket.socket) -> bytes:
    try:
        return sock.recv(2**16, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b""


class TcpDestination(Destination):
    def __init__(self) -> None:
        super().__init__()
        self.key = KEY
        self.receiver = TcpReceiver(self.registrations, PageMemory.of(self.pages), KEY)

    def serve(self, parts: list[SentPart]) -> bool:
        ours, theirs = socket.socketpair()
        end = PageSocket(ours, SystemClock(), stall_s=5.0, limit_s=10.0)
        with theirs:
            theirs.sendall(b"".join(record + body for record, body in parts))
            theirs.shutdown(socket.SHUT_WR)
            is_dropped = self._read(TcpStream(self.receiver, end, self.key))
            self.read_answers(what_waits_at(theirs))
            end.close()
        return is_dropped

    def dropped(self) -> dict[str, int]:
        return dict(self.receiver.dropped.counts())

    def close(self) -> None:
        self.receiver.close()

    def _read(self, stream: TcpStream) -> bool:
        try:
            stream.run()
        except WireError:
            return True
        except PeerGone:
            return False
        return False


class Received(PendingJoin):
    """A receive that ends when it is waited for."""

    def __init__(self, messages: Iterator[bytes], tensor: Tensor) -> None:
        self._messages = messages
        self._tensor = tensor

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        message = next(self._messages, None)
        if message is None:
            raise RuntimeError("Connection closed by peer")
        room = self._tensor.numpy().data
        room[: len(message)] = message[: len(room)]
        return True


class ScriptedGroup(PairGroup):
    """A group of two whose other rank has sent all its messages already."""

    def __init__(self) -> None:
        self.messages: Iterator[bytes] = iter(())
        self.answers = b""

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> PendingJoin:
        self.answers += tensors[0].numpy().tobytes()
        return Received(iter([b""]), tensors[0])

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> PendingJoin:
        return Received(self.messages, tensors[0])

    def abort(self) -> None:
        self.messages = iter(())


class _ScriptedPair(_Pair):
    channel: GlooChannel

    def _join(self) -> PairChannel:
        return self.channel


class GroupDestination(Destination):
    def __init__(self) -> None:
        super().__init__()
        self.receiver = GroupReceiver("gloo", self.registrations, self.pages, settings=GroupSettings())
        self._meeting = Rendezvous(host="127.0.0.1", port=1, secret=b"s" * 32)
        self.key = self._meeting.record_key
        self._group = ScriptedGroup()
        self._channel = GlooChannel(
            self._group, 1, payload_bytes(WHOLE)
        )  # its staging memory serves them all

    def serve(self, parts: list[SentPart]) -> bool:
        num_before = sum(self.dropped().values())
        self._group.messages = iter([record + body for record, body in parts])
        self._group.answers = b""
        pair = _ScriptedPair(self.receiver, WHOLE, self._meeting)
        pair.channel = self._channel
        pair._run()
        self.read_answers(self._group.answers)
        return sum(self.dropped().values()) > num_before

    def dropped(self) -> dict[str, int]:
        return dict(self.receiver.dropped.counts())

    def close(self) -> None:
        self.receiver.close()


@pytest.fixture(params=[TcpDestination, GroupDestination], ids=["tcp", "gloo"])
def destination(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Destination]:
    caplog.set_level(logging.CRITICAL)  # a line for each dropped peer would be kept, and counted as ours
    made: Destination = request.param()
    yield made
    made.close()


def fuzz(destination: Destination, seed: int, num_records: int) -> int:
    """How many peers were dropped."""
    rng, num_dropped = random.Random(seed), 0
    while num_records > 0:
        parts = damaged(rng, destination.key, valid_parts(rng, destination.key, TARGETS))
        num_records -= len(parts)
        num_dropped += destination.serve(parts)
        if rng.randrange(100) == 0:
            destination.check()
    destination.check()
    return num_dropped


def check(destination: Destination, num_dropped: int) -> None:
    counts = destination.dropped()
    assert sum(counts.values()) == num_dropped > 0
    assert set(counts) == KINDS
    # Not by refusing all: pieces were written, and each way of refusing one was taken.
    counters = destination.registrations.counters
    assert min(counters.num_pieces, counters.num_stale, counters.num_unknown, counters.num_malformed) > 0
    assert min(destination.num_answers[outcome] for outcome in WriteOutcome) > 0
    assert destination.pages[GRANTED].any()


def test_ten_thousand_damaged_records_crash_and_write_nothing_else(destination: Destination) -> None:
    check(destination, fuzz(destination, 1, 10_000))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_damaged_records_crash_and_write_nothing_else(destination: Destination) -> None:
    process = psutil.Process()
    fuzz(destination, 2, 20_000)
    gc.collect()
    before = process.memory_info().rss
    num_dropped = sum(destination.dropped().values())
    check(destination, num_dropped + fuzz(destination, 3, 1_000_000))
    gc.collect()
    assert process.memory_info().rss - before < 32 << 20
