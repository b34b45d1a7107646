"""The order of prompts: class, share, priority, deadline, arrival."""

from baton.engine.scheduler.sequence import DEFAULT_DUE_S, SequenceStatus, due_s
from baton.request import Request, SamplingParams, TokenIds
from baton.tenants import SchedulingKey, Sla
from tests.accounts import AccountHarness, scheduling_key


def make_harness(num_pages: int = 400) -> AccountHarness:
    return AccountHarness.of(num_pages, prefix_caching=False)


def first_tokens(harness: AccountHarness) -> str:
    """Names in the order in which they had their first token."""
    names: list[str] = []
    while harness.scheduler.has_work():
        names += [each.request_id for each in harness.step()[2] if each.index == 0]
    harness.check_answers()
    return " ".join(names)


def request_with(sla: Sla, delay_ms: float | None = None) -> Request:
    return Request(
        request_id="r",
        token_ids=TokenIds.of((1,)),
        arrival_s=100.0,
        sla=sla,
        scheduling_key=SchedulingKey(max_queue_delay_ms=delay_ms),
    )


def test_request_is_due_by_its_first_objective() -> None:
    assert due_s(request_with(Sla(ttft_ms=500.0, deadline_ms=9e3), 20.0)) == 100.5
    assert due_s(request_with(Sla(deadline_ms=9e3), 20.0)) == 109.0
    assert due_s(request_with(Sla(), 20.0)) == 100.02
    assert due_s(request_with(Sla(tpot_ms=5.0))) == 100.0 + DEFAULT_DUE_S


def test_one_key_orders_by_priority_then_deadline_then_arrival() -> None:
    harness = make_harness()
    for name, arrival_s, ttft_ms, priority in (
        ("late", 0.0, None, 0),
        ("due", 1.0, 50.0, 0),
        ("sooner", 2.0, 20.0, 0),
        ("urgent", 3.0, None, -1),
        ("last", 0.5, None, 0),
    ):
        sla = Sla(ttft_ms=ttft_ms)
        harness.add(name, range(64), arrival_s=arrival_s, sla=sla, priority=priority, tenant="t")
    assert first_tokens(harness) == "urgent due sooner late last"


def test_priorities_of_one_key_do_not_affect_others() -> None:
    harness = make_harness()
    for number in range(3):
        harness.add(f"n{number}", range(63), SamplingParams(max_tokens=1), tenant="noisy", priority=-9)
    harness.add("q", range(63), SamplingParams(max_tokens=1), tenant="quiet")
    assert first_tokens(harness) == "n0 q n1 n2"


def test_better_class_is_computed_first_and_alone() -> None:
    harness = make_harness()
    for number in range(2):
        harness.add(f"l{number}", range(63), tenant="low", scheduling_key=scheduling_key(rank=1))
    for number in range(2):
        harness.add(f"h{number}", range(63), tenant="high", priority=9)
    assert first_tokens(harness) == "h0 h1 l0 l1"


def test_quiet_key_does_not_wait_for_a_flood_of_another() -> None:
    harness = make_harness()
    for number in range(30):
        harness.add(f"n{number}", range(63), SamplingParams(max_tokens=1), tenant="noisy")
    for _ in range(5):
        harness.step()
    harness.add("q", range(63), SamplingParams(max_tokens=1), tenant="quiet", arrival_s=99.0)
    assert first_tokens(harness).split().index("q") <= 1


def test_key_within_its_share_gets_pages_of_a_key_beyond_its_share() -> None:
    harness = make_harness(num_pages=40)
    for number in range(6):
        harness.add(f"n{number}", range(12), SamplingParams(max_tokens=60), tenant="noisy")
    while harness.pool.num_available > 4:
        harness.step()
    (quiet,) = harness.add("q", range(40), SamplingParams(max_tokens=4), tenant="quiet", arrival_s=99.0)
    plan, _, _ = harness.step()
    assert plan.preempted and all(key[0].startswith("n") for key in plan.preempted)
    assert plan.admitted == (quiet.key,)
    while quiet.key in harness.live:
        harness.step()
        assert quiet.status is not SequenceStatus.WAITING and not quiet.num_preemptions
    harness.run()
