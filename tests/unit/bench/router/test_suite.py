"""The router's suite: the worth of policies in a rehearsal."""

import pytest

from baton.bench.router.suite import WORKLOADS, documents, run_trace
from baton.sim.timed.fleet import Fleet

SMALL = Fleet(num_prefill=2, num_decode=2, num_prefill_pages=4000, decode_keeps=True)


def test_run_is_the_same_for_the_same_seed() -> None:
    trace = documents(40, seed=3)
    one, other = (run_trace(trace, "cost", seed=1, fleet=SMALL, scale=1.0) for _ in range(2))
    assert one == other


def test_cost_finds_shared_documents_and_round_robin_does_not() -> None:
    trace = documents(80, seed=1)
    cost, turns = (
        run_trace(trace, policy, fleet=Fleet(num_prefill_pages=4000), scale=1.0)
        for policy in ("cost", "round-robin")
    )
    assert cost.hit > 1.5 * turns.hit
    assert cost.ttft_mean_s < 0.7 * turns.ttft_mean_s


@pytest.mark.parametrize("name", WORKLOADS)
def test_made_workloads_are_in_order_and_of_the_length_asked_for(name: str) -> None:
    trace = WORKLOADS[name](50, 2)
    arrivals_s = [each.arrival_s for each in trace]
    assert len(trace) == 50 and arrivals_s == sorted(arrivals_s)
    assert all(each.input_tokens <= len(each.block_ids) * each.block_tokens for each in trace)
