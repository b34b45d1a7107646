"""A rehearsal: its parts. The benches of the router and of tenants test whole rehearsals."""

from baton.sim.timed.fleet import PageStore
from baton.sim.timed.times import Machine


def keys(*names: str) -> tuple[bytes, ...]:
    return tuple(name.encode().ljust(16) for name in names)


def test_store_keeps_what_was_used_last_and_parents_longer_than_children() -> None:
    store = PageStore(4)
    assert len(list(store.keep(keys("a", "b", "c")))) == 3
    removed = [key for key, page in store.keep(keys("a", "x", "y")) if page < 0]
    assert removed == list(keys("c"))
    assert (store.num_held(keys("a", "b", "c")), store.num_held(keys("a", "x", "y"))) == (2, 3)


def test_store_never_holds_more_than_its_pages() -> None:
    store = PageStore(2)
    changes = list(store.keep(keys("a", "b", "c")))
    assert len(changes) == 2 and store.num_held(keys("a", "b", "c")) == 2


def test_long_contexts_take_longer_than_their_tokens() -> None:
    machine = Machine()
    assert machine.compute_s(20_000, 20_000) > 2 * machine.compute_s(10_000, 10_000)
    assert machine.compute_s(1000, 20_000) > machine.compute_s(1000, 1000)
