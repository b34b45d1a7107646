from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from baton.router.policies.load import LeastLoaded, RoundRobin

LOADS = st.lists(st.floats(min_value=0, max_value=1e9), min_size=1, max_size=8)
BITS = st.integers(0, 2**32 - 1)
CONTEXT = Mock()  # `pick` is pure: it reads no state


@given(LOADS, st.integers(0, 1000), BITS)
def test_least_loaded_is_never_beaten(loads: list[float], num_before: int, random: int) -> None:
    assert loads[LeastLoaded(CONTEXT).pick(loads, num_before, random)] == min(loads)


@given(st.integers(1, 8), st.integers(0, 100))
def test_every_equal_is_picked_by_some_draw(num: int, num_before: int) -> None:
    picked = {LeastLoaded(CONTEXT).pick([1.0] * num, num_before, random) for random in range(num)}
    assert picked == set(range(num))


@given(LOADS, st.integers(0, 1000))
def test_round_robin_visits_all_before_any_twice(loads: list[float], num_before: int) -> None:
    visited = [RoundRobin(CONTEXT).pick(loads, num_before + number, 0) for number in range(len(loads))]
    assert sorted(visited) == list(range(len(loads)))
