"""The policy `cost` through the router's messages: workers' reports decide where prompts go."""

import msgspec
import pytest

from baton.messages.control import (
    Decision,
    Dispatch,
    Ended,
    KvEventsWanted,
    Measured,
    Prefill,
    PullSource,
    Routed,
    Started,
)
from baton.messages.operations import Decisions, Explain
from baton.messages.workers import PrefillTimes
from baton.request import Request, TokenIds
from baton.router.sliced_work import PromptKeys, family_of
from tests.node_peers import TestPeer, a_request, a_worker, id_of
from tests.unit.router.router_cluster import Cluster, cluster, stored


def cost_cluster(*workers: str, policy: str = "cost") -> Cluster:
    c = cluster(policy=policy)
    for name in workers:
        c.add(name, num_pages=16_384, max_model_len=65_536, max_num_seqs=128)
    return c


def long_request(name: str, num_tokens: int = 8000) -> Request:
    return a_request(name, num_tokens)


def route(c: Cluster, request: Request) -> tuple[Routed, Dispatch]:
    routed = c.submit(request)
    assert isinstance(routed, Routed)
    decode = next(peer for peer in c.peers.values() if peer.id == routed.decode)
    return routed, decode.only(Dispatch)


def explained(c: Cluster, request_id: str) -> Decision:
    operator = TestPeer.operator(c.router)
    operator.say(Explain(request_id=request_id))
    (decision,) = operator.only(Decisions).decisions
    return decision


def test_only_policies_with_a_prefix_index_ask_for_pages() -> None:
    assert cost_cluster("d0")["d0"].only(KvEventsWanted)
    assert cluster("d0")["d0"].take(KvEventsWanted) == []


def test_sibling_of_a_running_prompt_goes_to_the_same_worker() -> None:
    c = cost_cluster("p0", "p1", "p2", "d0")
    c.decode_others("d0", 32)
    first, _ = route(c, long_request("a"))
    later = a_request("b", 8200)
    assert route(c, later)[0].prefill == first.prefill


def test_prefix_of_a_busy_worker_is_pulled_by_another() -> None:
    c = cost_cluster("p0", "p1", "d0")
    c.decode_others("d0", 64)
    c.hold("p0", long_request("x"), 400)
    for number, num_tokens in enumerate((18_000, 27_000, 27_000)):
        tokens = tuple(range(10**6 * (number + 1), 10**6 * (number + 1) + num_tokens))
        other = Request(request_id=id_of(f"o{number}"), token_ids=TokenIds.of(tokens))
        c.submit(other, avoid=(id_of("p0" if number == 0 else "p1"),))  # p1 waits long enough to hide a pull
    for name in ("p1", "d0"):
        c[name].received.clear()
    routed, dispatch = route(c, long_request("a"))
    assert routed.prefill == id_of("p1") and dispatch.source is None
    source = c["p1"].only(Prefill).source
    assert source == PullSource(id_of("p0"), 6400)


def test_worker_of_other_weights_is_no_pull_source() -> None:
    c = cost_cluster("p0", "d0")
    for name in ("p1", "d1"):
        c.add(name, num_pages=16_384, max_model_len=65_536, max_num_seqs=128, fingerprint="other")
    keys = PromptKeys().keys(family_of(a_worker("p1", fingerprint="other")), long_request("x"))
    c["p1"].say(stored(keys))
    c.router.cluster_state.model.learn_size(1000, 1)  # so few bytes that pulling would be cheapest
    c.submit(long_request("a"))
    sources = {(each.prefill or each.decode): each.source for each in explained(c, id_of("a")).weighed}
    assert sources == {id_of("p0"): "", id_of("d0"): "", id_of("p1"): "", id_of("d1"): id_of("p1")}


def test_idle_decode_worker_computes_a_short_prompt_and_a_busy_one_does_not() -> None:
    c = cost_cluster("p0", "d0")
    assert route(c, a_request("a", 100))[0].prefill == ""
    c.decode_others("d0", 48)
    assert route(c, long_request("b"))[0].prefill == id_of("p0")


def test_measured_slow_worker_gets_fewer_requests() -> None:
    c = cost_cluster("p0", "p1", "d0")
    c.decode_others("d0", 64)
    for number in range(32):
        for name, token_s in (("p0", 1e-2), ("p1", 1e-5)):
            times = PrefillTimes(id_of("none"), 0, 0.0, token_s * (100 + number), 100 + number, 100 + number)
            c[name].say(Measured(prefills=(times,)))
    assert {
        route(c, a_request(f"r{number}", 640, cache_salt=bytes([number])))[0].prefill for number in range(4)
    } == {id_of("p1")}


def test_gap_in_the_events_of_a_worker_is_asked_about() -> None:
    c = cost_cluster("d0")
    c["d0"].take(KvEventsWanted)
    c.hold("d0", long_request("x"), 4)
    assert c["d0"].take(KvEventsWanted) == []
    c["d0"].say(stored(b"k" * 8, first=9))
    assert c["d0"].only(KvEventsWanted)


def test_pages_of_a_worker_that_left_do_not_count() -> None:
    c = cost_cluster("p0", "p1", "d0")
    c.decode_others("d0", 32)
    c.hold("p0", long_request("x"), 400)
    c["p0"].leave()
    routed, dispatch = route(c, long_request("a"))
    assert (routed.prefill, dispatch.source) == (id_of("p1"), None)


def test_decision_is_explained_with_its_measured_times() -> None:
    c = cost_cluster("p0", "p1", "d0")
    c.decode_others("d0", 32)
    routed, _ = route(c, long_request("a"))
    c.clock.advance(0.5)
    c["g"].say(Started(attempts=((id_of("a"), 0),)))
    times = PrefillTimes(id_of("a"), 0, 0.1, 0.3, 8000, 8000, moved_bytes=1000, exposed_s=0.01)
    prefill = next(peer for peer in c.peers.values() if peer.id == routed.prefill)
    prefill.say(Measured(prefills=(times,)))
    decision = explained(c, id_of("a"))
    assert (decision.reason, decision.num_tokens) == ("cost", 8000)
    assert decision.chosen in decision.weighed
    assert {(each.prefill, each.decode) for each in decision.weighed} >= {
        (id_of("p0"), id_of("d0")),
        (id_of("p1"), id_of("d0")),
        ("", id_of("d0")),
    }
    assert decision.chosen.terms["compute_s"] > 0
    assert (decision.first_token_s, decision.age_s, decision.measured) == (0.5, 0.5, times)


def test_worker_cannot_report_times_of_another_worker() -> None:
    c = cost_cluster("p0", "p1", "d0")
    c.decode_others("d0", 32)
    routed, _ = route(c, long_request("a"))
    other = "p1" if routed.prefill == id_of("p0") else "p0"
    c[other].say(Measured(prefills=(PrefillTimes(id_of("a"), 0, 0.1, 0.3, 1, 1),)))
    assert explained(c, id_of("a")).measured is None


def test_repeated_times_are_learned_once() -> None:
    c = cost_cluster("p0", "d0")
    c.decode_others("d0", 32)
    route(c, long_request("a"))
    times = PrefillTimes(id_of("a"), 0, 0.1, 0.3, 8000, 8000, moved_bytes=8000, exposed_s=0.01)
    c["p0"].say(Measured(prefills=(times,)))
    c["p0"].say(Measured(prefills=(msgspec.structs.replace(times, moved_bytes=10**9),)))
    assert explained(c, id_of("a")).measured == times
    assert c.router.cluster_state.model.bytes_a_token == 1.0


def test_unknown_request_has_no_decisions() -> None:
    c = cost_cluster("d0")
    c["g"].say(Explain(request_id=id_of("never")))
    assert c["g"].only(Decisions).decisions == ()


@pytest.mark.parametrize("policy", ["least-loaded", "round-robin"])
def test_decisions_of_other_policies_name_the_policy(policy: str) -> None:
    c = cost_cluster("p0", "d0", policy=policy)
    route(c, long_request("a"))
    decision = explained(c, id_of("a"))
    assert (decision.reason, decision.weighed) == (policy, ())


def test_prefix_policy_follows_the_longest_prefix_whatever_the_queue() -> None:
    c = cost_cluster("p0", "p1", "d0", policy="prefix")
    c.hold("p0", long_request("x"), 400)
    for number in range(8):
        routed, dispatch = route(c, long_request(f"r{number}"))
        assert (routed.prefill, dispatch.source) == (id_of("p0"), None)


def test_in_flight_load_is_exact_under_the_cost_policy() -> None:
    c = cost_cluster("p0", "p1", "d0", "d1")
    for number in range(16):
        route(c, long_request(str(number), 500 * (number + 1)))
        if number % 2:
            c["g"].say(Started(attempts=((id_of(str(number)), 0),)))
        if number % 3:
            c["g"].say(Ended(attempts=((id_of(str(number)), 0),)))
        c.router.in_flight.check_integrity()
    assert c.router.counters["decisions"] == 16


def test_blind_decisions_are_counted() -> None:
    c = cost_cluster("d0")
    route(c, long_request("a"))
    c.hold("d0", long_request("x"), 4)
    route(c, long_request("b"))
    assert c.router.counters["blind_decisions"] == 1


@pytest.mark.parametrize("num_left", [1, 3, 20])
def test_left_out_workers_of_a_large_cluster_are_never_chosen(num_left: int) -> None:
    decoders = [f"d{number}" for number in range(24)]
    c = cost_cluster(*decoders, *(f"p{number}" for number in range(20)))
    avoided = [id_of(name) for name in decoders[num_left:]]
    avoided += [id_of(f"p{number}") for number in range(num_left, 20)]
    for name in decoders[num_left:]:  # which hold most of it
        c.hold(name, long_request("x"), 400)
    chosen = set()
    for number in range(12):
        routed = c.submit(long_request(f"r{number}", 1000), avoid=tuple(avoided))
        assert isinstance(routed, Routed)
        chosen |= {routed.decode, routed.prefill}
        c["g"].say(Ended(attempts=((id_of(f"r{number}"), 0),)))
    assert chosen.isdisjoint(avoided)
