"""Damaged streams against all that reads them: frames, messages, the endpoint, its hand-offs, the ledger.

A peer may send whatever it likes: it is dropped and counted, nothing else is raised, no page stays held by
its transfers, and memory has a bound.
"""

import random
import tracemalloc
from collections import Counter

import pytest

from baton.clock import ManualClock
from baton.engine.cache.page_pool import PagePool
from baton.errors import WireError
from baton.kvtransfer.endpoint import EndpointSettings, PageEndpoint
from baton.kvtransfer.links import Link
from baton.kvtransfer.protocol import messages as m
from baton.kvtransfer.protocol.handoff import HandoffOutcome
from baton.kvtransfer.ranks.messages import (
    CloseShard,
    Command,
    OpenShard,
    PushUnits,
    ReachPeer,
    ShardEvent,
    ShardOpened,
    ShardReached,
    ShardStopped,
    ShardVerified,
    StopShard,
    UnitsHashed,
    VerifyShard,
    WriterStopped,
)
from baton.rpc.connection import DroppedPeers
from baton.rpc.session import FrameReader, encode_frame
from tests.flat_memory import memory_stays_flat
from tests.numbered_pages import NumberedPages
from tests.transfer_ends import RING
from tests.unit.kvtransfer.frame_mutations import (
    BOMBS,
    LAYOUT,
    LISTENERS,
    mutated,
    valid_frames,
    valid_message,
)

NUM_PAGES = 64
NUM_KNOWN = 16
INCARNATION = bytes(16)
HELLO = m.EndpointHello(
    protocol=m.PROTOCOL, incarnation=b"p" * 16, fingerprint="model", layout=LAYOUT, listeners=LISTENERS
)
KINDS = {"length", "version", "malformed", "protocol"}


class RecordingLink(Link):
    """A link without a connection, which keeps the error that drops it."""

    def __init__(self) -> None:
        self.host = "127.0.0.1"
        self.hello = HELLO
        self.number = 1
        self.is_lost = False
        self.error: WireError | None = None

    def send(self, message: m.AnyMessage) -> None:
        """Nobody reads the messages."""

    def digest_key(self, transfer: bytes) -> bytes:
        return bytes(32)

    def drop(self, error: WireError) -> None:
        self.error = error


class Endpoint(PageEndpoint):
    """An endpoint whose one rank answers every command at once."""

    def __init__(self, pool: PagePool) -> None:
        settings = EndpointSettings(keys=RING, fingerprint="model", layout=LAYOUT)
        super().__init__(settings, INCARNATION, pool, ManualClock(), self)
        self.pin = NumberedPages(pool)
        self._pool = pool

    def serve(self, link: RecordingLink, message: m.AnyMessage) -> None:
        """Take a message of the peer, and offer computed pages for each transfer that it grants."""
        self._received(link, message)
        for granted in self.take_granted():
            num_units = min(granted.num_units, self._pool.num_free)
            pages = self._pool.allocate(num_units, "own")
            self.offer(granted.transfer, pages, num_units)
            self._pool.release(pages, "own")

    def hang_up(self, link: RecordingLink) -> None:
        """Take the end of the link: no transfer may stay open."""
        self._on_link_lost(link)
        for ended in self.poll():
            if ended.outcome is HandoffOutcome.ADOPTED:
                self._pool.release(ended.pages, "adopter")
        assert not self.num_open

    def complaint(self) -> str | None:
        return None

    def perform(self, rank: int, command: Command) -> None:
        event = answer(command)
        if event is not None:
            self._on_shard_event(event)

    def drop(self, link: Link) -> None:
        """The rank has no transports."""

    def _make_posted_calls(self) -> None:
        """No other thread posts calls."""

    def _link_to(self, incarnation: bytes) -> Link | None:
        return None


class Receiver:
    """A process that serves one peer after the other, and has granted pages to each."""

    def __init__(self) -> None:
        self.pool = PagePool(NUM_PAGES, 16)
        self.dropped = DroppedPeers()
        self.messages: Counter[str] = Counter()
        known = self.pool.allocate(NUM_KNOWN, "cache")
        for page in known:
            self.pool.mark_known(page)
        self.pool.release(known, "cache")

    def serve(self, stream: bytes) -> bool:
        """True when the peer was dropped. It hangs up at the end of its stream."""
        endpoint, link = Endpoint(self.pool), RecordingLink()
        endpoint.grant(link, bytes(16), 2, "adopter", deadline_s=1.0)  # a transfer that messages name
        try:
            for body in FrameReader().feed(stream):
                message = m.decode(body)
                self.messages[type(message).__name__] += 1
                endpoint.serve(link, message)
                if link.error is not None:
                    raise link.error
            is_dropped = False
        except WireError as error:
            self.dropped.add(error.reason)
            is_dropped = True
        endpoint.hang_up(link)
        assert self.pool.num_available == NUM_PAGES, "pages are held after the peer is gone"
        return is_dropped


def answer(command: Command) -> ShardEvent | None:
    """The event by which a rank answers a command, at once."""
    match command:
        case ReachPeer(transfer=transfer, shard=shard):
            return ShardReached(transfer=transfer, shard=shard, transport="")
        case PushUnits(transfer=transfer, shard=shard, first=first, stop=stop):
            digests = bytes(8 * (stop - first))
            return UnitsHashed(transfer=transfer, shard=shard, first=first, stop=stop, digests=digests)
        case StopShard(transfer=transfer, shard=shard):
            return ShardStopped(transfer=transfer, shard=shard)
        case OpenShard(transfer=transfer, shard=shard):
            return ShardOpened(transfer=transfer, shard=shard)
        case CloseShard(transfer=transfer, shard=shard):
            return WriterStopped(transfer=transfer, shard=shard)
        case VerifyShard(transfer=transfer, shard=shard, digests=digests):
            corrupt_units = (0,) if any(digests) else ()
            return ShardVerified(transfer=transfer, shard=shard, corrupt_units=corrupt_units)
    return None


def fuzz(seed: int, num_frames: int) -> tuple[Receiver, int]:
    """Returns the receiver and how many peers it has dropped."""
    rng, receiver, num_dropped = random.Random(seed), Receiver(), 0
    while num_frames > 0:
        frames = mutated(rng, valid_frames(rng))
        num_frames -= len(frames)
        num_dropped += receiver.serve(b"".join(frames))
    return receiver, num_dropped


def check(receiver: Receiver, num_dropped: int) -> None:
    counts = receiver.dropped.counts()
    assert sum(counts.values()) == num_dropped > 0
    assert set(counts) == KINDS
    # Not by refusing all: every kind of message has got through to its machine.
    assert len(receiver.messages) == len(m.AnyMessage.__args__), receiver.messages
    receiver.pool.check_integrity()


def test_twenty_thousand_damaged_frames_crash_and_leak_nothing() -> None:
    check(*fuzz(1, 20_000))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_damaged_frames_crash_and_leak_nothing() -> None:
    fuzz(2, 50_000)
    with memory_stays_flat():
        check(*fuzz(3, 1_000_000))


@pytest.mark.parametrize("bomb", BOMBS, ids=range(len(BOMBS)))
def test_announcing_much_takes_no_memory(bomb: bytes) -> None:
    stream = encode_frame(bomb)
    with pytest.raises(WireError):
        m.decode(bomb)
    tracemalloc.start()
    try:
        for body in FrameReader().feed(stream):
            with pytest.raises(WireError):
                m.decode(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (1 << 16) + 4 * len(stream) + (1 << 20 if b"pages" in bomb else 0)


def test_valid_messages_survive_the_wire() -> None:
    rng = random.Random(4)
    for _ in range(2_000):
        message = valid_message(rng)
        (body,) = FrameReader().feed(encode_frame(m.encode(message)))
        assert m.decode(body) == message
