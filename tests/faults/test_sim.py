"""Whole clusters in virtual time, with faults: see sim/world.py. A failure names its replay command."""

import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from baton.cluster.cli.main import main
from baton.sim.process import Events
from baton.sim.trouble import Trouble
from baton.sim.world import World

SLOW_1200_S = (pytest.mark.slow, pytest.mark.timeout(1200))
SLOW_1800_S = (pytest.mark.slow, pytest.mark.timeout(1800))
NUM_SLOW_SEEDS = 1_000
SEEDS_PER_CALIBRATION = 50
NUM_CALIBRATION_EVENTS = 70_000  # take about 0.05 s, so a second in all of a thousand seeds
MAX_ANY_CALIBRATIONS = 60.0  # what a thousand seeds may cost: as often as the calibrations between them,
MAX_SILENCE_CALIBRATIONS = 120.0  # which is seconds of a processor that is not shared


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run_all(seeds: range, trouble: Trouble = Trouble.ANY) -> Counter[str]:
    fates: Counter[str] = Counter()
    for seed in seeds:
        fates.update(World(seed, trouble=trouble).run())
    return fates


class Stopwatch:
    """CPU time of simulations, in units of a loop of similar work that runs between them.

    A busy or slow machine slows down both alike.
    """

    def __init__(self) -> None:
        self.worked_s = self.calibrated_s = 0.0

    def run(self, seeds: range, trouble: Trouble) -> Counter[str]:
        fates: Counter[str] = Counter()
        for first in range(seeds.start, seeds.stop, SEEDS_PER_CALIBRATION):
            some = range(first, min(first + SEEDS_PER_CALIBRATION, seeds.stop))
            self.calibrated_s += _cpu_s(_calibrate)
            self.worked_s += _cpu_s(lambda some=some: fates.update(run_all(some, trouble)))  # type: ignore[misc]
        return fates

    @property
    def num_calibrations(self) -> float:
        return self.worked_s / self.calibrated_s


def _cpu_s(work: Callable[[], object]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def _calibrate() -> None:
    """Run events that schedule events: heap, calls, small objects and dictionaries, as in a simulation."""
    events, counts = Events(), Counter[int]()

    def happen(number: int) -> None:
        counts[number % 1000] += 1
        if number < NUM_CALIBRATION_EVENTS:
            events.after((number * 7919 % 1000) / 1000, lambda: happen(number + 64))

    for number in range(64):
        happen(number)
    events.run_until(1e9)


def check_most_are_answered(fates: Counter[str]) -> None:
    """Some requests cannot be answered, and some are hit twice."""
    num_answered = fates["length"] + fates["stop"]
    num_failed = fates["WorkerLost"] + fates["Overloaded"] + fates["InvalidRequest"]
    assert num_answered > 9 * num_failed, fates


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 200), marks=SLOW_1200_S)])
def test_two_models_answer_with_their_own_tokens_under_faults(seeds: range) -> None:
    fates: Counter[str] = Counter()
    for seed in seeds:
        fates.update(World(seed, models=("a", "b")).run())
    check_most_are_answered(fates)


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 60), marks=SLOW_1200_S)])
def test_any_faults_lose_and_leak_nothing(seeds: range) -> None:
    check_most_are_answered(run_all(seeds))


def test_rolling_restart_of_all_workers_fails_no_request() -> None:
    fates = run_all(range(20), Trouble.ROLLING_RESTART)
    assert set(fates) <= {"length", "stop", "cancelled", "never asked for"}, fates


def test_without_faults_nothing_is_done_twice_and_all_pages_are_free_within_a_second() -> None:
    fates = run_all(range(20), Trouble.NONE)
    assert set(fates) <= {"length", "stop", "cancelled", "never asked for"}, fates


@pytest.mark.parametrize(
    ("seeds", "least"), [(range(20), 20), pytest.param(range(1_000, 2_000), 1_000, marks=SLOW_1800_S)]
)
def test_streams_that_move_under_faults_lose_nothing(seeds: range, least: int) -> None:
    fates, num_moved = Counter[str](), 0
    for seed in seeds:
        world = World(seed, trouble=Trouble.MIGRATION)
        fates += world.run()
        num_moved += world.num_migrations
    check_most_are_answered(fates)
    assert num_moved > least


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(1_000, 1_500), marks=SLOW_1200_S)])
def test_workers_of_a_lost_node_count_as_one_death(seeds: range) -> None:
    """A request may wait too long while no decode worker is left, and fails for no other reason."""
    fates = run_all(seeds, Trouble.LOST_NODE)
    assert set(fates) <= {"length", "stop", "cancelled", "never asked for", "Overloaded"}, fates
    check_most_are_answered(fates)


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 60), marks=SLOW_1200_S)])
def test_silent_faults_lose_nothing(seeds: range) -> None:
    """Black holes, processes that stand still, slow steps, slow starts, dates that jump, full disks.

    In a few of the 60 clusters the only worker of a role starts again after a minute: those answer little.
    """
    check_most_are_answered(run_all(seeds, Trouble.SILENCE))


@pytest.mark.parametrize(
    ("trouble", "most"),
    [
        pytest.param(Trouble.ANY, MAX_ANY_CALIBRATIONS, marks=SLOW_1200_S, id="any faults, within a minute"),
        pytest.param(
            Trouble.SILENCE,
            MAX_SILENCE_CALIBRATIONS,
            marks=SLOW_1800_S,
            id="silent faults, within two minutes",
        ),
    ],
)
def test_thousand_seeds_lose_nothing_within_minutes_of_one_core(trouble: Trouble, most: float) -> None:
    watch = Stopwatch()
    check_most_are_answered(watch.run(range(1_000, 1_000 + NUM_SLOW_SEEDS), trouble))
    assert watch.num_calibrations < most


def test_seed_gives_one_trace_with_any_hash_seed(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["sim", "--seed", "10", "--seeds", "2"]
    assert main(arguments) == 0
    here = capfd.readouterr().out
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    command = [sys.executable, "-m", "baton", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": other}
    there = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert here == there
    assert here.count("\n") > 200
