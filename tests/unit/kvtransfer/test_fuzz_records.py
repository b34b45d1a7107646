"""Damaged data streams against the two receivers, of tcp and of gloo.

A peer may send anything. The peer is dropped and counted, or found gone; nothing else is raised. No page is
written without a grant, no writer stays inside pages, and memory has a bound.
"""

import contextlib
import logging
import random
import socket
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import Tensor

from baton.clock import SystemClock
from baton.errors import PeerGone, WireError
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.transports.page_socket import PageSocket
from baton.kvtransfer.transports.rank_pair import (
    FOREVER,
    PAYLOAD_TAG,
    RECORD_TAG,
    SOURCE,
    GlooChannel,
    PairGroup,
    Work,
    part_size,
    staging,
)
from baton.kvtransfer.transports.receive_registration import ReceiveRegistration
from baton.kvtransfer.transports.records import (
    BATCH_ANSWER_BYTES,
    BATCH_BYTES,
    MAX_BATCH,
    WriteOutcome,
    decode_answers,
    stream_key,
)
from baton.kvtransfer.transports.tcp import ReceiveStream, StreamPages
from baton.kvtransfer.transports.torch_distributed import GlooTransport, GroupSettings, ReceivePair
from baton.rpc.connection import Connection
from tests.flat_memory import memory_stays_flat
from tests.layouts import a_layout
from tests.transfer_ends import local_rank
from tests.unit.kvtransfer.record_mutations import (
    ANSWER,
    OPENING,
    SEAL_BYTES,
    SentPart,
    Target,
    damaged,
    valid_parts,
)

KEY = stream_key(b"session")
NUM_PAGES = 12
LAYOUT = a_layout(page_size=4)
LARGE_PAGES = a_layout(page_size=8)
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
        Target(registration.id, registration.epoch, registration.num_units, WHOLE.sent_unit_bytes)
        for registration in OPEN * 3
    ),
    Target(ENDED.id, ENDED.epoch, ENDED.num_units, WHOLE.sent_unit_bytes),
    Target(b"?" * 16, 1, 2, WHOLE.sent_unit_bytes),
]
KINDS = {"seal", "header", "length", "piece"}


class Destination:
    """A rank with some registrations, whose receiver serves one stream after the other."""

    max_batch = 1  # parts of a record
    answer_bytes = ANSWER.size + SEAL_BYTES  # of a record of answers

    def __init__(self) -> None:
        self.pages = torch.zeros((NUM_PAGES, LAYOUT.page_bytes), dtype=torch.uint8)
        self.rank = local_rank(self.pages, layout=LAYOUT)
        self.registrations = self.rank.registrations
        self.num_answers: Counter[WriteOutcome] = Counter()
        self.registrations.add(ENDED)
        self.registrations.close(ENDED.id, lambda: None)
        for registration in OPEN:
            self.registrations.add(registration)

    def serve(self, parts: list[SentPart]) -> bytes:
        """Receive the parts of a source that hangs up then; the answers."""
        raise NotImplementedError

    def read_answers(self, answers: bytes) -> None:
        """Every answer is the one that was due."""
        assert len(answers) % self.answer_bytes == 0
        number = 0
        for first in range(0, len(answers), self.answer_bytes):
            record = answers[first : first + self.answer_bytes]
            num_parts = OPENING.unpack_from(record)[-1]
            self.num_answers.update(decode_answers(KEY, number, record, num_parts))
            number += num_parts

    def check(self) -> None:
        assert not self.pages[NOT_GRANTED].any(), "a page was written without a grant"
        for registration in OPEN:
            safe: list[bytes] = []
            self.registrations.close(registration.id, partial(safe.append, registration.id))
            assert safe, "a writer is still inside the pages"
            self.registrations.add(registration)


class TcpDestination(Destination):
    def serve(self, parts: list[SentPart]) -> bytes:
        ours, theirs = socket.socketpair()
        end = PageSocket(ours, SystemClock(), stall_s=5.0, limit_s=10.0)
        pages = StreamPages(self.rank, self.rank.packing())
        with theirs, contextlib.closing(end):
            theirs.sendall(b"".join(part.record + part.body for part in parts))
            theirs.shutdown(socket.SHUT_WR)
            with contextlib.suppress(WireError, PeerGone):
                ReceiveStream(self.rank, end, KEY, pages, lambda: False).run()
            with contextlib.suppress(BlockingIOError):
                return theirs.recv(2**16, socket.MSG_DONTWAIT)
        return b""


class Received(Work):
    """A receive of the next thing that the other rank has sent."""

    def __init__(self, sent: Iterator[bytes], tensor: Tensor) -> None:
        self._sent = sent
        self._tensor = tensor

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        content = next(self._sent, None)
        if content is None:
            raise RuntimeError("Connection closed by peer")
        room = self._tensor.numpy().data
        room[: len(content)] = content[: len(room)]
        return True


class ScriptedGroup(PairGroup):
    """A group of two whose other rank sends the same things to every receive of one tag."""

    def __init__(self, parts: list[SentPart]) -> None:
        records = [part.record.ljust(BATCH_BYTES, b"?") for part in parts]
        payloads = [message for part in parts for message in part.messages()]
        self.sent = {RECORD_TAG: iter(records), PAYLOAD_TAG: iter(payloads)}
        self.answers = b""

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Work:
        self.answers += tensors[0].numpy().tobytes()
        return Received(iter([b""]), tensors[0])

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Work:
        return Received(self.sent.get(tag, iter(())), tensors[0])

    def abort(self) -> None: ...


class ProvedConnection(Connection):
    """A connection after its handshake, with nothing behind it."""

    session_key = b"session"

    def __init__(self) -> None: ...

    def close(self) -> None: ...


class ScriptedPair(ReceivePair):
    channel: GlooChannel

    def join(self) -> GlooChannel:
        return self.channel


class GroupDestination(Destination):
    max_batch = MAX_BATCH
    answer_bytes = BATCH_ANSWER_BYTES

    def __init__(self) -> None:
        super().__init__()
        self._num_bytes = part_size(WHOLE, GlooTransport.part_bytes) + WHOLE.sent_unit_bytes
        self._payloads = staging(self._num_bytes)

    def serve(self, parts: list[SentPart]) -> bytes:
        group, connection = ScriptedGroup(parts), ProvedConnection()
        pair = ScriptedPair(GlooTransport(), self.rank, GroupSettings(), self._num_bytes, connection)
        pair.channel = GlooChannel(group, SOURCE, self._payloads)
        pair.run()
        return group.answers


@pytest.fixture(params=[TcpDestination, GroupDestination], ids=["tcp", "gloo"])
def destination(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Destination:
    caplog.set_level(logging.CRITICAL)  # a line for each dropped peer would be kept, and counted as ours
    made: Destination = request.param()
    return made


def fuzz(destination: Destination, seed: int, num_records: int) -> None:
    rng = random.Random(seed)
    while num_records > 0:
        parts = damaged(rng, KEY, valid_parts(rng, KEY, TARGETS, destination.max_batch))
        num_records -= len(parts)
        destination.read_answers(destination.serve(parts))
        if rng.randrange(100) == 0:
            destination.check()
    destination.check()


def check(destination: Destination) -> None:
    assert set(destination.rank.dropped.counts()) == KINDS
    # Not all was refused: pieces were written, and each way of refusing one was taken.
    counts = destination.registrations.counts()
    assert counts.keys() >= {"landed_pieces", "stale_pieces", "unknown_pieces", "malformed_pieces"}
    assert min(destination.num_answers[outcome] for outcome in WriteOutcome) > 0
    assert destination.pages[GRANTED].any()


def test_ten_thousand_damaged_records_crash_and_write_nothing_else(destination: Destination) -> None:
    fuzz(destination, 1, 10_000)
    check(destination)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_damaged_records_crash_and_write_nothing_else(destination: Destination) -> None:
    fuzz(destination, 2, 20_000)
    with memory_stays_flat():
        fuzz(destination, 3, 1_000_000)
    check(destination)
