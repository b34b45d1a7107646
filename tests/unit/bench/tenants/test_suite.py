"""The simulator of tenants in small: every call ends, and the queues isolate tenants."""

from collections import Counter

import pytest

from baton.bench.tenants import cases
from baton.bench.tenants.cases import (
    NUM_DECODE,
    NUM_PREFILL,
    flood,
    noisy,
    operation_times_us,
    service,
    victims,
)
from baton.bench.tenants.world import Call, TenantClients


def simulated(calls: list[Call], until_s: float) -> TenantClients:
    world = TenantClients(NUM_PREFILL, NUM_DECODE)
    world.run(calls, until_s)
    world.router.admission_queue.check_integrity()
    world.router.in_flight.check_integrity()
    return world


def test_every_call_is_answered_where_there_is_room() -> None:
    world = simulated(service([(5.0, 0.5)], 0), 30.0)
    assert world.outcomes and all(each.is_good for each in world.outcomes)
    assert len(world.router.in_flight) == len(world.router.admission_queue) == 0


def slowest_s(world: TenantClients) -> float:
    """The TTFT that 95 % of the quiet tenants' first requests do not pass."""
    quiet = [each for each in world.outcomes if each.call.tenant != "noisy" and not each.retry]
    found = sorted(each.ttft_s for each in quiet if each.first_token_s >= 0)
    assert len(found) > 0.98 * len(quiet)
    return found[int(0.95 * len(found))]


def test_quiet_tenants_hardly_notice_a_noisy_one() -> None:
    alone, beside = (
        simulated(victims(12.0, 1), 20.0),
        simulated([*victims(12.0, 1), *noisy(12.0, 1)], 20.0),
    )
    assert slowest_s(beside) < 1.5 * slowest_s(alone)


def test_work_is_shared_by_weight_while_all_want_more() -> None:
    weights = {"a": 1.0, "b": 3.0}
    world = simulated(flood(weights, 8.0, 0), 8.0)
    served: Counter[str] = Counter()
    for at_s, tenant, num_tokens in world.answered:
        served[tenant] += num_tokens * (at_s > 2)
    assert abs(served["b"] / served["a"] / 3.0 - 1) < 0.15
    assert world.idle_s < 0.02 * world.waiting_s


def test_queue_operations_are_all_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "NUM_MEASURED", 100)
    times = operation_times_us(3, 50)
    assert set(times) == {"add", "first", "take", "remove", "correct", "work before"}
    assert len({len(each) for each in times.values()}) == 1
