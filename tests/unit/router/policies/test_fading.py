from math import exp

import pytest

from baton.router.policies.cost_model import DecayedSum


def test_what_was_added_long_ago_counts_little() -> None:
    fading = DecayedSum(10.0, 100.0)
    fading.add(5.0, 100.0)
    assert fading.at(100.0) == 5.0
    assert fading.at(110.0) == pytest.approx(5.0 / exp(1))
    fading.add(1.0, 110.0)
    assert fading.at(110.0) == pytest.approx(5.0 / exp(1) + 1.0)


def test_steady_flow_comes_to_its_memory() -> None:
    fading = DecayedSum(10.0, 0.0)
    for step in range(10_000):
        fading.add(0.1, 0.1 * step)
    assert fading.at(1000.0) == pytest.approx(10.0, rel=0.02)
