import pytest

from baton.messages.control import Dispatch, Ended, Heartbeat, Reachable, Rejected, Routed, Started, Submit
from baton.messages.operations import Drain, Status
from baton.messages.workers import Load
from tests.node_peers import TestPeer, a_request, id_of
from tests.unit.router.router_cluster import cluster


def test_attempt_is_dispatched_to_a_pair_and_its_gateway_hears() -> None:
    c = cluster("p0", "d0")
    assert c.pair() == ("d0", "p0")
    dispatch = c["d0"].only(Dispatch)
    assert (dispatch.request, dispatch.gateway, dispatch.prefill) == (a_request(), id_of("g"), id_of("p0"))
    assert dispatch.transfer, "the router names the transfer"
    assert c["p0"].take(Dispatch) == []


def test_short_prompt_is_computed_by_its_decode_worker() -> None:
    c = cluster("p0", "d0", local_prefill_tokens=16)
    assert c.pair(a_request("s", num_tokens=16)) == ("d0", "")
    assert c.pair(a_request("l", num_tokens=17)) == ("d0", "p0")


def test_without_prefill_workers_decode_workers_compute_prompts() -> None:
    assert cluster("d0").pair() == ("d0", "")


def test_attempt_is_rejected_without_decode_workers() -> None:
    c = cluster("p0")
    rejected = c.submit()
    assert isinstance(rejected, Rejected) and rejected.retry_after_s > 0
    assert len(c.router.in_flight) == 0


def test_sticky_worker_computes_the_rest_of_the_prompt() -> None:
    c = cluster("p0", "d0", "d1", "d2")
    for name in ("a", "b", "c"):
        assert c.pair(a_request(name), sticky_worker=id_of("d1")) == ("d1", "")


@pytest.mark.parametrize("why", ["gone", "draining", "unreached", "failed it"])
def test_unusable_sticky_worker_is_ignored(why: str) -> None:
    c = cluster("p0", "d0", "d1")
    avoid: tuple[str, ...] = ()
    if why == "gone":
        c["d1"].leave()
    elif why == "draining":
        c.beat("d1", is_draining=True)
    elif why == "unreached":
        c["g"].say(Reachable(workers=(id_of("p0"), id_of("d0"))))
    else:
        avoid = (id_of("d1"),)
    assert c.pair(sticky_worker=id_of("d1"), avoid=avoid) == ("d0", "p0")


def test_workers_that_failed_the_request_are_avoided_while_others_are_left() -> None:
    c = cluster("p0", "p1", "d0", "d1")
    failed = id_of("d0"), id_of("p1")
    for number in range(8):
        assert c.pair(a_request(str(number)), avoid=failed) == ("d1", "p0")
    c["d1"].leave()
    c["p0"].leave()
    assert c.pair(a_request("last"), avoid=failed) == ("d0", "p1")


@pytest.mark.parametrize(
    ("who", "reaches", "expected"),
    [
        ("g", ("d1", "p0", "p1"), ("d1", "p0 or p1")),  # the gateway cannot hear d0
        ("g", ("d0", "d1", "p1"), ("d0 or d1", "p1")),
        ("d0", ("p1",), ("d0 or d1", "p1 at d0")),
        ("p0", ("d1",), ("d0 or d1", "p1 at d0")),  # p0 has no way for its pages
    ],
)
def test_pairs_reach_each_other(who: str, reaches: tuple[str, ...], expected: tuple[str, str]) -> None:
    c = cluster("p0", "p1", "d0", "d1")
    c[who].say(Reachable(workers=tuple(map(id_of, reaches))))
    for number in range(8):
        decode, prefill = c.pair(a_request(str(number)))
        assert decode in expected[0] and prefill
        if "at" not in expected[1] or decode == "d0":
            assert prefill in expected[1]


def test_decode_worker_with_a_partner_is_preferred() -> None:
    c = cluster("p0", "d0", "d1")
    c["p0"].say(Reachable(workers=(id_of("d1"),)))
    for number in range(6):
        assert c.pair(a_request(str(number))) == ("d1", "p0")


def test_workers_of_other_weights_are_no_partners() -> None:
    c = cluster("d0")
    c.add("p0", fingerprint="another")
    assert c.pair() == ("d0", "")


@pytest.mark.parametrize("how", ["beat", "operator"])
def test_draining_worker_gets_no_new_attempts(how: str) -> None:
    c = cluster("p0", "p1", "d0", "d1")
    for name in ("p0", "d0"):
        if how == "beat":
            c.beat(name, is_draining=True)
        else:
            operator = TestPeer.operator(c.router)
            operator.say(Drain(worker=name))
            assert c[name].only(Drain).worker == id_of(name)
            status = operator.only(Status)
            assert {w.worker.name for w in status.workers if w.is_draining} >= {name}
            c.beat(name, is_draining=False)  # it was on its way
    for number in range(8):
        assert c.pair(a_request(str(number))) == ("d1", "p1")
    assert id_of("d0") in {each.worker.id for each in c.router.status().workers}


def test_drain_of_an_unknown_worker_changes_nothing() -> None:
    c = cluster("d0")
    operator = TestPeer.operator(c.router)
    operator.say(Drain(worker="d7"))
    assert not any(worker.is_draining for worker in operator.only(Status).workers)


def test_max_attempts_bounds_open_attempts() -> None:
    c = cluster("d0", max_attempts=2)
    assert isinstance(c.submit(a_request("a")), Routed)
    assert isinstance(c.submit(a_request("b")), Routed)
    assert isinstance(c.submit(a_request("c")), Rejected)
    c["g"].say(Ended(attempts=((id_of("a"), 0),)))
    assert isinstance(c.submit(a_request("c")), Routed)


def test_gateway_that_connects_again_has_no_attempts() -> None:
    c = cluster("p0", "d0")
    c.submit()
    former = c["g"]
    c.peers["g"] = TestPeer.gateway(c.router)
    assert not former.is_open and len(c.router.in_flight) == 0
    c.all_reach_all()
    assert isinstance(c.submit(), Routed)
    former.say(Submit(request=a_request("late")))
    former.leave()
    assert len(c.router.in_flight) == 1


def test_least_loaded_prefill_has_the_fewest_prompt_tokens_to_compute() -> None:
    c = cluster("p0", "p1", "d0", policy="least-loaded")
    first = c.pair(a_request("a", num_tokens=500))
    assert first not in [c.pair(a_request(f"b{number}", num_tokens=100)) for number in range(5)]
    c["g"].say(Started(attempts=((id_of("a"), 0),)))
    assert c.pair(a_request("c", num_tokens=100)) == first


def test_least_loaded_decode_has_the_smallest_share_of_its_pages_in_use() -> None:
    c = cluster(policy="least-loaded")
    c.add("d0", max_num_seqs=64)
    c.add("d1", max_num_seqs=64, num_pages=640)
    pairs = [c.pair(a_request(str(number), num_tokens=200)) for number in range(4)]
    assert pairs.count(("d1", "")) >= 3


def test_round_robin_takes_turns_of_both_roles() -> None:
    c = cluster("p0", "p1", "p2", "d0", "d1", policy="round-robin")
    pairs = [c.pair(a_request(str(number))) for number in range(6)]
    assert pairs == [(f"d{number % 2}", f"p{number % 3}") for number in range(6)]


def test_ties_are_broken_by_the_seed_and_spread() -> None:
    def run(seed: int) -> list[str]:
        seeds = range(seed * 100, seed * 100 + 12)
        return [cluster("d0", "d1", "d2", seed=each).pair()[0] for each in seeds]

    assert run(1) == run(1)
    assert len(set(run(1))) == 3


def test_attempts_of_an_earlier_router_count_by_the_workers_reports() -> None:
    c = cluster("d0", "d1")
    c["d0"].say(Heartbeat(load=Load(pages={"active": 30}), attempts=((id_of("old"), 0), (id_of("older"), 1))))
    for number in range(3):
        assert c.pair(a_request(str(number))) == ("d1", "")
    c["d0"].say(Heartbeat(load=Load(), attempts=()))
    assert c.pair(a_request("after")) == ("d0", "")


@pytest.mark.parametrize("policy", ["round-robin", "least-loaded", "prefix", "cost"])
def test_probe_is_computed_by_a_prefill_worker_whatever_the_policy(policy: str) -> None:
    c = cluster("p0", "d0", "d1", policy=policy, local_prefill_tokens=64)
    for number in range(4):
        _, prefill = c.pair(a_request(f"probe {number}", num_tokens=2, is_probe=True))
        assert prefill == "p0"


def test_probe_without_a_prefill_worker_is_rejected() -> None:
    c = cluster("d0", policy="cost")
    rejected = c.submit(a_request(is_probe=True))
    assert isinstance(rejected, Rejected) and rejected.reason == "no prefill worker can be reached"
    assert len(c.router.in_flight) == 0
