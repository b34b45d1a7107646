"""Any sequence of workers' reports, compared with an index of plain dicts."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.clock import ManualClock
from baton.messages.control import KvEventBatch
from baton.messages.workers import Tier
from baton.router.index.prefix_index import PrefixIndex
from tests.node_peers import a_worker
from tests.unit.router.prefix_index_twin import Twin, TwinWorker

NAMES = ("w0", "w1", "w2")
LIVES = st.sampled_from([a_worker(name) for name in NAMES])
KEYS = [bytes([number]) * 16 for number in range(12)]  # key 0 is all zeros: the mark of an empty cell
CHAINS = st.lists(st.sampled_from(KEYS), max_size=8, unique=True).map(b"".join)
CHANGES = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(-1, 40)), max_size=8)
TIERS = st.sampled_from(list(Tier))


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.index = PrefixIndex(self.clock, 10_000)
        self.twin = Twin()

    @rule(worker=LIVES)
    def join(self, worker: Any) -> None:
        self.index.join(worker)
        self.twin.workers.setdefault(worker.id, TwinWorker())

    @rule(worker=LIVES)
    def forget(self, worker: Any) -> None:
        self.index.forget(worker.id)
        self.twin.workers.pop(worker.id, None)

    @rule(worker=LIVES, changes=CHANGES, tier=TIERS, skipped=st.integers(-3, 1), is_afresh=st.booleans())
    def say(
        self, worker: Any, changes: list[tuple[bytes, int]], tier: Tier, skipped: int, is_afresh: bool
    ) -> None:
        """skipped: below 0 some were told before, above 0 some were lost."""
        if worker.id not in self.twin.workers:
            return
        known = self.twin.workers[worker.id].next_number
        events = KvEventBatch(
            first=max(0, (known or 0) + skipped),
            keys=b"".join(key for key, _ in changes),
            pages=tuple(page for _, page in changes),
            generations=tuple(page % 7 + 1 for _, page in changes),
            tier=tier,
            is_afresh=is_afresh,
        )
        assert self.index.apply(worker.id, events) == self.twin.apply(worker.id, events)

    @rule(worker=LIVES, keys=CHAINS, ttl_s=st.sampled_from([1.0, 3.0]))
    def expect(self, worker: Any, keys: bytes, ttl_s: float) -> None:
        if worker.id in self.twin.workers:
            self.index.expect(worker.id, keys, ttl_s)
            self.twin.expect(worker.id, keys, self.clock.now_s() + ttl_s)

    @rule(seconds=st.sampled_from([0.0, 1.0, 2.0]))
    def tick(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.index.tick()
        self.twin.tick(self.clock.now_s())

    @rule(keys=CHAINS)
    def match(self, keys: bytes) -> None:
        holdings = self.index.holdings(keys)
        for worker_id in self.twin.workers:
            slot = self.index.slot(worker_id)
            assert slot is not None
            if self.twin.is_prefix_closed(keys):  # `holdings` bisects, so it relies on this
                assert holdings.num_pages(1 << slot) == self.twin.num_pages(worker_id, keys)

    @rule(worker=LIVES, keys=CHAINS)
    def locate(self, worker: Any, keys: bytes) -> None:
        if worker.id in self.twin.workers:
            located = self.index.locate(worker.id, keys)
            pairs = list(zip(located.pages, located.generations, strict=True))
            assert pairs == self.twin.locate(worker.id, keys)

    @invariant()
    def is_sound(self) -> None:
        self.index.check_integrity()
        for worker_id, worker in self.twin.workers.items():
            for key in KEYS:
                is_held = key in worker.held or key in worker.expected
                assert self.index.holdings(key).num_pages(1 << (self.index.slot(worker_id) or 0)) == is_held
            assert self.index.is_known(worker_id) == (worker.next_number is not None)


TestIndex: Any = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
