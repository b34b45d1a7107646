"""Pages that move between two simulated pools, and faults of the move. Interleavings of more faults are in
unit/kvtransfer/test_handoff_interleavings.py.
"""

from random import Random

import pytest

from baton.engine.cache.page_pool import PageState
from baton.kvtransfer.protocol.handoff import HandoffOutcome, TransferEnded
from baton.sim.endpoint import TIMING, SimEndpoint
from baton.sim.network import Network, Recorder
from baton.sim.process import Events, SimProcess
from tests.unit.sim.test_engine import an_engine

TRANSFER = b"t" * 16
NUM_TOKENS = 24
OWNER = "a sequence"


class Side:
    def __init__(self, pair: "Pair", name: str, page_size: int) -> None:
        self.process = SimProcess(name, pair.events)
        self.engine = an_engine(self.process.clock, self.process.spend, page_size=page_size)
        self.endpoint = SimEndpoint(
            self.process, self.engine.pages, self.engine.memory, pair.network, pair.random, pair.recorder
        )
        self.ended: list[TransferEnded] = []
        self.process.turn = self._turn

    def _turn(self) -> None:
        self.ended += self.endpoint.poll()

    def contents(self, pages: tuple[int, ...]) -> bytes:
        memory = self.engine.memory
        places = [memory.place(pages, index, memory.page_size)[1] for index in range(len(pages))]
        return b"".join(bytes(memory.bytes[place]) for place in places)[: NUM_TOKENS * 8]

    @property
    def num_held(self) -> int:
        pool = self.engine.pages
        return pool.num_pages - pool.count(PageState.FREE)


class Pair:
    """A source that has computed a prompt, and a destination."""

    def __init__(self, *, is_direct: bool, page_sizes: tuple[int, int] = (4, 4)) -> None:
        self.events, self.random = Events(), Random(7)
        self.network = Network(self.events, Random(7))
        self.recorder = Recorder(self.events)
        self.source, self.destination = (
            Side(self, "source", page_sizes[0]),
            Side(self, "destination", page_sizes[1]),
        )
        self.source.endpoint.connect(self.destination.endpoint, is_direct=is_direct)
        pool = self.source.engine.pages
        self.pages = tuple(pool.allocate(pool.pages_for(NUM_TOKENS), OWNER))
        self.source.engine.memory.bytes[:] = Random(1).randbytes(len(self.source.engine.memory.bytes))
        unit_tokens = min(page_sizes)
        self.num_units = NUM_TOKENS // unit_tokens

    def send(self) -> None:
        """The destination grants pages; the source offers all once it has heard."""
        link = self.destination.endpoint.links[0]
        self.destination.endpoint.grant(link, TRANSFER, self.num_units, OWNER, deadline_s=60.0)
        while not self.source.endpoint.take_granted():
            self.run(0.25)
        self.source.endpoint.offer(TRANSFER, self.pages, self.num_units)
        self.source.engine.pages.release(self.pages, OWNER)

    def run(self, seconds: float) -> None:
        """Give both a turn every quarter of a second."""
        for _ in range(round(4 * seconds)):
            for side in (self.source, self.destination):
                side.process.wake()
            self.events.run_until(self.events.now_s + 0.25)


@pytest.fixture(params=[False, True], ids=["receiver", "direct"])
def is_direct(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("page_sizes", [(4, 4), (4, 8), (8, 4)])
def test_pages_arrive_as_they_were(is_direct: bool, page_sizes: tuple[int, int]) -> None:
    pair = Pair(is_direct=is_direct, page_sizes=page_sizes)
    sent = pair.source.contents(pair.pages)
    pair.send()
    pair.run(3.0)
    (there,) = pair.destination.ended
    assert there.outcome is HandoffOutcome.ADOPTED
    assert pair.destination.contents(there.pages) == sent
    assert [each.outcome for each in pair.source.ended] == [HandoffOutcome.HANDED_OVER]
    assert pair.source.num_held == 0
    assert {pair.destination.engine.pages.owners(page) for page in there.pages} == {frozenset({OWNER})}
    assert not pair.source.endpoint.num_open and not pair.destination.endpoint.num_open


def test_damaged_pages_are_computed_again(is_direct: bool) -> None:
    pair = Pair(is_direct=is_direct)
    pair.source.endpoint.ranks[0].flip_chance = 1.0
    pair.send()
    pair.run(4.0)
    assert [each.outcome for each in pair.destination.ended] == [HandoffOutcome.RECOMPUTE]
    assert pair.source.num_held == pair.destination.num_held == 0


def test_pages_that_never_arrive_fail_the_transfer(is_direct: bool) -> None:
    pair = Pair(is_direct=is_direct)
    pair.source.endpoint.ranks[0].break_chance = 1.0
    pair.send()
    pair.run(4.0)
    assert [each.outcome for each in pair.source.ended] == [HandoffOutcome.FAILED]
    assert [each.outcome for each in pair.destination.ended] == [HandoffOutcome.REFUSED]
    assert pair.source.num_held == pair.destination.num_held == 0


def test_pages_take_the_receivers_way_when_the_direct_one_breaks() -> None:
    pair = Pair(is_direct=True)
    sent, rank = pair.source.contents(pair.pages), pair.source.endpoint.ranks[0]
    rank.break_chance = 1.0
    pair.send()
    while not rank.executor.counts().get("failed_shm"):
        pair.events.run_until(pair.events.now_s + 0.0005)
    rank.break_chance = 0.0
    pair.run(3.0)
    (there,) = pair.destination.ended
    assert there.outcome is HandoffOutcome.ADOPTED and pair.destination.contents(there.pages) == sent
    assert rank.executor.counts()["opened_tcp"] == rank.executor.counts()["fallbacks"] == 1
    assert pair.source.num_held == 0


def test_pages_are_quarantined_while_a_paused_writer_may_write_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.sim.network.NAPS_S", (1.0,))
    pair = Pair(is_direct=True)
    pair.send()
    pair.run(0.5)  # the source has checked, and writes when it resumes
    pair.source.process.pause()
    pair.run(3 * TIMING.lease_s)
    assert [each.outcome for each in pair.destination.ended] == [HandoffOutcome.RECOMPUTE]
    quarantined = pair.destination.engine.pages.count(PageState.QUARANTINED)
    assert quarantined == len(pair.pages)
    before = bytes(pair.destination.engine.memory.bytes)
    pair.source.process.resume()
    pair.run(3 * TIMING.heartbeat_s)
    assert pair.destination.engine.memory.bytes != before
    assert pair.source.num_held == pair.destination.num_held == 0
