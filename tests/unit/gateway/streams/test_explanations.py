from baton.gateway.streams.routers import MAX_ASKED
from baton.messages.control import Decision, Weighed
from baton.messages.operations import Decisions, Explain
from tests.node_peers import TestPeer, id_of
from tests.unit.gateway.frontend_peers import gateway


def a_decision(name: str, attempt: int = 0) -> Decision:
    chosen = Weighed(decode=id_of("d0"))
    return Decision(
        request_id=id_of(name), attempt=attempt, age_s=1.0, reason="cost", num_tokens=3, chosen=chosen
    )


def test_questions_are_answered_in_the_order_of_asking() -> None:
    g = gateway("d0")
    told: list[object] = []
    for name in "ab":
        g.frontend.explain(id_of(name), told.append)
    assert [each.request_id for each in g["router"].take(Explain)] == [id_of("a"), id_of("b")]
    for name in "ab":
        g["router"].say(Decisions(decisions=(a_decision(name),)))
    assert told == [(a_decision("a"),), (a_decision("b"),)]


def test_router_that_is_lost_answers_nothing() -> None:
    g = gateway("d0")
    told: list[object] = []
    g.frontend.explain(id_of("a"), told.append)
    g["router"].leave()
    assert told == [None]
    g.frontend.explain(id_of("b"), told.append)
    assert told == [None, None]


def test_each_of_several_routers_tells_its_own_attempts() -> None:
    g = gateway("d0")
    other = TestPeer.router(g.frontend, "other")
    told: list[object] = []
    g.frontend.explain(id_of("a"), told.append)
    second, first = a_decision("a", attempt=1), a_decision("a", attempt=0)
    g["router"].say(Decisions(decisions=(second,)))
    assert told == []
    other.say(Decisions(decisions=(first,)))
    assert told == [(first, second)]


def test_router_that_is_lost_keeps_nobody_from_the_others_answer() -> None:
    g = gateway("d0")
    other = TestPeer.router(g.frontend, "other")
    told: list[object] = []
    g.frontend.explain(id_of("a"), told.append)
    other.say(Decisions(decisions=(a_decision("a"),)))
    g["router"].leave()
    assert told == [(a_decision("a"),)]


def test_answers_that_nobody_asked_for_are_nothing() -> None:
    g = gateway("d0")
    g["router"].say(Decisions())
    assert g.frontend.num_open == 0


def test_too_many_questions_are_not_passed_on() -> None:
    g = gateway("d0")
    told: list[object] = []
    for number in range(MAX_ASKED + 1):
        g.frontend.explain(id_of(str(number)), told.append)
    assert told == [None] and len(g["router"].take(Explain)) == MAX_ASKED
