"""Two routers that share their dispatches over a link that loses nothing."""

from collections.abc import Sequence

import pytest

from baton.clock import ManualClock
from baton.config.router import RouterConfig
from baton.messages.control import (
    Ended,
    Heartbeat,
    KvEventBatch,
    Measured,
    Reachable,
    Routed,
    Started,
    Submit,
)
from baton.messages.workers import Load, PrefillTimes, Worker
from baton.router import cluster_state
from baton.router.in_flight import SILENCE_S
from baton.router.redis.messages import AnyShared, SharedDispatch
from baton.router.router import Router
from tests.node_peers import TestPeer, a_request, a_worker, id_of

WORKERS = ("p0", "p1", "d0", "d1")


class Wire:
    """A link that delivers at once."""

    def __init__(self) -> None:
        self.others: list[Router] = []
        self.told: list[AnyShared] = []
        self.seen: list[str] = []

    def joined(self, worker: Worker) -> None:
        self.seen.append(worker.name)

    def left(self, worker_id: str) -> None:
        self.seen.append(f"-{worker_id}")

    def pages(self, worker_id: str, events: KvEventBatch) -> None:
        self.seen.append("pages")

    def share(self, message: AnyShared) -> None:
        self.told.append(message)
        for other in self.others:
            other.cluster_state.heard(message)


class RouterOfTwo:
    def __init__(self, name: str, clock: ManualClock) -> None:
        self.wire = Wire()
        self.router = Router(RouterConfig(policy="cost", seed=ord(name)), clock, id_of(name))
        self.router.link(self.wire)
        self.gateway = TestPeer.gateway(self.router, f"gateway of {name}")
        self.workers = {
            worker: TestPeer.worker(self.router, a_worker(worker, num_pages=4096)) for worker in WORKERS
        }
        for peer in (self.gateway, *self.workers.values()):
            peer.say(Reachable(workers=tuple(map(id_of, WORKERS))))

    def submit(self, name: str, num_tokens: int = 800) -> Routed:
        self.gateway.say(Submit(request=a_request(name, num_tokens)))
        return self.gateway.only(Routed)

    def num_computing(self) -> dict[str, int]:
        in_flight = self.router.in_flight
        return {worker: in_flight.account(id_of(worker)).num_computing for worker in WORKERS}


def two_routers() -> tuple[ManualClock, RouterOfTwo, RouterOfTwo]:
    clock = ManualClock(100.0)
    one, other = RouterOfTwo("a", clock), RouterOfTwo("b", clock)
    one.wire.others.append(other.router)
    other.wire.others.append(one.router)
    for each in (one, other):
        each.gateway.received.clear()
    return clock, one, other


def keys_of(names: Sequence[str]) -> tuple[tuple[str, int], ...]:
    return tuple((id_of(name), 0) for name in names)


def test_dispatched_attempt_counts_at_both_routers_until_its_end() -> None:
    _, one, other = two_routers()
    for name in "rst":
        one.submit(name)
    assert other.num_computing() == one.num_computing() and len(other.router.in_flight) == 3
    one.gateway.say(Started(attempts=keys_of("rs")))
    assert other.num_computing() == one.num_computing() and sum(other.num_computing().values()) == 1
    one.gateway.say(Ended(attempts=keys_of("rst")))
    assert len(one.router.in_flight) == len(other.router.in_flight) == 0
    other.router.in_flight.check_integrity()


def test_computed_prompt_of_another_router_has_its_first_token_although_its_message_is_lost() -> None:
    _, one, other = two_routers()
    routed = one.submit("r")
    computed_by = next(name for name in WORKERS if id_of(name) == (routed.prefill or routed.decode))
    times = PrefillTimes(id_of("r"), 0, 0.0, 0.1, 1, 1)
    assert other.num_computing()[computed_by] == 1
    for each in (one, other):
        each.workers[computed_by].say(Measured(prefills=(times,)))
    assert other.num_computing()[computed_by] == 0
    assert one.num_computing()[computed_by] == 1, "the gateway tells its own router"
    other.router.in_flight.check_integrity()


def test_sibling_at_the_other_router_goes_to_the_same_worker() -> None:
    _, one, other = two_routers()
    for worker in ("d0", "d1"):
        attempts = keys_of([f"{worker} {number}" for number in range(6)])
        for each in (one, other):
            each.workers[worker].say(Heartbeat(load=Load(), attempts=attempts))
    first = one.submit("r", 8000)
    assert first.prefill
    assert other.submit("s", 8200).prefill == first.prefill


def test_messages_of_another_router_do_not_change_own_attempts() -> None:
    _, one, other = two_routers()
    one.submit("r")
    other.wire.share(one.wire.told[0])
    assert len(one.router.in_flight) == 1
    other.gateway.say(Ended(attempts=keys_of("r")))
    assert len(one.router.in_flight) == 1


def test_attempts_of_a_dead_router_end_when_workers_stop_reporting_them() -> None:
    clock, one, other = two_routers()
    routed = one.submit("r")
    one.submit("s")
    decode = next(name for name in WORKERS if id_of(name) == routed.decode)
    clock.advance(SILENCE_S + 0.1)
    for name in ("d0", "d1"):
        named = keys_of("r") if name == decode else ()
        other.workers[name].say(Heartbeat(load=Load(), attempts=named))
    assert keys_of("r")[0] in other.router.in_flight and len(other.router.in_flight) == 1
    other.router.in_flight.check_integrity()


def test_gateway_that_changes_routers_may_submit_its_attempt_again() -> None:
    _, one, other = two_routers()
    one.submit("r")
    other.submit("r")
    assert len(other.router.in_flight) == 1 and not other.router.in_flight.is_anothers(keys_of("r")[0])


def test_attempts_of_another_router_end_with_their_worker() -> None:
    _, one, other = two_routers()
    one.submit("r")
    for name in ("d0", "d1"):
        other.workers[name].leave()
    other.router.tick()
    assert f"-{id_of('d0')}" in other.wire.seen
    assert len(other.router.in_flight) == 0 and len(one.router.in_flight) == 1


def test_only_page_keys_of_a_prompt_are_shared() -> None:
    _, one, _ = two_routers()
    one.submit("r", 800)
    (shared,) = one.wire.told
    assert isinstance(shared, SharedDispatch) and len(shared.keys) == 8 * (800 // 16)


def test_attempts_of_other_routers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_state, "MAX_OTHERS", 2)
    _, one, other = two_routers()
    for name in "rst":
        one.submit(name)
    assert (other.router.in_flight.num_others, other.router.counters["others_left_out"]) == (2, 1)
    one.gateway.say(Ended(attempts=keys_of("rst")))
    assert other.router.in_flight.num_others == 0
    other.router.in_flight.check_integrity()


def test_attempt_at_an_unknown_worker_is_dropped_at_the_next_tick() -> None:
    _, one, _ = two_routers()
    stray = SharedDispatch(
        request_id=id_of("r"),
        attempt=0,
        decode=id_of("elsewhere"),
        num_prompt_tokens=1,
        num_tokens=2,
        num_output_tokens=1,
    )
    one.router.cluster_state.heard(stray)
    one.router.tick()
    assert len(one.router.in_flight) == 0 and id_of("elsewhere") not in one.router.in_flight.workers()
