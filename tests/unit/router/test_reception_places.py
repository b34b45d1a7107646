"""The router with its queue, by the policy of costs: which worker's place a prompt waits for."""

from collections.abc import Iterator
from zlib import crc32

import msgspec
import pytest

from baton.messages.control import Heartbeat, KvEventBatch, Rejected, Routed, Started, Submit
from baton.messages.workers import Load
from baton.request import Request
from baton.router.in_flight import MIN_COMPUTING, SchedulingClass
from baton.router.index.prefix_index import PromptKeys, family_of
from tests.node_peers import a_worker, id_of
from tests.unit.router.queue_cases import asked
from tests.unit.router.reception_cases import LONG, answers, end, names, submit
from tests.unit.router.router_cluster import Cluster, cluster

HELD = 8192  # tokens of a prompt that a prefill worker holds: waiting for it is quicker than doing without


@pytest.fixture
def c() -> Iterator[Cluster]:
    made = cluster(policy="cost")
    for name in ("p0", "d0"):
        made.add(name, num_pages=10_000, max_num_seqs=64)
    yield made
    made.router.admission_queue.check_integrity()
    made.router.in_flight.check_integrity()


def a_prompt(
    name: str, tenant: str = "a", *, num_tokens: int = LONG, weight: float = 1.0, rank: int = 0
) -> Submit:
    """Unlike any other's."""
    asked_for = asked(name, tenant, num_tokens=num_tokens, weight=weight, rank=rank)
    token_ids = (crc32(name.encode()) % 2**16,) * num_tokens
    request = msgspec.structs.replace(asked_for.request, token_ids=token_ids)
    return msgspec.structs.replace(asked_for, request=request)


def best_at_p0(c: Cluster, name: str, tenant: str = "a", *, num_new: int = 16, weight: float = 1.0) -> Submit:
    """That holds its prefix, and from now on nothing else. num_new: tokens that have to be computed."""
    asked_for = a_prompt(name, tenant, num_tokens=HELD + num_new, weight=weight)
    hold(c, "p0", asked_for.request)
    return asked_for


def hold(c: Cluster, name: str, request: Request) -> None:
    pages = tuple(range(HELD // 16))
    keys = PromptKeys().keys(family_of(a_worker(name)), request)[: 16 * len(pages)]
    c[name].say(KvEventBatch(first=0, keys=keys, pages=pages, generations=(7,) * len(pages), is_afresh=True))


def start(c: Cluster, name: str) -> None:
    """Its first token is there: who computed it has a place again."""
    c["g"].say(Started(attempts=((id_of(name), 0),)))


def went(answered: list[Routed | Rejected]) -> list[tuple[str, str]]:
    """Which prompts, and who computes each."""
    assert all(isinstance(each, Routed) for each in answered), answered
    computers = {id_of(name): name for name in ("p0", "d0")}
    routed = [each for each in answered if isinstance(each, Routed)]
    return list(
        zip(names(answered), (computers[each.prefill or each.decode] for each in routed), strict=True)
    )


def lead(c: Cluster, tenant: str, rank: int = 0) -> float:
    """Work that it has had more than who was served last."""
    share = c.router.admission_queue.queues._shares[rank]
    return share.clock(tenant) - share.present


def decode_many(c: Cluster) -> None:
    """So that prompts are better computed elsewhere."""
    others = tuple((id_of(f"other {number}"), 0) for number in range(32))
    c["d0"].say(Heartbeat(load=Load(), attempts=others))


def busy(c: Cluster, *, rank: int = 0) -> None:
    """The prefill worker has no place by "a", and the decode worker one prompt of "b", of this class."""
    decode_many(c)
    filling = [a_prompt(f"a{n}", weight=8.0) for n in range(MIN_COMPUTING)]
    assert went(submit(c, *filling)) == [("a0", "p0"), ("a1", "p0")]
    c["d0"].say(Heartbeat(load=Load()))
    assert went(submit(c, a_prompt("b0", "b", rank=rank))) == [("b0", "d0")]


def test_a_prompt_waits_for_the_worker_that_is_best_for_it_though_another_is_idle(c: Cluster) -> None:
    busy(c)
    assert submit(c, best_at_p0(c, "r")) == [] and len(c.router.admission_queue) == 1
    start(c, "b0")
    c.tick(0.01)
    assert answers(c) == [], "the decode worker has nothing to compute at all"
    start(c, "a0")
    assert went(answers(c)) == [("r", "p0")]


def test_others_go_past_it_to_a_decode_worker_that_has_a_place(c: Cluster) -> None:
    busy(c, rank=1)
    assert submit(c, best_at_p0(c, "r")) == []
    assert went(submit(c, a_prompt("b1", "b", rank=1))) == [("b1", "d0")], "no decode worker is kept for it"
    assert submit(c, a_prompt("b2", "b", rank=1)) == [], "it has no place now"
    c.tick(0.01)
    assert answers(c) == [] and len(c.router.admission_queue) == 2
    end(c, "b0", "b1")
    assert went(answers(c)) == [("b2", "d0")]
    start(c, "a0")
    assert went(answers(c)) == [("r", "p0")]


def test_nobody_who_goes_past_takes_the_place_that_is_waited_for(c: Cluster) -> None:
    """Not even tenants that have nothing under way: they overtake others of their class elsewhere."""
    busy(c, rank=1)
    assert submit(c, best_at_p0(c, "r")) == []
    assert went(submit(c, a_prompt("b1", "b", rank=1))) == [("b1", "d0")]
    others = submit(c, *(a_prompt(f"x{n}", f"x{n}", rank=1) for n in range(9)))
    c.tick(0.01)
    others += answers(c)
    assert {at for _, at in went(others)} == {"d0"} and len(others) < 9
    start(c, "a0")
    assert went(answers(c))[0] == ("r", "p0")


def test_nor_does_who_would_overtake_what_fills_it(c: Cluster) -> None:
    busy(c)
    submit(c, a_prompt("x", "x", num_tokens=16))
    end(c, "x")
    decode_many(c)
    assert submit(c, best_at_p0(c, "r", "r", num_new=LONG)) == []
    assert lead(c, "r") < lead(c, "x"), "its turn comes first"
    overtaking = submit(c, a_prompt("x0", "x", num_tokens=300))
    assert went(overtaking) == [("x0", "d0")], "though p0 would compute it next, and be better for it"
    c.tick(0.01)
    start(c, "a0")
    assert went(answers(c))[0] == ("r", "p0")


def test_what_waits_for_a_worker_that_goes_is_computed_by_another(c: Cluster) -> None:
    busy(c)
    assert submit(c, best_at_p0(c, "r")) == []
    c["p0"].leave()
    c.tick(0.01)
    assert went(answers(c)) == [("r", "d0")]


def test_who_is_due_no_more_than_others_waits_behind_them(c: Cluster) -> None:
    busy(c)
    assert submit(c, best_at_p0(c, "x", "x")) == []
    start(c, "a0")
    assert went(answers(c)) == [("x", "p0")]


def test_it_does_not_wait_while_a_prefill_worker_has_a_place(c: Cluster) -> None:
    busy(c)
    c.add("p1", num_pages=10_000, max_num_seqs=64)
    assert went(submit(c, best_at_p0(c, "r"))) == [("r", "p0")]


def test_who_overtakes_them_has_places_of_its_own(c: Cluster) -> None:
    busy(c)
    for name in ("x0", "x1"):
        decode_many(c)
        submitted = submit(c, best_at_p0(c, name, "x", num_new=LONG, weight=100.0))
        assert went(submitted) == ([("x0", "p0")] if name == "x0" else [])
    assert lead(c, "x") < 0, "it is owed work, and has to wait all the same"
    start(c, "x0")
    assert went(answers(c)) == [("x1", "p0")]


def test_a_turn_tells_what_others_of_any_class_have_had(c: Cluster) -> None:
    busy(c, rank=1)
    assert submit(c, best_at_p0(c, "r")) == []
    admission_queue = c.router.admission_queue
    (waiting,) = admission_queue.queues
    lead_of = admission_queue.claim(waiting).lead_of
    assert lead_of is not None
    assert lead_of(SchedulingClass("a")) == lead(c, "a") > 0
    assert lead_of(SchedulingClass("b", 1.0, 1)) == lead(c, "b", 1) > 0
