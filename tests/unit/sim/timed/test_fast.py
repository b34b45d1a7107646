"""A rehearsal: its parts. The benches of the router and of tenants test whole rehearsals."""

import pytest

from baton.config.router import RouterConfig
from baton.messages.workers import Tier, WorkerRole
from baton.sim.timed.fast import FastCluster
from baton.sim.timed.fleet import ClientCall, Fleet, PageStore
from baton.sim.timed.times import Machine


def keys(*names: str) -> tuple[bytes, ...]:
    return tuple(name.encode().ljust(8) for name in names)


def test_store_keeps_what_was_used_last_and_parents_longer_than_children() -> None:
    store = PageStore(4)
    assert store.keep(keys("a", "b", "c")) == {None: [], Tier.DEVICE: list(keys("c", "b", "a"))}
    assert store.keep(keys("a", "x", "y"))[None] == list(keys("c"))
    assert (store.num_held(keys("a", "b", "c")), store.num_held(keys("a", "x", "y"))) == (2, 3)


def test_store_never_holds_more_than_its_pages() -> None:
    store = PageStore(2)
    assert len(store.keep(keys("a", "b", "c"))[Tier.DEVICE]) == 2
    assert store.num_held(keys("a", "b", "c")) == 2


def test_long_contexts_take_longer_than_their_tokens() -> None:
    machine = Machine()
    assert machine.compute_s(20_000, 20_000) > 2 * machine.compute_s(10_000, 10_000)
    assert machine.compute_s(1000, 20_000) > machine.compute_s(1000, 1000)


def test_pages_that_no_other_prompt_has_are_expected_in_no_cache() -> None:
    fleet, times = Fleet(num_prefill=0, num_decode=1, decode_keeps=True), dict.fromkeys(WorkerRole, Machine())
    cluster = FastCluster(RouterConfig(), fleet, times)
    cluster.run(
        ClientCall(at_s=at_s, token_ids=(0,) * 64, num_answered=8, page_keys=b"", num_more_pages=4)
        for at_s in (1.0, 2.0, 3.0)
    )
    assert cluster.router.counters["decisions"] == 3
    assert cluster.router.counters["predicted_prefix_tokens"] == 0


class SharedLink(Machine, frozen=True):
    """A hand-off takes a second, and as many times as long as there are others under way."""

    def handoff_s(self, num_tokens: int, num_transfers: int = 1) -> float:
        return float(num_transfers)


def test_handoffs_at_once_take_longer() -> None:
    cluster = FastCluster(
        RouterConfig(policy="round-robin"),
        Fleet(num_prefill=1, num_decode=1, decode_keeps=True),
        dict.fromkeys(WorkerRole, SharedLink()),
    )
    calls = [ClientCall(at_s=1 + 0.1 * at, token_ids=(at,) * 64, num_answered=8) for at in range(2)]
    calls.append(ClientCall(at_s=9.0, token_ids=(9,) * 64, num_answered=8))
    outcomes = cluster.run(iter(calls))
    taken_s = [each.joined_s - each.first_token_s for each in outcomes]
    assert taken_s == pytest.approx([1.0, 2.0, 1.0], abs=0.1)


def test_pages_leave_at_the_end_of_the_step_in_which_their_grant_comes() -> None:
    cluster = FastCluster(
        RouterConfig(policy="round-robin"),
        Fleet(num_prefill=1, num_decode=1),
        dict.fromkeys(WorkerRole, Machine(prefill_s=1.0, step_base_s=0.4)),
    )
    calls = [ClientCall(at_s=0.0, token_ids=(1,) * 64, num_answered=200)]  # so the grants wait for its steps
    calls += [ClientCall(at_s=5.0 + 0.1 * at, token_ids=(at + 2,) * 64, num_answered=8) for at in (0, 1, 2)]
    late = cluster.run(iter(calls))[1]
    # The next prompt's step of the prefill worker, and at most three of the decode worker.
    assert 1.8 < late.joined_s - late.first_token_s < 2.3


def test_prefix_is_pulled_when_its_holder_is_full() -> None:
    cluster = FastCluster(
        RouterConfig(),
        Fleet(num_prefill=0, num_decode=2, num_decode_seqs=1, decode_keeps=True),
        dict.fromkeys(WorkerRole, Machine(prefill_token_s=2e-3)),
        is_direct=True,
    )
    calls = (ClientCall(at_s=12.0 * at, token_ids=(7,) * 4096, num_answered=1000) for at in range(2))
    first, second = cluster.run(calls)
    assert (first.num_held, second.num_held) == (0, 4096 - 1)  # the last token is computed
    assert second.ttft_s < 0.1 * first.ttft_s
