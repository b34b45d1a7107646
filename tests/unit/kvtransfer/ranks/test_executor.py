"""One rank's share of transfers, with shards that have the same pages."""

import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
import torch

from baton.clock import SystemClock
from baton.kvtransfer.endpoint import EndpointSettings
from baton.kvtransfer.protocol.messages import PeerRank
from baton.kvtransfer.ranks.digests import INLINE_BYTES, UnitDigests
from baton.kvtransfer.ranks.executor import RankExecutor
from baton.kvtransfer.ranks.messages import (
    CloseShard,
    DropLink,
    ForgetShard,
    OpenShard,
    PushEnded,
    PushUnits,
    ReachPeer,
    ShardEvent,
    ShardOpened,
    ShardReached,
    ShardStopped,
    StopShard,
    UnitsHashed,
    WriterStopped,
)
from baton.kvtransfer.transports.base import LocalRank, TransportListener, TransportSet
from baton.kvtransfer.transports.pages import HostPages, SharedPool
from baton.kvtransfer.transports.registry import transport_set
from baton.pages import PageLayout
from baton.rpc.connection import Call, DroppedPeers
from tests.layouts import a_layout
from tests.transfer_ends import RING, local_rank

WHOLE = a_layout(page_size=4)
HALVES = a_layout(tp_size=2, page_size=4)
NUM_PAGES, NUM_UNITS = 6, 3
ALL_LAYERS = (0, 2)
TRANSFER = b"t" * 16
DIGEST_KEY = b"k" * 32
PAGES = (4, 1, 3)
GENERATIONS = (7, 8, 9)


class Rank:
    """A rank with a pool, whose thread is the test's."""

    def __init__(self, layout: PageLayout, rank: int = 0) -> None:
        self.shared = SharedPool()
        shape = (NUM_PAGES, layout.num_layers, 2, layout.heads_per_rank, layout.page_size, layout.head_dim)
        self.pool = self.shared.zeros(shape, torch.float32)
        self.layout, self.rank = layout, rank
        self.events: list[ShardEvent] = []
        self._inbox: SimpleQueue[Call] = SimpleQueue()
        settings = EndpointSettings(keys=RING, fingerprint="model", layout=layout)
        self.executor = RankExecutor(
            settings.for_rank(rank),
            self.pool,
            self.shared,
            bytes([rank + 1]) * 16,
            transport_set("auto"),
            self._inbox.put,
            self.events.append,
            clock=SystemClock(),
            dropped=DroppedPeers(),
        )

    def peer(self) -> PeerRank:
        return PeerRank(
            host="127.0.0.1", layout=self.layout, rank=self.rank, listeners=self.executor.listeners
        )

    def hear(self, wanted: type[ShardEvent]) -> ShardEvent:
        """The next event of this kind, after those before it."""
        while not any(isinstance(event, wanted) for event in self.events):
            self._inbox.get(timeout=5.0)()
        index = next(index for index, event in enumerate(self.events) if isinstance(event, wanted))
        return self.events.pop(index)

    def granted(self) -> list[int]:
        """The pages that other processes may write now."""
        words = self.shared.generations._words
        return [page for page in range(NUM_PAGES) if words[page]]

    def close(self) -> None:
        self.executor.close()
        self.shared.close()


@pytest.fixture
def destination() -> Iterator[Rank]:
    made = Rank(WHOLE)
    yield made
    made.close()


@pytest.fixture
def sources() -> Iterator[list[Rank]]:
    made = [Rank(HALVES, rank) for rank in range(2)]
    yield made
    for executor in made:
        executor.close()


def test_kernels_of_transfers_are_compiled_before_any_peer_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []
    monkeypatch.setattr(HostPages, "warm_up", lambda pages, plan: order.append(plan.unit_bytes))

    class Transports(TransportSet):
        def listen(self, rank: LocalRank) -> dict[str, TransportListener]:
            order.append("listen")
            return super().listen(rank)

    monkeypatch.setattr(
        "tests.unit.kvtransfer.ranks.test_executor.transport_set", lambda name: Transports(())
    )
    Rank(HALVES, 1).close()
    assert order == [HALVES.page_bytes, "listen"]


def open_shard(destination: Rank, source: Rank, shard: int) -> None:
    order = OpenShard(
        transfer=TRANSFER,
        shard=shard,
        epoch=1,
        num_units=NUM_UNITS,
        pages=PAGES,
        generations=GENERATIONS,
        source=source.peer(),
        layers=ALL_LAYERS,
        digest_key=DIGEST_KEY,
    )
    destination.executor.perform(order)
    assert destination.hear(ShardOpened) == ShardOpened(transfer=TRANSFER, shard=shard)


def reach(source: Rank, destination: Rank, shard: int, *, is_bulk: bool = False) -> None:
    order = ReachPeer(
        transfer=TRANSFER,
        shard=shard,
        link=1,
        destination=destination.peer(),
        layers=ALL_LAYERS,
        digest_key=DIGEST_KEY,
        epoch=1,
        pages=PAGES,
        generations=GENERATIONS,
        is_bulk=is_bulk,
    )
    source.executor.perform(order)
    assert source.hear(ShardReached) == ShardReached(transfer=TRANSFER, shard=shard, transport="shm")


def push(source: Rank, shard: int) -> PushEnded:
    source.executor.perform(
        PushUnits(transfer=TRANSFER, shard=shard, first=0, stop=NUM_UNITS, more_pages=(0, 2, 5))
    )
    written = source.hear(PushEnded)
    assert isinstance(written, PushEnded)
    return written


def test_pages_of_two_shards_are_granted_until_the_last_of_them_closes(
    destination: Rank, sources: list[Rank]
) -> None:
    for shard, source in enumerate(sources):
        open_shard(destination, source, shard)
    assert destination.granted() == sorted(PAGES)
    for shard, left in ((0, sorted(PAGES)), (1, [])):
        destination.executor.perform(CloseShard(transfer=TRANSFER, shard=shard, is_confirmed=True))
        assert destination.hear(WriterStopped) == WriterStopped(transfer=TRANSFER, shard=shard)
        assert destination.granted() == left


def test_shard_goes_on_when_the_other_has_ended(destination: Rank, sources: list[Rank]) -> None:
    for shard, source in enumerate(sources):
        source.pool.fill_(shard + 1)
        open_shard(destination, source, shard)
        reach(source, destination, shard)
    assert push(sources[0], 0).outcome.is_done
    destination.executor.perform(CloseShard(transfer=TRANSFER, shard=0, is_confirmed=True))
    destination.hear(WriterStopped)
    assert push(sources[1], 1).outcome.is_done
    for head in range(2):
        assert (destination.pool[list(PAGES), :, :, head] == head + 1).all()
    assert not destination.pool[[0, 2, 5]].any()


def test_stopped_shard_writes_no_more(destination: Rank, sources: list[Rank]) -> None:
    source = sources[1]
    open_shard(destination, source, 1)
    reach(source, destination, 1)
    source.executor.perform(StopShard(transfer=TRANSFER, shard=1))
    assert source.hear(ShardStopped) == ShardStopped(transfer=TRANSFER, shard=1)
    source.executor.stop()
    assert not push(source, 1).outcome.is_done
    assert not destination.pool.any()


def test_end_of_a_link_closes_its_transports(destination: Rank, sources: list[Rank]) -> None:
    source, threads = sources[0], set(threading.enumerate())
    open_shard(destination, source, 0)
    reach(source, destination, 0)
    assert any(thread.name == "shm-source" for thread in set(threading.enumerate()) - threads)
    source.executor.perform(DropLink(link=1))
    assert not any(thread.name == "shm-source" for thread in set(threading.enumerate()) - threads)


def test_death_of_a_writer_closes_its_open_shards(destination: Rank, sources: list[Rank]) -> None:
    for shard, source in enumerate(sources):
        open_shard(destination, source, shard)
    incarnation = sources[1].executor.listeners.incarnation
    destination.executor.rank.registrations.writer_came(incarnation)
    rank = destination.executor.rank
    rank.on_writer_death(rank.registrations.writer_died(incarnation))
    assert destination.hear(WriterStopped) == WriterStopped(transfer=TRANSFER, shard=1)
    assert not any(isinstance(event, WriterStopped) for event in destination.events)


def test_forgotten_shards_leave_nothing(destination: Rank, sources: list[Rank]) -> None:
    for shard, source in enumerate(sources):
        open_shard(destination, source, shard)
        reach(source, destination, shard)
        source.executor.perform(ForgetShard(transfer=TRANSFER, shard=shard))
        destination.executor.perform(ForgetShard(transfer=TRANSFER, shard=shard))
        assert not source.executor._sending
    assert not destination.executor._receiving


def test_failed_digest_is_reported(
    destination: Rank, sources: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(*_: object, **__: object) -> bytes:
        raise MemoryError("no room for the digests")

    source = sources[0]
    monkeypatch.setattr(source.executor._tools.digests, "take", take)
    open_shard(destination, source, 0)
    reach(source, destination, 0)
    assert push(source, 0).outcome.is_done
    hashed = source.hear(UnitsHashed)
    assert isinstance(hashed, UnitsHashed)
    assert hashed.digests == b"" and "no room for the digests" in hashed.reason


def digests_of(source: Rank) -> bytes:
    hashed = source.hear(UnitsHashed)
    assert isinstance(hashed, UnitsHashed) and not hashed.reason
    return hashed.digests


@pytest.mark.parametrize("is_inline", [True, False])
def test_bulk_pieces_have_the_digests_of_other_pieces(
    destination: Rank, sources: list[Rank], is_inline: bool
) -> None:
    source = sources[0]
    source.pool.copy_(torch.rand(source.pool.shape))
    open_shard(destination, source, 0)
    reach(source, destination, 0)
    assert push(source, 0).outcome.is_done
    expected = digests_of(source)
    source.executor.perform(ForgetShard(transfer=TRANSFER, shard=0))
    if not is_inline:
        source.executor._digests._inline_bytes = 0
    reach(source, destination, 0, is_bulk=True)
    assert push(source, 0).outcome.is_done
    assert digests_of(source) == expected and any(expected)


@pytest.mark.parametrize(
    ("num_bytes", "is_in_place", "is_inline"),
    [(INLINE_BYTES, True, True), (INLINE_BYTES + 1, True, False), (1, False, False), (0, False, True)],
)
def test_caller_hashes_few_bytes_of_its_own_memory(
    num_bytes: int, is_in_place: bool, is_inline: bool
) -> None:
    rank = local_rank(torch.zeros(4, 16))
    if not is_in_place:
        rank.memory = None
    digests = UnitDigests(rank)
    taken = digests.submit(num_bytes, threading.current_thread)
    assert (taken.result(10) is threading.current_thread()) == is_inline
    digests.close()
