from hypothesis import given
from hypothesis import strategies as st

from baton.router.policies.load import Draw, LoadView, least_loaded, round_robin

views = st.lists(
    st.builds(LoadView, st.text(max_size=3), st.floats(min_value=0, max_value=1e9)), min_size=1, max_size=8
)
draws = st.builds(Draw, st.integers(0, 1000), st.integers(0, 2**32))


@given(views, draws)
def test_least_loaded_is_never_beaten(views: list[LoadView], draw: Draw) -> None:
    assert least_loaded(views, draw).load == min(view.load for view in views)


@given(st.integers(1, 8), st.integers(0, 100))
def test_every_equal_is_chosen_by_some_draw(num_views: int, turn: int) -> None:
    views = [LoadView(str(number), 1.0) for number in range(num_views)]
    assert {least_loaded(views, Draw(turn, random)) for random in range(num_views)} == set(views)


@given(views, st.integers(0, 1000))
def test_round_robin_visits_all_before_any_twice(views: list[LoadView], turn: int) -> None:
    visited = [round_robin(views, Draw(turn + number, 0)) for number in range(len(views))]
    assert sorted(visited) == sorted(views)
