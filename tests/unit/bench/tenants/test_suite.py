"""The simulation of tenants in small: every call ends, and the queues isolate tenants."""

from collections import Counter
from random import Random

from baton.bench.tenants.calls import ttft_s
from baton.bench.tenants.suite import TOKENS_PER_S, WORKLOAD, ProbedCluster, simulate


def test_every_call_is_answered_where_there_is_room() -> None:
    rehearsal = simulate(WORKLOAD.service([(5.0, 0.5 * TOKENS_PER_S)], Random(0)), 30.0, 0)
    assert rehearsal.outcomes and all(each.is_good for each in rehearsal.outcomes)
    assert len(rehearsal.router.in_flight) == len(rehearsal.router.admission_queue) == 0
    rehearsal.router.in_flight.check_integrity()


def slowest_s(rehearsal: ProbedCluster) -> float:
    """Return the TTFT within which 95 % of the quiet tenants' first requests are answered."""
    quiet = [each for each in rehearsal.outcomes if each.call.tenant != "noisy" and not each.retry]
    assert sum(each.first_token_s >= 0 for each in quiet) > 0.98 * len(quiet)
    return ttft_s(quiet, 95)


def test_quiet_tenants_hardly_notice_a_noisy_one() -> None:
    calls = WORKLOAD.victims(0.6 * TOKENS_PER_S, 12.0, Random(1))
    noise = WORKLOAD.noisy(5 * TOKENS_PER_S, 12.0, Random(2))
    alone, beside = simulate(calls, 20.0, 0), simulate([*calls, *noise], 20.0, 0)
    assert slowest_s(beside) < 1.5 * slowest_s(alone)


def test_work_is_shared_by_weight_while_all_want_more() -> None:
    calls = WORKLOAD.flood({"a": 1.0, "b": 3.0}, 2 * TOKENS_PER_S, 8.0, Random(0))
    rehearsal = simulate(calls, 8.0, 0)
    served: Counter[str] = Counter()
    for at_s, tenant, num_tokens in rehearsal.served():
        served[tenant] += num_tokens * (at_s > 2)
    assert abs(served["b"] / served["a"] / 3.0 - 1) < 0.15
    assert rehearsal.idle_s < 0.02 * rehearsal.waiting_s
