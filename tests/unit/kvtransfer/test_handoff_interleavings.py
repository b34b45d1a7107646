"""Random interleavings of the hand-offs of two simulated replicas, by hypothesis and by seeds."""

from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.kvtransfer.protocol.handoff import HandoffOutcome
from tests.unit.kvtransfer.handoff_world import HandoffWorld

WEIGHTS = {
    "wait": 40,
    "request": 8,
    "compute": 16,
    "pull": 6,
    "other": 10,
    "abort": 2,
    "stall": 2,
    "cut": 1,
    "join": 3,
    "crash": 1,
    "lose_rank": 1,
    "kill_lost_ranks": 2,
}
NUM_STEPS = 100
SEEDS = st.integers(0, 2**32 - 1)
WEIGHTED = [name for name, weight in WEIGHTS.items() for _ in range(weight)]


def play(seed: int) -> HandoffWorld:
    """One interleaving; a failure names its seed."""
    random = Random(seed)
    world = HandoffWorld(random)
    for name in random.choices(list(WEIGHTS), list(WEIGHTS.values()), k=NUM_STEPS):
        getattr(world, f"step_{name}")()
    world.settle()
    return world


def play_all(seeds: range) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        try:
            outcomes.update(play(seed).outcomes)
        except Exception as error:
            error.add_note(f"replay: play({seed})")
            raise
    return outcomes


def test_thousand_interleavings_corrupt_and_leak_nothing() -> None:
    outcomes = play_all(range(1_000))
    # Not by doing nothing: every end is reached many times, and pulls succeed too.
    assert all(outcomes[outcome] > 300 for outcome in HandoffOutcome), outcomes
    assert outcomes["pulled"] > 75, outcomes


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_interleavings_corrupt_and_leak_nothing() -> None:
    play_all(range(10_000, 110_000))


class HandoffMachine(RuleBasedStateMachine):
    """The same steps, chosen by hypothesis, which finds a short failure where a seed has found a long one."""

    world: HandoffWorld

    @initialize(seed=SEEDS)
    def begin(self, seed: int) -> None:
        self.world = HandoffWorld(Random(seed))

    @rule(seed=SEEDS, name=st.sampled_from(WEIGHTED))
    def step(self, seed: int, name: str) -> None:
        self.world.random.seed(seed)  # a step chooses alike, whichever steps are left out before it
        getattr(self.world, f"step_{name}")()

    @invariant()
    def books_add_up(self) -> None:
        if hasattr(self, "world"):
            for replica in self.world.replicas:
                replica.pool.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


HandoffMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=120, deadline=None)
TestHandoffMachine = pytest.mark.slow(HandoffMachine.TestCase)
