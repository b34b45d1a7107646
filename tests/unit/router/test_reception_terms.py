"""The router with its queue: quotas, objectives, and what work is charged."""

from collections.abc import Iterator

import msgspec
import pytest

from baton.messages.control import Dispatch, Ended, Measured, Rejected, Routed, Started
from baton.messages.workers import PrefillTimes
from baton.router.queue.quotas import RequestWork
from baton.router.queue.tenant_queues import QueuedAttempt
from baton.tenants import Degradation, Quotas, Refusal, Sla
from tests.node_peers import id_of
from tests.unit.router.queue_cases import asked
from tests.unit.router.reception_cases import (
    LONG,
    a_cluster,
    answers,
    end,
    fill,
    names,
    submit,
    tenant_of,
)
from tests.unit.router.router_cluster import Cluster, cluster


@pytest.fixture
def c() -> Iterator[Cluster]:
    yield from a_cluster()


QUOTAS = [
    (Quotas(max_concurrent_requests=2), Refusal.MAX_CONCURRENT_REQUESTS),
    (Quotas(max_queued=0), Refusal.MAX_QUEUED),
    (Quotas(max_active_sequences=2, max_queued=0), Refusal.MAX_ACTIVE_SEQUENCES),
    (Quotas(tokens_per_s=100, burst_tokens=2 * LONG + 20), Refusal.TOKENS_PER_S),
]


@pytest.mark.parametrize(("quotas", "named"), QUOTAS)
def test_tenant_over_its_quota_is_refused_by_its_name_and_others_are_not(
    c: Cluster, quotas: Quotas, named: Refusal
) -> None:
    fill(c, quotas=quotas)
    (refused,) = submit(c, asked("r", num_tokens=LONG, quotas=quotas))
    assert isinstance(refused, Rejected) and refused.refusal is named
    assert str(named) not in refused.reason, "the gateway names the quota before the reason"
    assert refused.reason and refused.retry_after_s > 0
    assert isinstance(submit(c, asked("x", "x", num_tokens=LONG, quotas=quotas))[0], Routed)
    assert tenant_of(c, "a").refused == {named: 1}


def test_who_asks_for_all_attempts_of_the_router_leaves_some_to_others() -> None:
    c = cluster(max_attempts=50)
    c.add("d0", num_pages=10_000, max_num_seqs=64)
    answered = submit(c, *(asked(f"n{n}", "noisy") for n in range(50)))
    refused = [each for each in answered if isinstance(each, Rejected)]
    assert len(refused) == 10 and {each.refusal for each in refused} == {Refusal.NO_ROOM}
    assert "10 are free, 40 are the tenant's" in refused[0].reason
    quiet = [asked("q0", "quiet"), asked("q1", "quiet"), asked("again", "noisy", attempt=1)]
    assert all(isinstance(each, Routed) for each in submit(c, *quiet))


def test_tenant_with_all_its_active_ones_lets_others_pass(c: Cluster) -> None:
    one = Quotas(max_active_sequences=1)
    assert names(submit(c, asked("a0", quotas=one), asked("a1", quotas=one), asked("b0", "b"))) == [
        "a0",
        "b0",
    ]
    end(c, "a0")
    assert names(answers(c)) == ["a1"]


def test_wider_quota_holds_from_the_next_request_on(c: Cluster) -> None:
    one, two = Quotas(max_active_sequences=1), Quotas(max_active_sequences=2)
    submit(c, asked("a0", quotas=one), asked("a1", quotas=one))
    assert names(submit(c, asked("a2", quotas=two))) == ["a1"]
    end(c, "a0", "a1")
    assert names(answers(c)) == ["a2"]


def test_what_has_no_hope_is_refused_at_once(c: Cluster) -> None:
    for number in range(8):
        size = 100 + 300 * number
        times = PrefillTimes(id_of(f"t{number}"), 0, 0.0, 1e-3 * size, size, size)
        c["p0"].say(Measured(prefills=(times,)))
    fill(c)
    (refused,) = submit(c, asked("r", sla=Sla(ttft_ms=500)))
    assert isinstance(refused, Rejected) and refused.refusal is Refusal.SLO
    assert submit(c, asked("s", num_tokens=LONG, sla=Sla(ttft_ms=60_000))) == []
    assert submit(c, asked("u", attempt=1, sla=Sla(ttft_ms=500))) == []  # it was let in once


def test_what_waits_in_vain_is_refused_when_its_time_has_passed(c: Cluster) -> None:
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


def test_work_is_charged_as_it_is_used(c: Cluster) -> None:
    submit(c, asked("r", num_tokens=100, max_tokens=50))
    c["p0"].say(Measured(prefills=(PrefillTimes(id_of("r"), 0, 0.0, 0.1, 30, 100),)))
    assert tenant_of(c, "a").work_tokens == 0  # it is not known before the end, and never goes back
    end(c, "r", num_tokens=7)
    assert tenant_of(c, "a").work_tokens == 37


def test_second_attempt_pays_for_no_prompt(c: Cluster) -> None:
    submit(c, asked("r", num_tokens=100, max_tokens=50))
    c["g"].say(Ended(attempts=((id_of("r"), 0),), num_tokens=(0,)))
    assert tenant_of(c, "a").work_tokens == 100
    submit(c, asked("r", num_tokens=100, max_tokens=50, attempt=1))
    c["g"].say(Ended(attempts=((id_of("r"), 1),), num_tokens=(50,)))
    assert tenant_of(c, "a").work_tokens == 150


def test_objectives_that_were_met_and_missed_are_counted(c: Cluster) -> None:
    sla = Sla(ttft_ms=1000)
    submit(c, asked("quick", sla=sla), asked("slow", sla=sla))
    c["g"].say(Started(attempts=((id_of("quick"), 0),)))
    c.tick(1.5)
    c["g"].say(Started(attempts=((id_of("slow"), 0),)))
    status = tenant_of(c, "a")
    assert (status.num_met, status.num_missed, status.num_dispatched) == (1, 1, 2)


def test_what_has_waited_before_it_came_here_counts(c: Cluster) -> None:
    """Its gateway submits again what waited at a router that is gone: its time goes on."""
    sla = Sla(ttft_ms=10_000.0)
    fill(c)
    old, new = asked("old", "a", num_tokens=LONG, sla=sla), asked("new", "a", num_tokens=LONG, sla=sla)
    c["g"].say(msgspec.structs.replace(old, age_s=8.0))
    c["g"].say(new)
    assert not answers(c)
    c.tick(2.5)
    (expired,) = answers(c)
    assert isinstance(expired, Rejected) and names([expired]) == ["old"]
    assert expired.refusal is Refusal.SLO


def test_what_is_too_old_when_it_comes_is_refused_at_once(c: Cluster) -> None:
    fill(c)
    late = asked("late", "a", num_tokens=LONG, sla=Sla(ttft_ms=10_000.0))
    (refused,) = submit(c, msgspec.structs.replace(late, age_s=9.9))
    assert isinstance(refused, Rejected) and refused.refusal is Refusal.SLO


def test_age_goes_on_to_the_workers(c: Cluster) -> None:
    submit(c, msgspec.structs.replace(asked("r", "a"), age_s=3.0))
    assert c["d0"].only(Dispatch).age_s == pytest.approx(3.0)


def test_what_was_being_answered_has_not_waited_for_its_turn(c: Cluster) -> None:
    """Its workers died after a minute: only from then on does it wait, for operators."""
    fill(c)
    c["g"].say(msgspec.structs.replace(asked("again", num_tokens=LONG, attempt=1), age_s=60.0))
    c.tick(0.5)
    assert tenant_of(c, "a").oldest_wait_s == pytest.approx(0.5)
    end(c, "f0", "f1")
    assert names(answers(c)) == ["again"]
    assert tenant_of(c, "a").waited_s == pytest.approx(0.5)
    dispatched = [each for each in c["d0"].received if isinstance(each, Dispatch)]
    assert dispatched[-1].age_s == pytest.approx(60.5)


def test_nobody_has_waited_for_less_than_no_time() -> None:
    """What workers have begun with waits for its turn from its age after it came, but for rounding."""
    submit = msgspec.structs.replace(asked("r", "a"), age_s=7.7, is_begun=True)
    waiting = QueuedAttempt("g", submit, since_s=0.7 - 7.7, due_s=0.0, work=RequestWork(0.0, 1.0))
    assert 0.7 - (waiting.since_s + 7.7) < 0.0, "what no message may say"
    assert waiting.queued_s(0.7) == 0.0
    assert waiting.queued_s(1.7) == pytest.approx(1.0)
