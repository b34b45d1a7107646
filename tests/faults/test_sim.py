"""Whole clusters in virtual time, with faults: see cluster/sim/world.py. A failure says how to replay it."""

import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from baton.cluster.sim.faults import Trouble
from baton.cluster.sim.world import World

NUM_SLOW_SEEDS = 1_000
MAX_SLOW_S = 60.0


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


def check_most_are_answered(fates: Counter[str]) -> None:
    """Of those who stayed to hear it: some can't be answered, and some are hit twice."""
    num_answered = fates["length"] + fates["stop"]
    num_failed = fates["WorkerLost"] + fates["Overloaded"] + fates["InvalidRequest"]
    assert num_answered > 9 * num_failed, fates


def test_sixty_seeds_lose_nothing_and_leave_nothing() -> None:
    check_most_are_answered(run_all(range(60)))


def test_a_rolling_restart_of_all_workers_fails_nobody() -> None:
    fates = run_all(range(20), Trouble.ROLLING_RESTART)
    assert set(fates) <= {"length", "stop", "cancelled", "never asked for"}, fates


def test_without_trouble_nothing_is_done_twice_and_all_pages_are_back_within_a_second() -> None:
    fates = run_all(range(20), Trouble.NONE)
    assert set(fates) <= {"length", "stop", "cancelled", "never asked for"}, fates


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_seeds_lose_nothing_within_a_minute_of_one_core() -> None:
    began_s = time.process_time()
    fates = run_all(range(1_000, 1_000 + NUM_SLOW_SEEDS))
    check_most_are_answered(fates)
    assert time.process_time() - began_s < MAX_SLOW_S


def test_a_seed_is_one_history_whatever_the_hash_seed_is() -> None:
    def trace(hash_seed: str) -> bytes:
        command = [sys.executable, "-m", "baton.cluster.cli", "sim", "--seed", "10", "--seeds", "5"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout

    first, second = trace("1"), trace("2")
    assert first == second
    assert first.count(b"\n") > 500
