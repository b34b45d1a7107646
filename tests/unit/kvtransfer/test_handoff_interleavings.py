"""Random interleavings of two real ledgers' hand-offs, by hypothesis and by seeds; see handoff_world.py."""

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.kvtransfer.protocol.handoff import HandoffOutcome
from tests.unit.kvtransfer.handoff_world import HandoffWorld

WEIGHTS = {
    "request": 4,
    "compute": 12,
    "deliver": 40,
    "write": 40,
    "arrive": 36,
    "verify": 12,
    "device": 3,
    "local": 12,
    "pull": 4,
    "tick": 3,
    "abort": 2,
    "cut": 1,
    "join": 3,
    "crash": 1,
    "fence": 2,
    "lose_rank": 1,
    "bury_rank": 2,
}
NUM_STEPS = 150
WEIGHTED = [name for name, weight in WEIGHTS.items() for _ in range(weight)]


def play(seed: int) -> HandoffWorld:
    """One interleaving; a failure names its seed."""
    rng = random.Random(seed)
    world = HandoffWorld(rng.randrange)
    for name in rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=NUM_STEPS):
        getattr(world, f"step_{name}")()
    world.settle()
    return world


def play_all(seeds: range) -> Counter[HandoffOutcome]:
    outcomes: Counter[HandoffOutcome] = Counter()
    for seed in seeds:
        try:
            outcomes.update(play(seed).outcomes)
        except Exception as error:
            error.add_note(f"replay: play({seed})")
            raise
    return outcomes


def test_three_thousand_interleavings_corrupt_and_leak_nothing() -> None:
    outcomes = play_all(range(3_000))
    # Not by doing nothing: every end is reached many times.
    assert all(outcomes[outcome] > 300 for outcome in HandoffOutcome), outcomes


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_interleavings_corrupt_and_leak_nothing() -> None:
    play_all(range(10_000, 110_000))


class HandoffMachine(RuleBasedStateMachine):
    """The same steps, chosen by hypothesis, which looks for a short failure."""

    world: HandoffWorld

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.data = data
        self.world = HandoffWorld(lambda n: data.draw(st.integers(0, n - 1)))

    @rule(data=st.data(), name=st.sampled_from(WEIGHTED))
    def step(self, data: st.DataObject, name: str) -> None:
        self.world.pick = lambda n: data.draw(st.integers(0, n - 1))
        getattr(self.world, f"step_{name}")()

    @invariant()
    def books_add_up(self) -> None:
        if hasattr(self, "world"):
            self.world.source.pool.check_integrity()
            self.world.destination.pool.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


HandoffMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=120, deadline=None)
TestHandoffMachine = HandoffMachine.TestCase
