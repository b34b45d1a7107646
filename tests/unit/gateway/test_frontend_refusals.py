"""Requests that the router refuses for another reason than room, and those whose deadline passes."""

from typing import Any

import pytest

from baton.errors import Refused
from baton.messages.control import Ended, Rejected, Submit
from baton.request import SamplingParams
from baton.tenants import Refusal, Sla
from tests.node_peers import a_request
from tests.unit.gateway.frontend_peers import Gateway, ListSink, R, event, gateway, running

FINAL = [refusal for refusal in Refusal if refusal is not Refusal.NO_ROOM]


def refuse(g: Gateway, refusal: Refusal, attempt: int = 0) -> None:
    rejected = Rejected(request_id=R, attempt=attempt, reason="too much", retry_after_s=2.5, refusal=refusal)
    g["router"].say(rejected)


def refusal_of(sink: ListSink) -> Refusal | None:
    return sink.error.refusal if isinstance(sink.error, Refused) else None


@pytest.mark.parametrize("refusal", FINAL)
def test_a_refusal_ends_the_request_with_its_reason(refusal: Refusal) -> None:
    g = gateway("d0")
    sink = g.open()
    refuse(g, refusal)
    assert isinstance(sink.error, Refused)
    assert (sink.error.refusal, sink.error.retry_after_s, str(sink.error)) == (refusal, 2.5, "too much")
    assert g.frontend.num_open == 0
    g.tick(5.0)
    assert not g["router"].take(Submit)[1:], "it is not asked again"


def test_no_room_is_no_end() -> None:
    g = gateway("d0")
    sink = g.open()
    refuse(g, Refusal.NO_ROOM)
    g.tick(1.0)
    assert sink.error is None and g.frontend.num_open == 1


@pytest.mark.parametrize("refusal", FINAL)
def test_nothing_that_was_begun_is_refused(refusal: Refusal) -> None:
    g, sink = running("d0", "d1")
    g["router"].take(Submit)
    g["d0"].leave()
    g.list_members("d1")
    g.tick(2.0)
    (again,) = g["router"].take(Submit)
    refuse(g, refusal, again.request.attempt)
    assert sink.error is None and g.frontend.num_open == 1
    for _ in range(4):
        g.tick(0.5)
    assert len(g["router"].take(Submit)) == 1


def test_another_choice_of_an_answer_that_has_begun_waits() -> None:
    g = gateway("d0")
    sink = g.open(a_request(choice=2, sampling=SamplingParams(max_tokens=8, temperature=0.0)))
    refuse(g, Refusal.MAX_CONCURRENT_REQUESTS)
    assert sink.error is None and g.frontend.num_open == 1


def test_an_unknown_or_former_attempt_is_nothing_to_refuse() -> None:
    g = gateway("d0")
    sink = g.open()
    refuse(g, Refusal.SHED, attempt=3)
    assert sink.error is None


def late(g: Gateway, **fields: Any) -> ListSink:
    """A request that should have its first token within two seconds."""
    request = a_request(sla=Sla(deadline_ms=2000.0), arrival_s=g.clock.now_s(), **fields)
    return g.open(request)


@pytest.mark.parametrize("is_routed", [False, True])
def test_what_has_no_token_at_its_deadline_is_ended(is_routed: bool) -> None:
    g = gateway("d0")
    sink = late(g)
    if is_routed:
        g.route("d0")
    for _ in range(3):
        g.tick(0.6)
    assert refusal_of(sink) is None
    for _ in range(3):
        g.tick(0.6)
    assert refusal_of(sink) is Refusal.DEADLINE
    assert g.frontend.num_open == 0
    assert (R, 0) in [key for ended in g["router"].take(Ended) for key in ended.attempts]


def test_what_has_a_token_by_its_deadline_goes_on() -> None:
    g = gateway("d0")
    sink = late(g)
    g.route("d0")
    g.say("d0", event(0))
    for _ in range(10):
        g.tick(1.0)
    assert sink.error is None and g.frontend.num_open == 1


def test_a_deadline_that_has_passed_while_it_was_read_asks_nobody() -> None:
    g = gateway("d0")
    sink = g.open(a_request(sla=Sla(deadline_ms=1.0), arrival_s=g.clock.now_s() - 1))
    assert isinstance(sink.error, Refused) and not g["router"].take(Submit)


def test_other_choices_have_the_deadline_of_the_first() -> None:
    g = gateway("d0")
    sink = late(g, choice=1)
    for _ in range(4):
        g.tick(1.0)
    assert sink.error is None
