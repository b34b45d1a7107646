"""Over how many workers prompts are spread, by a brute force twin that remembers each of them."""

from math import exp
from random import Random

import pytest

from baton.router.spread import BALANCE_S, Spread


def test_as_many_as_are_given_the_same() -> None:
    spread = Spread(0.0)
    assert spread.num(0.0) == 1.0
    for worker in ("a", "b", "c", "d"):
        spread.add(worker, 100, 0.0)
    assert spread.num(0.0) == pytest.approx(4.0)
    spread.forget("d", 1.0)
    assert spread.num(1.0) == pytest.approx(3.0) and spread.of("d", 1.0) == 0.0


def test_one_that_gets_nearly_all_is_nearly_alone() -> None:
    spread = Spread(0.0)
    for worker, num_tokens in (("much", 970), ("little", 10), ("less", 20)):
        spread.add(worker, num_tokens, 0.0)
    assert 1.0 < spread.num(0.0) < 1.1


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_every_prompt_says(seed: int) -> None:
    random, spread, now_s = Random(seed), Spread(0.0), 0.0
    given: list[tuple[str, int, float]] = []
    for _ in range(300):
        now_s += random.expovariate(1 / random.choice([0.1, 60.0]))
        worker = f"w{random.randrange(6)}"
        if random.random() < 0.05:
            spread.forget(worker, now_s)
            given = [each for each in given if each[0] != worker]
            continue
        given.append((worker, random.randint(0, 4000), now_s))
        spread.add(*given[-1])
        sums = {name: 0.0 for name, _, _ in given}
        for name, num_tokens, at_s in given:
            sums[name] += num_tokens * exp((at_s - now_s) / BALANCE_S)
        squares = sum(each**2 for each in sums.values())
        expected = sum(sums.values()) ** 2 / squares if squares else 1.0
        assert spread.num(now_s) == pytest.approx(expected, rel=1e-6)
        assert all(spread.of(name, now_s) == pytest.approx(each) for name, each in sums.items())
