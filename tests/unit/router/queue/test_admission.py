"""The router with its queue: requests wait, are dispatched, refused and charged, as their gateway sees it."""

from collections.abc import Iterator

import msgspec
import pytest

from baton.errors import ProtocolError
from baton.messages.control import Dispatch, Ended, Measured, Rejected, Routed
from baton.messages.operations import Status
from baton.messages.workers import PrefillTimes
from baton.router.queue.admission import MIN_COMPUTING
from baton.router.queue.quotas import RequestWork
from baton.router.queue.tenant_queues import QueuedAttempt
from baton.tenants import Degradation, Quotas, Refusal, Sla
from tests.node_peers import id_of
from tests.unit.router.queue_cases import (
    LONG,
    a_cluster,
    answers,
    asked,
    end,
    fill,
    names,
    run_while_filled,
    start,
    submit,
    tenant_of,
)
from tests.unit.router.router_cluster import Cluster, cluster


@pytest.fixture
def c() -> Iterator[Cluster]:
    yield from a_cluster()


# Waiting and dispatch.


def test_request_without_a_slot_waits_until_a_prompt_is_computed(c: Cluster) -> None:
    fill(c)
    assert submit(c, asked("r", num_tokens=LONG)) == []
    assert len(c.router.admission_queue) == 1
    start(c, "f0")
    assert names(answers(c)) == ["r"]
    assert len(c["d0"].take(Dispatch)) == MIN_COMPUTING + 1


def test_tenants_take_turns(c: Cluster) -> None:
    fill(c)
    waiting = [asked(f"a{n}", "a", num_tokens=LONG) for n in range(3)]
    submit(c, *waiting, asked("x0", "x", num_tokens=LONG))  # x0 overtakes the prompts of "a"
    submit(c, asked("x1", "x", num_tokens=LONG))
    for name in ("f0", "f1", "x0"):
        end(c, name)
    assert names(answers(c))[:2] in (["a0", "x1"], ["x1", "a0"])
    end(c, "a0", "x1", "a1")
    end(c, "a1", "a2")


@pytest.mark.parametrize("waits", [False, True])
def test_attempt_submitted_twice_is_an_offence(c: Cluster, waits: bool) -> None:
    if waits:
        fill(c)
    assert bool(submit(c, asked("r", num_tokens=LONG))) is not waits
    with pytest.raises(ProtocolError, match="twice"):
        c["g"].say(asked("r", num_tokens=LONG))


def test_waiting_request_is_rejected_when_no_decode_worker_is_left(c: Cluster) -> None:
    fill(c)
    submit(c, asked("r", num_tokens=LONG))
    c["d0"].leave()
    end(c, "f0", "f1")
    (rejected,) = answers(c)
    assert isinstance(rejected, Rejected) and rejected.refusal is Refusal.NO_ROOM


def test_new_worker_takes_waiting_requests(c: Cluster) -> None:
    fill(c)
    submit(c, asked("r", num_tokens=LONG))
    c.add("p1")
    assert names(answers(c)) == ["r"]


# Quotas.

QUOTAS = [
    (Quotas(max_concurrent_requests=2), Refusal.MAX_CONCURRENT_REQUESTS),
    (Quotas(max_queued=0), Refusal.MAX_QUEUED),
    (Quotas(max_active_sequences=2, max_queued=0), Refusal.MAX_ACTIVE_SEQUENCES),
    (Quotas(tokens_per_s=100, burst_tokens=2 * LONG + 20), Refusal.TOKENS_PER_S),
]


@pytest.mark.parametrize(("quotas", "named"), QUOTAS)
def test_refusal_names_the_quota_and_other_tenants_are_admitted(
    c: Cluster, quotas: Quotas, named: Refusal
) -> None:
    fill(c, quotas=quotas)
    (refused,) = submit(c, asked("r", num_tokens=LONG, quotas=quotas))
    assert isinstance(refused, Rejected) and refused.refusal is named
    assert str(named) not in refused.reason, "the gateway names the quota before the reason"
    assert refused.reason and refused.retry_after_s > 0
    assert isinstance(submit(c, asked("x", "x", num_tokens=LONG, quotas=quotas))[0], Routed)
    assert tenant_of(c, "a").refused == {named: 1}


def test_one_tenant_cannot_take_all_attempts_of_the_router() -> None:
    c = cluster(max_attempts=50)
    c.add("d0", num_pages=10_000, max_num_seqs=64)
    answered = submit(c, *(asked(f"n{n}", "noisy") for n in range(50)))
    refused = [each for each in answered if isinstance(each, Rejected)]
    assert len(refused) == 10 and {each.refusal for each in refused} == {Refusal.NO_ROOM}
    assert "10 are free, 40 are the tenant's" in refused[0].reason
    quiet = [asked("q0", "quiet"), asked("q1", "quiet"), asked("again", "noisy", attempt=1)]
    assert all(isinstance(each, Routed) for each in submit(c, *quiet))


def test_repeated_attempt_meets_the_quotas_unless_its_answer_has_begun(c: Cluster) -> None:
    one = Quotas(max_concurrent_requests=1)
    submit(c, asked("r", quotas=one))
    again = msgspec.structs.replace(asked("s", quotas=one, attempt=1), is_begun=False)
    (refused,) = submit(c, again)
    assert isinstance(refused, Rejected) and refused.refusal is Refusal.MAX_CONCURRENT_REQUESTS
    begun = asked("t", quotas=one, attempt=1)
    assert isinstance(submit(c, begun)[0], Routed)


# Objectives and deadlines.


def teach(c: Cluster, *, token_s: float) -> None:
    """Have a prefill worker report what prompts took."""
    for size in range(100, 2500, 300):
        times = PrefillTimes(id_of(f"t{size}"), 0, 0.0, token_s * size, size, size)
        c["p0"].say(Measured(prefills=(times,)))


def test_request_on_trial_is_dispatched_at_its_turn(c: Cluster) -> None:
    """No idle worker keeps the objective as predicted; predictions are learnt from dispatched requests."""
    teach(c, token_s=1e-3)
    fill(c)
    sla = Sla(ttft_ms=500)
    (refused,) = submit(c, *(asked(name, num_tokens=LONG, sla=sla) for name in ("trial", "second")))
    assert isinstance(refused, Rejected) and names([refused]) == ["second"]
    c.tick(0.1)
    start(c, "f0")
    (routed,) = answers(c)
    assert isinstance(routed, Routed) and names([routed]) == ["trial"]


def test_request_that_would_miss_its_objective_is_refused_at_once(c: Cluster) -> None:
    teach(c, token_s=1e-3)
    fill(c)
    (refused,) = submit(c, asked("r", sla=Sla(ttft_ms=500)))
    assert isinstance(refused, Rejected) and refused.refusal is Refusal.SLO
    assert submit(c, asked("s", num_tokens=LONG, sla=Sla(ttft_ms=60_000))) == []
    assert submit(c, asked("u", attempt=1, sla=Sla(ttft_ms=500))) == [], "a begun answer is never refused"


def test_waiting_request_is_refused_when_its_time_has_passed(c: Cluster) -> None:
    fill(c)
    may_not = Degradation(may_shed=False)
    submit(
        c,
        asked("first", num_tokens=LONG, sla=Sla(ttft_ms=1000)),
        asked("dead", num_tokens=LONG, sla=Sla(deadline_ms=1000), degradation=may_not),
        asked("kept", num_tokens=LONG, sla=Sla(ttft_ms=1000), degradation=may_not),
    )
    c.tick(0.9)
    assert answers(c) == []
    c.beat("p0", "d0")
    c.tick(0.2)
    refused = answers(c)
    kinds = [each.refusal for each in refused if isinstance(each, Rejected)]
    assert dict(zip(names(refused), kinds, strict=True)) == {
        "first": Refusal.SLO,
        "dead": Refusal.DEADLINE,
    }


def test_met_and_missed_objectives_are_counted(c: Cluster) -> None:
    sla = Sla(ttft_ms=1000)
    submit(c, asked("quick", sla=sla), asked("slow", sla=sla))
    start(c, "quick")
    c.tick(1.5)
    start(c, "slow")
    status = tenant_of(c, "a")
    assert (status.num_met, status.num_missed, status.num_dispatched) == (1, 1, 2)


def test_begun_answer_waits_from_its_new_submission_on(c: Cluster) -> None:
    fill(c)
    c["g"].say(msgspec.structs.replace(asked("again", num_tokens=LONG, attempt=1), age_s=60.0))
    c.tick(0.5)
    assert tenant_of(c, "a").oldest_wait_s == pytest.approx(0.5)
    end(c, "f0", "f1")
    assert names(answers(c)) == ["again"]
    assert tenant_of(c, "a").waited_s == pytest.approx(0.5)
    dispatched = [each for each in c["d0"].received if isinstance(each, Dispatch)]
    assert dispatched[-1].age_s == pytest.approx(60.5)


def test_rounding_makes_no_wait_negative() -> None:
    submit = msgspec.structs.replace(asked("r", "a"), age_s=7.7, is_begun=True)
    waiting = QueuedAttempt("g", submit, since_s=0.7 - 7.7, due_s=0.0, work=RequestWork(0.0, 1.0))
    assert 0.7 - (waiting.since_s + 7.7) < 0.0, "this is why"
    assert waiting.queued_s(0.7) == 0.0
    assert waiting.queued_s(1.7) == pytest.approx(1.0)


# Work.


def test_tenant_is_charged_the_used_work_and_no_prompt_twice(c: Cluster) -> None:
    submit(c, asked("r", num_tokens=100, max_tokens=50))
    c["p0"].say(Measured(prefills=(PrefillTimes(id_of("r"), 0, 0.0, 0.1, 30, 100),)))
    assert tenant_of(c, "a").work_tokens == 0, "the work of a running request is unknown"
    c["g"].say(Ended(attempts=((id_of("r"), 0),), num_tokens=(7,)))
    assert tenant_of(c, "a").work_tokens == 37
    submit(c, asked("r", num_tokens=100, max_tokens=50, attempt=1))
    c["g"].say(Ended(attempts=((id_of("r"), 1),), num_tokens=(50,)))
    assert tenant_of(c, "a").work_tokens == 87


# A clock that jumps, as after a suspended machine.

BUCKET = Quotas(tokens_per_s=10, burst_tokens=2000)


def test_clock_that_jumps_back_adds_no_tokens_and_loses_no_request(c: Cluster) -> None:
    assert isinstance(submit(c, asked("spends", "t", num_tokens=1990, quotas=BUCKET))[0], Routed)
    end(c, "spends", num_tokens=10)
    fill(c)
    sla = Sla(ttft_ms=60_000, deadline_ms=80_000)
    assert submit(c, asked("waits", num_tokens=LONG, sla=sla)) == []
    c.clock.jump(-5000.0)
    run_while_filled(c, 8)
    assert answers(c) == []
    (refused,) = submit(c, asked("more", "t", num_tokens=1990, quotas=BUCKET))
    assert isinstance(refused, Rejected) and refused.refusal is Refusal.TOKENS_PER_S
    assert 100 < refused.retry_after_s < 250
    status = msgspec.msgpack.encode(c.router.status())
    assert msgspec.msgpack.decode(status, type=Status).queue.num_queued == 1
    end(c, "f0")
    assert names(answers(c)) == ["waits"]


def test_clock_that_jumps_forward_ends_overdue_requests_only(c: Cluster) -> None:
    fill(c)
    waiting = [asked("due", num_tokens=LONG, sla=Sla(deadline_ms=1000)), asked("patient", num_tokens=LONG)]
    assert submit(c, *waiting) == []
    c.clock.jump(4.0)
    run_while_filled(c, 1)
    (expired,) = answers(c)
    assert isinstance(expired, Rejected) and expired.refusal is Refusal.DEADLINE
    end(c, "f0", "f1")
    assert names(answers(c)) == ["patient"]


def test_retry_time_stays_within_bounds_after_jumps(c: Cluster) -> None:
    fill(c)
    retries_s = []
    for seconds in (0.0, -1000.0, 4.0, -50.0):
        c.clock.jump(seconds)
        run_while_filled(c, 1)
        found = submit(c, asked(f"r{seconds}", num_tokens=LONG, sla=Sla(ttft_ms=1)))
        run_while_filled(c, 2)
        retries_s += [each.retry_after_s for each in (*found, *answers(c)) if isinstance(each, Rejected)]
    assert len(retries_s) == 4 and all(0 < each <= 60 for each in retries_s)
