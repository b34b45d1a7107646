"""The router with its queue: who is let out, refused and told, by what gateways and workers say."""

from collections.abc import Iterator

import msgspec
import pytest

from baton.control import (
    Dispatch,
    Ended,
    Measured,
    PageEvents,
    Pressure,
    Reachable,
    Rejected,
    Routed,
    Started,
    Status,
    StatusQuery,
    Submit,
)
from baton.errors import ProtocolError
from baton.pressure import Rung, TenantStatus
from baton.router.capacity import MIN_COMPUTING
from baton.router.overload import PRESSED_LOCAL_TOKENS
from baton.router.reception import MIN_ENDS
from baton.router.redis_messages import AnyShared, SharedDispatch, SharedEnded
from baton.tenancy import Degradation, Quotas, Refusal, Sla
from baton.times import PrefillTimes, StepTimes
from baton.worker import Worker
from tests.node_peers import TestPeer, id_of
from tests.unit.router.queue_cases import asked
from tests.unit.router.router_cluster import Cluster, cluster

LONG = 3000  # tokens: so many keep a worker busy for longer than prompts are let out ahead


@pytest.fixture
def c() -> Iterator[Cluster]:
    made = cluster()
    for name in ("p0", "d0"):
        made.add(name, num_pages=10_000, max_num_seqs=64)
    yield made
    made.router.reception.check_integrity()
    made.router.books.check_integrity()


def submit(c: Cluster, *submits: Submit, gateway: str = "g") -> list[Routed | Rejected]:
    for each in submits:
        c[gateway].say(each)
    return answers(c, gateway)


def answers(c: Cluster, gateway: str = "g") -> list[Routed | Rejected]:
    """To what was submitted, in their order."""
    found = [message for message in c[gateway].received if isinstance(message, Routed | Rejected)]
    c[gateway].received.clear()
    return found


def route(c: Cluster, asked: Submit) -> str:
    """The decode worker that it went to, at once; its first token is there then."""
    (routed,) = submit(c, asked)
    assert isinstance(routed, Routed)
    c["g"].say(Started(attempts=((asked.request.request_id, asked.request.attempt),)))
    return routed.decode


def names(answered: list[Routed | Rejected]) -> list[str]:
    return [bytes.fromhex(each.request_id).decode().rstrip("\0") for each in answered]


def fill(c: Cluster, tenant: str = "a", **fields: object) -> None:
    """All places of the prefill worker are taken by this tenant's prompts."""
    filling = [asked(f"f{n}", tenant, num_tokens=LONG, **fields) for n in range(MIN_COMPUTING)]  # type: ignore[arg-type]
    assert all(isinstance(each, Routed) for each in submit(c, *filling))


def end(c: Cluster, *named: str, num_tokens: int = 5) -> None:
    keys = tuple((id_of(name), 0) for name in named)
    c["g"].say(Started(attempts=keys))
    c["g"].say(Ended(attempts=keys, num_tokens=(num_tokens,) * len(keys)))


def tenant_of(c: Cluster, tenant: str) -> TenantStatus:
    operator = TestPeer.operator(c.router)
    operator.say(StatusQuery())
    queue = operator.only(Status).queue
    return next(each for each in queue.tenants if each.tenant == tenant)


def test_where_there_is_room_nobody_waits(c: Cluster) -> None:
    assert isinstance(submit(c, asked("r"))[0], Routed)
    assert len(c.router.reception) == 0


def test_what_has_no_room_waits_and_is_let_out_when_a_prompt_is_done(c: Cluster) -> None:
    fill(c)
    assert submit(c, asked("r", num_tokens=LONG)) == []
    assert len(c.router.reception) == 1
    c["g"].say(Started(attempts=((id_of("f0"), 0),)))
    assert names(answers(c)) == ["r"]
    assert len(c["d0"].take(Dispatch)) == MIN_COMPUTING + 1


def test_full_decode_workers_are_waited_for(c: Cluster) -> None:
    c["p0"].leave()
    c["d0"].leave()
    c.add("d1", num_pages=10_000, max_num_seqs=1)
    submits = [asked(name, num_tokens=1) for name in ("a", "b", "c")]
    assert names(submit(c, *submits)) == ["a", "b"]  # one runs, one is ready when it has ended
    end(c, "a")
    assert names(answers(c)) == ["c"]


def test_those_that_wait_are_let_out_by_turns_of_tenants(c: Cluster) -> None:
    fill(c)
    waiting = [asked(f"a{n}", "a", num_tokens=LONG) for n in range(3)]
    submit(c, *waiting, asked("x0", "x", num_tokens=LONG))  # the first of "x" needs no place
    submit(c, asked("x1", "x", num_tokens=LONG))
    for name in ("f0", "f1", "x0"):
        end(c, name)
    assert names(answers(c))[:2] in (["a0", "x1"], ["x1", "a0"])
    end(c, "a0", "x1", "a1")
    end(c, "a1", "a2")


def test_earliest_deadline_of_a_tenant_comes_first(c: Cluster) -> None:
    fill(c)
    submit(
        c,
        asked("late", num_tokens=LONG, max_queue_delay_ms=60_000),
        asked("early", num_tokens=LONG, max_queue_delay_ms=1000),
    )
    end(c, "f0")
    assert names(answers(c)) == ["early"]


def test_request_that_ends_while_it_waits_is_gone(c: Cluster) -> None:
    fill(c)
    submit(c, asked("r", num_tokens=LONG))
    c["g"].say(Ended(attempts=((id_of("r"), 0),)))
    assert len(c.router.reception) == 0
    end(c, "f0", "f1")
    assert answers(c) == []
    assert not c["d0"].take(Dispatch)[MIN_COMPUTING:]


def test_requests_of_a_gateway_that_leaves_wait_no_more(c: Cluster) -> None:
    c.peers["h"] = TestPeer.gateway(c.router, "h")
    c.all_reach_all()
    fill(c)
    submit(c, asked("h0", num_tokens=LONG), gateway="h")
    submit(c, asked("r", num_tokens=LONG))
    c["h"].leave()
    end(c, "f0")
    assert names(answers(c)) == ["r"] and len(c.router.reception) == 0


def test_same_attempt_twice_is_refused_while_it_waits_too(c: Cluster) -> None:
    fill(c)
    submit(c, asked("r", num_tokens=LONG))
    with pytest.raises(ProtocolError, match="twice"):
        c["g"].say(asked("r", num_tokens=LONG))


def test_what_nobody_can_take_any_more_is_told_so(c: Cluster) -> None:
    fill(c)
    submit(c, asked("r", num_tokens=LONG))
    c["d0"].leave()
    end(c, "f0", "f1")
    (rejected,) = answers(c)
    assert isinstance(rejected, Rejected) and rejected.refusal is Refusal.NO_ROOM


def test_room_that_a_newcomer_brings_is_used(c: Cluster) -> None:
    fill(c)
    submit(c, asked("r", num_tokens=LONG))
    c.add("p1")
    assert names(answers(c)) == ["r"]


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
    assert str(named) in refused.reason and refused.retry_after_s > 0
    assert isinstance(submit(c, asked("x", "x", num_tokens=LONG, quotas=quotas))[0], Routed)
    assert tenant_of(c, "a").refused == {named: 1}


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


def press(c: Cluster, rung: Rung) -> None:
    """As if it had been climbed to."""
    c.router.reception.overload.ladder.rung = rung


def test_answers_are_clipped_where_the_tenant_allows_it(c: Cluster) -> None:
    press(c, Rung.CLIP)
    clips = Degradation(clip_max_tokens_to=3)
    submit(c, asked("r", degradation=clips), asked("s"), asked("t", attempt=1, degradation=clips))
    limits = [each.request.sampling.max_tokens for each in c["d0"].take(Dispatch)]
    assert limits == [3, 10, 10]
    assert tenant_of(c, "a").num_degraded == 1


def test_lowest_class_is_shed_for_higher_ones_and_never_the_only_one(c: Cluster) -> None:
    press(c, Rung.SHED)
    assert isinstance(submit(c, asked("only", rank=2))[0], Routed)
    submit(c, asked("high", rank=0))
    shed, kept = submit(
        c, asked("low", rank=2), asked("must", rank=2, degradation=Degradation(may_shed=False))
    )
    assert isinstance(shed, Rejected) and shed.refusal is Refusal.SHED and shed.retry_after_s > 0
    assert isinstance(kept, Routed)


def test_workers_are_told_the_rungs_that_are_about_them(c: Cluster) -> None:
    for rung, told in ((Rung.LOCAL_PREFILL, []), (Rung.SWAP_OUT, [Rung.SWAP_OUT]), (Rung.CALM, [Rung.CALM])):
        press(c, rung)
        c.router._press()
        assert [each.rung for each in c["d0"].take(Pressure)] == told
    press(c, Rung.CLIP)
    c.router._press()
    assert c.add("d1").only(Pressure).rung is Rung.CLIP


def test_short_prompts_are_computed_where_they_are_decoded_under_pressure(c: Cluster) -> None:
    fill(c)
    press(c, Rung.SMALL_CHUNKS)
    c.router._dispatcher._pairing.press(256)
    (routed,) = submit(c, asked("r", num_tokens=200))
    assert isinstance(routed, Routed) and routed.prefill == ""


def test_short_prompts_stay_local_under_pressure_by_the_policy_of_costs_too() -> None:
    c = cluster(policy="cost")
    for name in ("p0", "d0"):
        c.add(name, num_pages=10_000, max_num_seqs=64)
    press(c, Rung.LOCAL_PREFILL)
    c.router._dispatcher.tick()
    press(c, Rung.LOCAL_PREFILL)
    c.router._dispatcher._pairing.press(PRESSED_LOCAL_TOKENS)
    routed = submit(c, *(asked(f"r{n}", num_tokens=200) for n in range(20)))
    assert [each.prefill for each in routed if isinstance(each, Routed)] == [""] * 20


def test_who_waits_for_full_workers_costs_no_comparison_and_counts_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    c = cluster(policy="cost")
    names = [f"d{n}" for n in range(4)]
    c.add("p0", num_pages=10_000)
    for name in names:
        c.add(name, num_pages=64, page_size=16, max_num_seqs=1)
    taken = submit(c, *(asked(f"r{n}", num_tokens=20) for n in range(4 * 2)))
    num_routed = sum(isinstance(each, Routed) for each in taken)
    assert 4 <= num_routed <= 8
    while submit(c, asked(f"more{num_routed}", num_tokens=20)):
        num_routed += 1
    chooser = c.router.knowledge.chooser
    assert chooser is not None
    chosen: list[object] = []
    monkeypatch.setattr(chooser, "choose", lambda *arguments: chosen.append(arguments))
    for _ in range(10):
        c.beat(*names)
        c.tick()
    assert not chosen


def test_small_requests_go_past_a_large_one_but_not_to_the_worker_that_is_kept_for_it() -> None:
    c = cluster()
    c.add("p0", num_pages=10_000)
    decoders = [f"d{n}" for n in range(3)]
    for name in decoders:
        c.add(name, num_pages=100, page_size=16, max_num_seqs=64)
    first = [route(c, asked(f"b{n}", "b", num_tokens=900)) for n in range(3)]
    assert len(set(first)) == 3
    assert submit(c, asked("large", "b", num_tokens=1500)) == []
    past = {route(c, asked(f"c{n}", "c", num_tokens=10)) for n in range(8)}
    (kept,) = set(first) - past
    end(c, f"b{first.index(kept)}")
    (large,) = answers(c)
    assert isinstance(large, Routed) and large.decode == kept


@pytest.mark.parametrize(("wishes", "rung"), [(True, Rung.QUEUE), (False, Rung.CLIP)])
def test_what_a_client_wishes_moves_nobody_else(c: Cluster, wishes: bool, rung: Rung) -> None:
    steps = tuple(StepTimes(number, 0, 100 * number, 0.01) for number in range(1, 33))
    c["d0"].say(Measured(steps=steps))
    fill(c)
    may_not = Degradation(may_shed=False)
    submit(c, asked("w", sla=Sla(tpot_ms=0.001), degradation=may_not, wishes=wishes), asked("x"))
    for _ in range(60):
        c.beat("p0", "d0")
        c.tick(0.5)
    assert c.router.reception.overload.rung is rung


def test_an_attempt_that_nobody_has_begun_with_meets_the_quotas_again(c: Cluster) -> None:
    one = Quotas(max_concurrent_requests=1)
    submit(c, asked("r", quotas=one))
    again = msgspec.structs.replace(asked("s", quotas=one, attempt=1), is_begun=False)
    (refused,) = submit(c, again)
    assert isinstance(refused, Rejected) and refused.refusal is Refusal.MAX_CONCURRENT_REQUESTS
    begun = asked("t", quotas=one, attempt=1)
    assert isinstance(submit(c, begun)[0], Routed)


def test_ends_of_what_has_ended_are_forgotten(c: Cluster) -> None:
    for number in range(3 * MIN_ENDS):
        submit(c, asked(f"r{number}", num_tokens=4, sla=Sla(deadline_ms=86_000_000)))
        end(c, f"r{number}", num_tokens=1)
    assert len(c.router.reception._ends) <= MIN_ENDS + 2


def test_gateway_that_reaches_nobody_does_not_hold_up_others(c: Cluster) -> None:
    c.peers["h"] = TestPeer.gateway(c.router, "h")
    c["h"].say(Reachable(workers=()))
    (rejected,) = submit(c, asked("x", "x"), gateway="h")
    assert isinstance(rejected, Rejected) and rejected.refusal is Refusal.NO_ROOM
    assert isinstance(submit(c, asked("r"))[0], Routed)


class Unheard:
    """A link to other routers, which do not listen."""

    def joined(self, worker: Worker) -> None: ...
    def left(self, worker_id: str) -> None: ...
    def pages(self, worker_id: str, events: PageEvents) -> None: ...
    def share(self, message: AnyShared) -> None: ...


def test_room_that_another_router_tells_of_is_used(c: Cluster) -> None:
    other = SharedDispatch(
        request_id=id_of("o"),
        attempt=0,
        decode=id_of("d0"),
        prefill=id_of("p0"),
        num_prompt_tokens=LONG,
        num_tokens=LONG,
    )
    fill(c)
    c.router.knowledge.link(Unheard())
    end(c, "f0")
    c.router.heard(other)
    assert submit(c, asked("r", num_tokens=LONG)) == []
    c.router.heard(SharedEnded(attempts=((id_of("o"), 0),)))
    assert names(answers(c)) == ["r"]
