from hypothesis import given
from hypothesis import strategies as st

from baton.fair_queue import FairLru

GROUPS = [b"a", b"b", b"c"]
WEIGHTS = {b"a": 1.0, b"b": 3.0, b"c": 0.5}


def lru_of(*items: tuple[int, bytes]) -> FairLru[int]:
    lru: FairLru[int] = FairLru()
    for item, group in items:
        lru.add(item, group)
    return lru


def test_one_group_goes_oldest_first() -> None:
    lru = lru_of((3, b""), (1, b""), (2, b""))
    out = []
    while (item := lru.next_out()) is not None:
        out.append(item)
        lru.remove(item, b"")
    assert out == [3, 1, 2]


def test_a_flood_pushes_out_itself() -> None:
    lru = lru_of((-1, b"quiet"), (-2, b"quiet"))
    for item in range(100):
        lru.add(item, b"flood")
        if item >= 4:
            out = lru.next_out()
            assert out == item - 4
            lru.remove(out, b"flood")
    assert lru.num_of(b"quiet") == 2 and lru.num_of(b"flood") == 4


def test_who_has_more_weight_keeps_more() -> None:
    lru = lru_of(*((item, b"light") for item in range(40)), *((item, b"heavy") for item in range(40, 80)))
    lru.weights[b"heavy"] = 3.0
    for _ in range(40):
        out = lru.next_out()
        assert out is not None
        lru.remove(out, b"light" if out < 40 else b"heavy")
    assert (lru.num_of(b"light"), lru.num_of(b"heavy")) == (10, 30)


@given(st.lists(st.tuples(st.sampled_from([*GROUPS, None]), st.integers(0, 5)), max_size=60))
def test_next_out_is_what_a_plain_list_says(steps: list[tuple[bytes | None, int]]) -> None:
    """None: what is next goes; else a new item comes, or the one at that place of the group goes."""
    lru: FairLru[int] = FairLru()
    lru.weights.update(WEIGHTS)
    plain: list[tuple[int, bytes]] = []
    for number, (group, place) in enumerate(steps):
        own = [item for item, of in plain if of == group]
        if group is None and plain:
            most = max(sum(of == each for _, of in plain) / WEIGHTS[each] for each in GROUPS)
            full = {each for each in GROUPS if sum(of == each for _, of in plain) / WEIGHTS[each] == most}
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
    assert (lru.next_out() is None) == (not plain)
