"""The recent work of workers, compared with an oracle that remembers each piece of work."""

from collections import defaultdict
from math import exp
from random import Random

import pytest

from baton.router.policies.cost import RecentWork

MEMORY_S = 30.0


def test_mean_of_equal_workers_is_the_work_of_each() -> None:
    spread = RecentWork(MEMORY_S, 0.0)
    assert spread.mean(0.0) == 0.0
    for worker in ("a", "b", "c", "d"):
        spread.add(worker, 100.0, 0.0)
    assert spread.mean(0.0) == pytest.approx(100.0)
    spread.forget("d", 0.0)
    assert spread.mean(0.0) == pytest.approx(100.0)
    for worker in ("a", "b", "c"):
        spread.forget(worker, 0.0)
    assert spread.mean(0.0) == 0.0


def test_mean_counts_busy_workers_more() -> None:
    spread = RecentWork(MEMORY_S, 0.0)
    for worker, amount in (("much", 970.0), ("little", 10.0), ("less", 20.0)):
        spread.add(worker, amount, 0.0)
    assert 0.96 * 970 < spread.mean(0.0) < 970


@pytest.mark.parametrize("seed", range(20))
def test_mean_equals_that_of_the_oracle(seed: int) -> None:
    random, spread, now_s = Random(seed), RecentWork(MEMORY_S, 0.0), 0.0
    given: list[tuple[str, float, float]] = []
    for _ in range(300):
        now_s += random.expovariate(1 / random.choice([0.1, 6.0]))
        worker = f"w{random.randrange(6)}"
        if random.random() < 0.05:
            spread.forget(worker, now_s)
            given = [each for each in given if each[0] != worker]
            continue
        given.append((worker, random.uniform(0.0, 10.0), now_s))
        spread.add(*given[-1])
        had = defaultdict[str, float](float)
        for name, amount, at_s in given:
            had[name] += amount * exp((at_s - now_s) / MEMORY_S)
        expected = sum(each * each for each in had.values()) / sum(had.values())
        assert spread.mean(now_s) == pytest.approx(expected, rel=1e-6)
