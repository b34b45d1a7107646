"""The router with its queue under overload, and what is not to hold up others."""

from collections.abc import Iterator

import msgspec
import pytest

from baton.messages.control import Dispatch, KvEventBatch, Measured, Pressure, Reachable, Rejected, Routed
from baton.messages.status import OverloadLevel
from baton.messages.workers import StepTimes, Worker
from baton.router.queue.overload import PRESSED_LOCAL_TOKENS
from baton.router.queue.tenant_queues import MIN_KEPT
from baton.router.redis.messages import AnyShared, SharedDispatch, SharedEnded
from baton.tenants import Degradation, Quotas, Refusal, Sla
from tests.node_peers import TestPeer, id_of
from tests.unit.router.queue_cases import asked
from tests.unit.router.reception_cases import (
    LONG,
    a_cluster,
    answers,
    end,
    fill,
    names,
    route,
    submit,
    tenant_of,
)
from tests.unit.router.router_cluster import Cluster, cluster


@pytest.fixture
def c() -> Iterator[Cluster]:
    yield from a_cluster()


def press(c: Cluster, level: OverloadLevel) -> None:
    """As if it had been climbed to."""
    c.router.admission_queue.overload.controller.level = level


def test_answers_are_clipped_where_the_tenant_allows_it(c: Cluster) -> None:
    press(c, OverloadLevel.CLIP)
    clips = Degradation(clip_max_tokens_to=3)
    submit(c, asked("r", degradation=clips), asked("s"), asked("t", attempt=1, degradation=clips))
    limits = [each.request.sampling.max_tokens for each in c["d0"].take(Dispatch)]
    assert limits == [3, 10, 10]
    assert tenant_of(c, "a").num_degraded == 1


def test_lowest_class_is_shed_for_higher_ones_and_never_the_only_one(c: Cluster) -> None:
    press(c, OverloadLevel.SHED)
    assert isinstance(submit(c, asked("only", rank=2))[0], Routed)
    submit(c, asked("high", rank=0))
    shed, kept = submit(
        c, asked("low", rank=2), asked("must", rank=2, degradation=Degradation(may_shed=False))
    )
    assert isinstance(shed, Rejected) and shed.refusal is Refusal.SHED and shed.retry_after_s > 0
    assert isinstance(kept, Routed)


def test_those_of_the_lowest_class_that_wait_are_shed_while_it_is_hopeless(c: Cluster) -> None:
    fill(c, rank=0, sla=Sla(ttft_ms=60_000))
    may_not = Degradation(may_shed=False)
    submit(
        c,
        asked("high", num_tokens=LONG, sla=Sla(ttft_ms=60_000)),
        *(asked(name, "b", num_tokens=LONG, rank=2) for name in ("low", "lower")),
        asked("must", "b", num_tokens=LONG, rank=2, degradation=may_not),
        asked("begun", "b", num_tokens=LONG, rank=2, attempt=1),
    )
    refused, at_work = [], tuple((id_of(name), 0) for name in ("f0", "f1"))
    for _ in range(16):
        c.router.admission_queue.overload.count_hopeless()
        c.beat("p0", "d0", attempts=at_work)
        c.tick(0.5)
        refused += answers(c)
    assert names(refused) == ["low", "lower"]
    kinds = {(each.refusal, each.retry_after_s > 0) for each in refused if isinstance(each, Rejected)}
    assert kinds == {(Refusal.SHED, True)} and len(c.router.admission_queue) == 3
    assert tenant_of(c, "b").refused == {Refusal.SHED: 2}


def test_workers_are_told_the_rungs_that_are_about_them(c: Cluster) -> None:
    for level, told in (
        (OverloadLevel.LOCAL_PREFILL, []),
        (OverloadLevel.MAKE_ROOM, [OverloadLevel.MAKE_ROOM]),
        (OverloadLevel.CALM, [OverloadLevel.CALM]),
    ):
        press(c, level)
        c.router._send_overload_level()
        assert [each.level for each in c["d0"].take(Pressure)] == told
    press(c, OverloadLevel.CLIP)
    c.router._send_overload_level()
    assert c.add("d1").only(Pressure).level is OverloadLevel.CLIP


def test_short_prompts_are_computed_where_they_are_decoded_under_pressure(c: Cluster) -> None:
    fill(c)
    press(c, OverloadLevel.SMALL_CHUNKS)
    c.router._dispatcher._pairing.press(256)
    (routed,) = submit(c, asked("r", num_tokens=200))
    assert isinstance(routed, Routed) and routed.prefill == ""


def test_short_prompts_stay_local_under_pressure_by_the_policy_of_costs_too() -> None:
    c = cluster(policy="cost")
    for name in ("p0", "d0"):
        c.add(name, num_pages=10_000, max_num_seqs=64)
    press(c, OverloadLevel.LOCAL_PREFILL)
    c.router._dispatcher.tick()
    press(c, OverloadLevel.LOCAL_PREFILL)
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
    cost_policy = c.router.cluster_state.policy
    chosen: list[object] = []
    monkeypatch.setattr(cost_policy, "choose", lambda *arguments: chosen.append(arguments))
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


@pytest.mark.parametrize(("wishes", "level"), [(True, OverloadLevel.QUEUE), (False, OverloadLevel.CLIP)])
def test_what_a_client_wishes_moves_nobody_else(c: Cluster, wishes: bool, level: OverloadLevel) -> None:
    steps = tuple(StepTimes(number, 0, 100 * number, 0.01) for number in range(1, 33))
    c["d0"].say(Measured(steps=steps))
    fill(c)
    may_not = Degradation(may_shed=False)
    submit(c, asked("w", sla=Sla(tpot_ms=0.001), degradation=may_not, has_unpromised_sla=wishes), asked("x"))
    at_work = tuple((id_of(name), 0) for name in ("f0", "f1", "w", "x"))
    for _ in range(60):
        c.beat("p0", "d0", attempts=at_work)
        c.tick(0.5)
    assert c.router.admission_queue.overload.level is level
    escalations = c.router.status().routers[0].queue.escalations
    assert list(escalations) == [each.name.lower() for each in list(OverloadLevel)[1 : level + 1]]


def test_an_attempt_that_nobody_has_begun_with_meets_the_quotas_again(c: Cluster) -> None:
    one = Quotas(max_concurrent_requests=1)
    submit(c, asked("r", quotas=one))
    again = msgspec.structs.replace(asked("s", quotas=one, attempt=1), is_begun=False)
    (refused,) = submit(c, again)
    assert isinstance(refused, Rejected) and refused.refusal is Refusal.MAX_CONCURRENT_REQUESTS
    begun = asked("t", quotas=one, attempt=1)
    assert isinstance(submit(c, begun)[0], Routed)


def test_ends_of_what_has_ended_are_forgotten(c: Cluster) -> None:
    for number in range(3 * MIN_KEPT):
        submit(c, asked(f"r{number}", num_tokens=4, sla=Sla(deadline_ms=86_000_000)))
        end(c, f"r{number}", num_tokens=1)
    assert len(c.router.admission_queue._deadlines._times) <= MIN_KEPT + 2


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
    def pages(self, worker_id: str, events: KvEventBatch) -> None: ...
    def share(self, message: AnyShared) -> None: ...


def test_room_that_another_router_tells_of_is_used(c: Cluster) -> None:
    other = SharedDispatch(
        request_id=id_of("o"),
        attempt=0,
        decode=id_of("d0"),
        prefill=id_of("p0"),
        num_prompt_tokens=LONG,
        num_tokens=LONG,
        num_output_tokens=1,
    )
    fill(c)
    c.router.cluster_state.link(Unheard())
    end(c, "f0")
    c.router.heard(other)
    assert submit(c, asked("r", num_tokens=LONG)) == []
    c.router.heard(SharedEnded(attempts=((id_of("o"), 0),)))
    assert names(answers(c)) == ["r"]


def test_first_does_not_wait_for_a_worker_that_is_kept_for_a_later_one() -> None:
    """Of one tenant: who is due earlier came later, and both wait for the only worker."""
    c = cluster()
    c.add("d0", num_pages=100, page_size=16, max_num_seqs=64)
    assert isinstance(submit(c, asked("running", num_tokens=1200))[0], Routed)
    assert submit(c, asked("late", num_tokens=1000, max_queue_delay_ms=50_000)) == []
    assert submit(c, asked("early", num_tokens=1000, max_queue_delay_ms=1000)) == []
    end(c, "running")
    assert names(answers(c)) == ["early"]
    end(c, "early")
    assert names(answers(c)) == ["late"]


@pytest.mark.parametrize("age_s", [0.0, 600.0])
def test_one_that_is_tried_again_is_not_late_at_once(c: Cluster, age_s: float) -> None:
    """Its worker died: it waits for a place for a tenth of what it was promised, which presses nobody."""
    fill(c)
    again = asked("again", num_tokens=LONG, attempt=1, sla=Sla(ttft_ms=60_000))
    assert submit(c, msgspec.structs.replace(again, age_s=age_s)) == []
    for _ in range(12):
        c.beat("p0", "d0", attempts=tuple((id_of(name), 0) for name in ("f0", "f1")))
        c.tick(0.5)
    assert c.router.admission_queue.overload.level is OverloadLevel.QUEUE
