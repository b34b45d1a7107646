"""Damaged streams against everything that reads what a peer says: frames, messages, hand-offs, ledger.

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
from baton.kvtransfer.protocol import messages as m
from baton.kvtransfer.protocol.destination import DestinationHandoff, DestinationState
from baton.kvtransfer.protocol.handoff import Action
from baton.kvtransfer.protocol.source import SourceHandoff, SourceState
from baton.kvtransfer.ranks.messages import (
    CloseShard,
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
from tests.numbered_pages import NumberedPages, handoff_context
from tests.unit.kvtransfer.frame_mutations import BOMBS, mutated, valid_frames, valid_message

NUM_PAGES = 64
NUM_KNOWN = 16
INCARNATION = bytes(16)
KINDS = {"length", "version", "malformed", "protocol"}


class Receiver:
    """A process that serves one peer at a time: both ends of transfers, and a source of its own for each."""

    def __init__(self) -> None:
        self.pool = PagePool(NUM_PAGES, 16)
        self.clock = ManualClock()
        self.dropped = DroppedPeers()
        self.messages: Counter[str] = Counter()
        known = self.pool.allocate(NUM_KNOWN, "cache")
        for page in known:
            self.pool.mark_known(page)
        self.pool.release(known, "cache")
        self._num_epochs = 0
        self._sources: dict[bytes, SourceHandoff] = {}
        self._destinations: dict[bytes, DestinationHandoff] = {}

    def serve(self, stream: bytes) -> bool:
        """True when the peer was dropped. It hangs up at the end of its stream."""
        reader = FrameReader()
        self._start_own()
        try:
            for body in reader.feed(stream):
                message = m.decode(body)
                self.messages[type(message).__name__] += 1
                self._receive(message)
            is_dropped = False
        except WireError as error:
            self.dropped.add(error.reason)
            is_dropped = True
        self._end_all()
        return is_dropped

    def _start_own(self) -> None:
        """A destination that has granted pages, of a transfer that messages name."""
        self._num_epochs = self._num_epochs % 3 + 1  # so that a random epoch is often the right one
        transfer, epoch = bytes(16), self._num_epochs
        grant = m.Grant(
            transfer=transfer, epoch=epoch, deadline_ms=1000, num_units=2, pages=(), generations=()
        )
        handoff = DestinationHandoff(grant, handoff_context(self.pool, self.clock), "adopter")
        self._destinations[transfer] = handoff
        self._do(handoff, handoff.begin())

    def _receive(self, message: m.AnyMessage) -> None:
        if isinstance(message, m.EndpointHello | m.EndpointClosed):
            return
        transfer = message.transfer
        is_known = transfer in self._destinations or transfer in self._sources
        if isinstance(message, m.Grant | m.PullRequest) and is_known:
            raise WireError("a transfer that exists already", reason="protocol")
        if isinstance(message, m.Grant | m.PullRequest):
            context = handoff_context(
                self.pool, self.clock, range(message.num_layer_groups), message.num_layer_groups
            )
            source = SourceHandoff(message, context, INCARNATION, NumberedPages(self.pool))
            self._sources[transfer] = source
            self._do(source, source.begin())
        if isinstance(message, m.Grant):
            num_units = min(message.num_units, self.pool.num_free)
            pages = self.pool.allocate(num_units, "own")
            self._do(source, source.offer(pages, num_units))
            self.pool.release(pages, "own")
        elif is_known:
            known = self._sources.get(transfer) or self._destinations[transfer]
            self._do(known, known.receive(message))

    def _do(self, handoff: SourceHandoff | DestinationHandoff, actions: list[Action]) -> None:
        for action in actions:
            event = answer(action)
            if event is not None:
                self._do(handoff, handoff.on_shard_event(event))

    def _end_all(self) -> None:
        for source in self._sources.values():
            self._do(source, source.peer_lost())
            assert source.state is SourceState.CLOSED
        for destination in self._destinations.values():
            self._do(destination, destination.peer_lost())
            assert destination.state is DestinationState.CLOSED
            self.pool.release([p for p in destination.pages if "adopter" in self.pool.owners(p)], "adopter")
        self._sources.clear()
        self._destinations.clear()
        assert self.pool.num_available == NUM_PAGES, "pages are held after the peer is gone"


def answer(action: Action) -> ShardEvent | None:
    """The event by which a rank answers a command, at once."""
    match action:
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
