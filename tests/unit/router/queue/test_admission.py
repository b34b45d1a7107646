"""The router with its queue: who is let out, and when, by what gateways and workers say."""

from collections.abc import Iterator

import pytest

from baton.errors import ProtocolError
from baton.messages.control import Dispatch, Ended, Queued, Rejected, Routed, Started
from baton.router.in_flight import MIN_COMPUTING
from baton.tenants import Refusal
from tests.node_peers import TestPeer, id_of
from tests.unit.router.queue_cases import asked
from tests.unit.router.reception_cases import (
    LONG,
    a_cluster,
    answers,
    end,
    fill,
    names,
    submit,
)
from tests.unit.router.router_cluster import Cluster


@pytest.fixture
def c() -> Iterator[Cluster]:
    yield from a_cluster()


def test_where_there_is_room_nobody_waits(c: Cluster) -> None:
    assert isinstance(submit(c, asked("r"))[0], Routed)
    assert len(c.router.admission_queue) == 0


def test_what_has_no_room_waits_and_is_let_out_when_a_prompt_is_done(c: Cluster) -> None:
    fill(c)
    assert submit(c, asked("r", num_tokens=LONG)) == []
    assert len(c.router.admission_queue) == 1
    c["g"].say(Started(attempts=((id_of("f0"), 0),)))
    assert names(answers(c)) == ["r"]
    assert len(c["d0"].take(Dispatch)) == MIN_COMPUTING + 1


def test_a_gateway_is_told_what_waits_and_nothing_of_what_does_not(c: Cluster) -> None:
    c["g"].say(asked("s"))
    assert not c["g"].take(Queued)
    fill(c)
    c["g"].say(asked("r", num_tokens=LONG))
    assert c["g"].only(Queued).request_id == id_of("r")


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
    assert len(c.router.admission_queue) == 0
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
    assert names(answers(c)) == ["r"] and len(c.router.admission_queue) == 0


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
