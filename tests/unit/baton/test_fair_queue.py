from hypothesis import given
from hypothesis import strategies as st

from baton.fair_queue import CREDIT_AGES, MAX_CLOCK, MAX_IDLE, FairLru, FairShare

WEIGHTS = st.floats(min_value=0.1, max_value=10.0)
COSTS = st.lists(st.floats(min_value=1.0, max_value=100.0), min_size=30, max_size=60)
MAX_COST = 100.0


def serve_all(share: FairShare, costs: list[float]) -> dict[str, float]:
    """Return the work served to each key, of keys that never stop waiting."""
    served: dict[str, float] = {}
    for cost in costs:
        tenant = share.first()
        assert tenant is not None
        share.serve(tenant, cost)
        served[tenant] = served.get(tenant, 0.0) + cost
    return served


@given(weights=st.lists(WEIGHTS, min_size=2, max_size=6), costs=COSTS)
def test_no_key_is_behind_another_by_more_than_the_largest_items(
    weights: list[float], costs: list[float]
) -> None:
    share = FairShare()
    for number, weight in enumerate(weights):
        share.join(str(number), weight)
    served = serve_all(share, costs)
    by_weight = [(served.get(str(number), 0.0) / weight, weight) for number, weight in enumerate(weights)]
    for mine, weight in by_weight:
        for others, other in by_weight:
            assert others - mine <= MAX_COST / other + MAX_COST / weight + 1e-6


@given(weights=st.lists(WEIGHTS, min_size=2, max_size=6), costs=COSTS)
def test_no_key_starves(weights: list[float], costs: list[float]) -> None:
    """One that joins is served before any other has had more than its share of one turn, and one turn."""
    share = FairShare()
    for number, weight in enumerate(weights[1:]):
        share.join(str(number), weight)
    serve_all(share, costs)
    share.join("late", weights[0])
    before: dict[str, float] = {}
    while (tenant := share.first()) != "late":
        assert tenant is not None
        share.serve(tenant, MAX_COST)
        before[tenant] = before.get(tenant, 0.0) + MAX_COST
    assert all(work <= MAX_COST for work in before.values())


def after(num_ages: int) -> FairShare:
    """Where "b" comes back after "a" had 1000 to itself, and so many ages."""
    share = FairShare()
    share.join("a", 1.0)
    share.join("b", 1.0)
    share.serve("b", 10.0)
    share.leave("b")
    serve_all(share, [10.0] * 101)
    for _ in range(num_ages):
        share.age()
    share.join("b", 1.0)
    return share


def test_key_that_was_away_for_long_has_no_credit() -> None:
    assert serve_all(after(CREDIT_AGES), [10.0] * 20) == {"a": 100.0, "b": 100.0}


def test_key_that_was_away_for_a_moment_gets_its_share_of_that_time() -> None:
    assert serve_all(after(CREDIT_AGES - 1), [10.0] * 99) == {"b": 990.0}


def test_unused_work_is_given_back() -> None:
    share = FairShare()
    share.join("a", 1.0)
    share.join("b", 1.0)
    share.serve("a", 100.0)
    share.correct("a", -90.0)
    assert serve_all(share, [10.0] * 9) == {"a": 40.0, "b": 50.0}


def test_excess_work_is_charged_to_a_key_that_has_left() -> None:
    share = FairShare()
    share.join("a", 1.0)
    share.join("b", 1.0)
    share.serve("a", 10.0)
    share.leave("a")
    share.correct("a", 90.0)
    share.join("a", 1.0)
    assert serve_all(share, [10.0] * 10) == {"b": 100.0}


def test_excess_work_is_charged_to_a_forgotten_key() -> None:
    """Its credit alone is what it would have had."""
    share = FairShare()
    share.join("a", 1.0)
    share.correct("b", 50.0)
    share.join("b", 1.0)
    assert serve_all(share, [10.0] * 15) == {"a": 100.0, "b": 50.0}


def test_debtor_is_not_forgotten_among_many_keys() -> None:
    share = FairShare()
    share.join("stays", 1.0)
    share.join("owes", 1.0)
    share.serve("owes", 1000.0)
    share.leave("owes")
    for number in range(3 * MAX_IDLE):
        share.join(str(number), 1.0)
        share.leave(str(number))
    share.join("owes", 1.0)
    assert serve_all(share, [10.0] * 99) == {"stays": 990.0}


def test_weights_sum_over_waiting_keys() -> None:
    share = FairShare()
    share.join("a", 2.5)
    share.join("b", 4.0)
    assert share.weights == 6.5
    share.leave("a")
    assert share.weights == 4.0


def test_changed_weight_holds_from_the_next_turn() -> None:
    share = FairShare()
    share.join("a", 1.0)
    share.join("b", 1.0)
    share.join("a", 3.0)
    assert serve_all(share, [10.0] * 40) == {"a": 300.0, "b": 100.0}
    assert share.weights == 4.0


def test_large_clocks_stay_exact() -> None:
    share = FairShare()
    share.join("a", 1e-6)
    serve_all(share, [2e3] * 20_000)
    assert 0 <= share.present <= MAX_CLOCK
    for _ in range(CREDIT_AGES):
        share.age()
    share.join("b", 1e-6)
    assert serve_all(share, [10.0] * 400) == {"a": 1000.0, "b": 3000.0}  # "a" was 2000 ahead


def test_keys_without_debt_are_forgotten() -> None:
    share = FairShare()
    for number in range(3 * MAX_IDLE):
        share.join(str(number), 1.0)
        share.leave(str(number))
    assert len(share._accounts) <= MAX_IDLE + 1
    share.join("0", 1.0)
    assert share.first() == "0" and len(share) == 1


GROUPS = [b"a", b"b", b"c"]
GROUP_WEIGHTS = {b"a": 1.0, b"b": 3.0, b"c": 0.5}


@given(st.lists(st.tuples(st.sampled_from([*GROUPS, None]), st.integers(0, 5)), max_size=60))
def test_eviction_equals_that_of_a_plain_list(steps: list[tuple[bytes | None, int]]) -> None:
    """None: the next item is evicted.

    Else the group's item at that place is removed, or a new item is added.
    """
    lru: FairLru[int] = FairLru()
    for each, weight in GROUP_WEIGHTS.items():
        lru.set_weight(each, weight)
    plain: list[tuple[int, bytes]] = []
    for number, (group, place) in enumerate(steps):
        own = [item for item, of in plain if of == group]
        if group is None and plain:
            loads = {each: sum(of == each for _, of in plain) / GROUP_WEIGHTS[each] for each in GROUPS}
            full = [each for each in GROUPS if loads[each] == max(loads.values())]
            oldest = {each: next((item for item, of in plain if of == each), None) for each in full}
            out = lru.next_out()
            assert out in oldest.values()
            of_out = next(of for item, of in plain if item == out)
            lru.remove(out, of_out) if out is not None else None
            plain.remove((out, of_out)) if out is not None else None
        elif group is not None and place < len(own):
            lru.remove(own[place], group)
            plain.remove((own[place], group))
        elif group is not None:
            lru.add(number, group)
            plain.append((number, group))
        assert all(lru.has(item, of) for item, of in plain)
        assert [lru.num_of(each) for each in GROUPS] == [
            sum(of == each for _, of in plain) for each in GROUPS
        ]
    assert (lru.next_out() is None) == (not plain)


def test_weights_of_groups_without_items_are_forgotten() -> None:
    lru = FairLru[int]()
    lru.set_weight(b"kept", 4.0)
    for item in range(4):
        lru.add(item, b"kept")
    for number in range(3 * MAX_IDLE):
        lru.set_weight(str(number).encode(), 2.0)
    assert len(lru._weights) <= MAX_IDLE + 1
    lru.add(4, b"other")
    lru.add(5, b"other")
    assert lru.next_out() == 4, "two items of weight 1 are more than four of weight 4"


def test_least_valuable_of_the_oldest_items_goes_first() -> None:
    lru = FairLru[int]()
    assert lru.next_of_least_value(float, 3) is None
    for item in (5, 3, 4, 1):
        lru.add(item, b"")
    assert lru.next_of_least_value(float, 3) == 3
    assert lru.next_of_least_value(float, 4) == 1
    assert lru.next_of_least_value(lambda _: 0.0, 4) == lru.next_out() == 5
    lru.add(9, b"another")
    assert lru.next_of_least_value(float, 4) == 1
