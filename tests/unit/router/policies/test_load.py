from random import Random
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from baton.router.policies.base import PolicyContext
from baton.router.policies.load import LeastLoaded, LoadView, RoundRobin

views = st.lists(
    st.builds(LoadView, st.text(max_size=3), st.floats(min_value=0, max_value=1e9)), min_size=1, max_size=8
)
bits = st.integers(0, 2**32 - 1)
CONTEXT = PolicyContext(Mock(), Mock(), Random(0))  # `pick` is pure: it reads no state


@given(views, st.integers(0, 1000), bits)
def test_least_loaded_is_never_beaten(views: list[LoadView], num_before: int, random: int) -> None:
    picked = LeastLoaded(CONTEXT).pick(views, num_before, random)
    assert picked.load == min(view.load for view in views)


@given(st.integers(1, 8), st.integers(0, 100))
def test_every_equal_is_picked_by_some_draw(num_views: int, num_before: int) -> None:
    views = [LoadView(str(number), 1.0) for number in range(num_views)]
    assert {LeastLoaded(CONTEXT).pick(views, num_before, random) for random in range(num_views)} == set(views)


@given(views, st.integers(0, 1000))
def test_round_robin_visits_all_before_any_twice(views: list[LoadView], num_before: int) -> None:
    visited = [RoundRobin(CONTEXT).pick(views, num_before + number, 0) for number in range(len(views))]
    assert sorted(visited) == sorted(views)
