"""Streams that move to another decode worker while they run."""

from collections.abc import Callable

import pytest

from baton.gateway.streams.migrations import MAX_MIGRATION_S, MAX_MIGRATIONS, MAX_RETRY_S, RETRY_S
from baton.gateway.streams.request_stream import MIGRATED
from baton.messages.control import (
    Cancel,
    Ended,
    Failure,
    Members,
    Prepared,
    Started,
    Submit,
    TakeOver,
)
from baton.messages.operations import Migrate, Migrated
from baton.request import FinishReason
from tests.answer import Answer
from tests.node_peers import a_request, id_of
from tests.unit.gateway.frontend_peers import Gateway, R, event, failed, gateway, running, worker_at

STOP = FinishReason.STOP


def order(g: Gateway, worker: str = "d0", to: str = "") -> None:
    g["router"].say(Migrate(question=7, worker=id_of(worker), to=id_of(to) if to else "", num_asked=1))


def answer(g: Gateway) -> tuple[int, int, str]:
    """The moves and the stays that the router was told of."""
    migrated = g["router"].only(Migrated)
    assert migrated.question == 7
    return migrated.num_moved, migrated.num_left, migrated.reason


def prepared(g: Gateway, worker: str = "d1", attempt: int = 1) -> None:
    g[worker].say(Prepared(request_id=R, attempt=attempt))


def migrating(*workers: str) -> tuple[Gateway, Answer]:
    """Request r runs at d0 and has three tokens; d1 prepares attempt 1."""
    g, sink = running(*(workers or ("d0", "d1")))
    order(g)
    g.route("d1")
    return g, sink


def test_prepared_may_come_before_the_router_names_the_worker() -> None:
    g, _ = running("d0", "d1", "d2")
    order(g)
    prepared(g)
    prepared(g, "d2")
    assert not g["d1"].take(TakeOver) and not g["d1"].take(Cancel)
    g.route("d1")
    assert g["d1"].only(TakeOver).attempt == 1 and not g["d2"].take(TakeOver)
    assert g["d2"].only(Cancel) == Cancel(request_id=R, attempt=1)
    assert answer(g) == (1, 0, "")


def wait_too_long(g: Gateway) -> None:
    for _ in range(3):
        g.tick(MAX_MIGRATION_S / 2)


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda g: g.refuse(1), id="rejection"),
        pytest.param(lambda g: g["router"].leave(), id="loss of the router"),
        pytest.param(lambda g: g["d2"].say(failed(Failure.BUSY, attempt=1)), id="failure of another worker"),
        pytest.param(lambda g: g["d0"].leave(), id="loss of the old worker"),
        pytest.param(lambda g: g.say("d0", event(3, STOP)), id="end of the answer"),
        pytest.param(lambda g: g.frontend.cancel(R), id="cancel"),
        pytest.param(wait_too_long, id="time"),
    ],
)
def test_every_end_before_the_router_names_the_worker_cancels_what_it_has_prepared(
    end: Callable[[Gateway], None],
) -> None:
    g, _ = running("d0", "d1", "d2")
    order(g)
    prepared(g)
    end(g)
    assert g["d1"].only(Cancel) == Cancel(request_id=R, attempt=1)


def test_a_new_worker_that_is_lost_after_prepared_is_prepared_no_more() -> None:
    g, _ = running("d0", "d1")
    order(g)
    prepared(g)
    g["d1"].leave()
    g.join("d1")
    g.route("d1")
    assert not g["d1"].take(TakeOver)
    prepared(g)
    assert g["d1"].only(TakeOver).attempt == 1


def drain(g: Gateway, *names: str) -> None:
    members = tuple(map(worker_at, ("d0", "d1")))
    g["router"].say(Members(workers=members, draining=tuple(map(id_of, names))))


def test_stream_goes_on_at_the_new_worker_after_the_last_token_of_the_log() -> None:
    g, sink = running("d0", "d1")
    order(g, to="d1")
    submit = g.submitted()
    assert submit.request == a_request(attempt=1, generated_token_ids=(100, 101, 102))
    assert (submit.migrates_from, submit.sticky_worker, submit.is_begun) == (id_of("d0"), id_of("d1"), True)
    g.route("d1", request=submit.request)
    g.say("d0", event(3))
    g.say("d0", event(4))
    prepared(g)
    assert g["d1"].only(TakeOver).token_ids == (103, 104)
    assert g["d0"].only(Cancel) == Cancel(request_id=R, attempt=0)
    assert (R, 0) in g["router"].only(Ended).attempts
    assert answer(g) == (1, 0, "")
    g.say("d1", event(5, attempt=1))
    g.say("d1", event(6, STOP, attempt=1))
    assert (sink.token_ids, sink.finish) == (list(range(100, 107)), STOP)
    assert g["router"].take(Started)[-1].attempts == ((R, 1),)
    assert g.frontend.counters["migrations"] == 1 and not g.frontend.counters["replays_lost"]


def test_failure_of_the_new_worker_leaves_the_stream_where_it_is() -> None:
    g, sink = migrating()
    g["d1"].say(failed(Failure.BUSY, attempt=1))
    assert answer(g) == (0, 1, "no reason")
    assert (R, 1) in g["router"].only(Ended).attempts
    g.say("d0", event(3, STOP))
    assert (sink.token_ids, sink.finish) == ([100, 101, 102, 103], STOP)


def test_loss_of_the_new_worker_leaves_the_stream_where_it_is() -> None:
    g, sink = migrating()
    g["d1"].leave()
    assert answer(g)[:2] == (0, 1)
    g.say("d0", event(3, STOP))
    assert sink.finish is STOP and g["router"].take(Submit) == []


def test_rejection_leaves_the_stream_where_it_is() -> None:
    g, sink = running("d0", "d1")
    order(g)
    g.refuse(1)
    assert answer(g) == (0, 1, "full")
    g.say("d0", event(3, STOP))
    assert sink.finish is STOP


def test_loss_of_the_old_worker_replays_under_a_number_of_its_own() -> None:
    g, sink = migrating()
    g["d0"].leave()
    assert g["d1"].only(Cancel) == Cancel(request_id=R, attempt=1)
    assert g.submitted().request.attempt == 2
    prepared(g)
    assert g["d1"].only(Cancel) == Cancel(request_id=R, attempt=1)
    assert g["d1"].take(TakeOver) == [] and sink.finish is None
    assert answer(g)[:2] == (0, 1)


def test_loss_of_the_new_worker_after_the_switch_replays() -> None:
    g, sink = migrating()
    prepared(g)
    g["d1"].leave()
    submit = g.submitted()
    assert submit.request == a_request(attempt=2, generated_token_ids=(100, 101, 102))
    g.route("d0", request=submit.request)
    g.say("d0", event(3, STOP, attempt=2))
    assert (sink.token_ids, sink.finish) == ([100, 101, 102, 103], STOP)


def test_cancel_in_the_middle_ends_both_attempts() -> None:
    g, _ = migrating()
    g.frontend.cancel(R)
    g.tick()
    assert g["d0"].only(Cancel).attempt == 0 and g["d1"].only(Cancel).attempt == 1
    assert {key for each in g["router"].take(Ended) for key in each.attempts} == {(R, 0), (R, 1)}
    assert answer(g) == (0, 1, "it has ended")


def test_end_before_the_router_has_answered_cancels_the_attempt_that_it_dispatches() -> None:
    g, sink = running("d0", "d1")
    order(g)
    submit = g.submitted()
    g.say("d0", event(3, STOP))
    assert sink.finish is STOP and answer(g)[:2] == (0, 1)
    g.route("d1", request=submit.request)
    assert g["d1"].only(Cancel) == Cancel(request_id=R, attempt=1)


def test_router_that_leaves_before_its_answer_ends_the_move() -> None:
    g, _ = running("d0", "d1")
    order(g)
    g["router"].leave()
    assert g.frontend.counters["migrations_given_up"] == 1


def test_move_that_takes_too_long_is_given_up() -> None:
    g, _ = migrating()
    wait_too_long(g)
    assert answer(g)[:2] == (0, 1)
    assert g["d1"].only(Cancel).attempt == 1


def test_stream_whose_prompt_is_still_computed_waits_for_its_second_token() -> None:
    g, _ = running("p0", "d0", "d1", num_tokens=1)
    order(g)
    assert g["router"].take(Submit) == []
    g.say("d0", event(1))
    g.tick()
    assert g.submitted().request.attempt == 1


def test_order_without_such_a_stream_is_answered_at_once() -> None:
    g, _ = running("d0", "d1")
    order(g, "d1")
    assert answer(g) == (0, 0, "")
    g["router"].say(Migrate(question=7, request_id=id_of("other")))
    assert answer(g) == (0, 0, "it does not run")


def test_streams_leave_a_draining_worker_and_none_that_all_drain() -> None:
    g, _ = running("d0", "d1")
    drain(g, "d0", "d1")
    g.tick()
    assert g["router"].take(Submit) == []
    g, _ = running("d0", "d1")
    drain(g, "d0")
    g.tick()
    assert g.submitted().migrates_from == id_of("d0")


def test_stream_tries_to_leave_a_draining_worker_less_and_less_often() -> None:
    g, _ = running("d0", "d1")
    drain(g, "d0")
    waits_s = []
    for attempt in range(1, 8):
        waits_s.append(0.0)
        while not (submits := g["router"].take(Submit)):
            g.tick()
            waits_s[-1] += 0.25
        assert submits[0].request.attempt == attempt
        g.refuse(attempt)
    assert waits_s[1] >= RETRY_S and waits_s == sorted(waits_s) and waits_s[-1] <= MAX_RETRY_S + 1


def test_few_streams_move_at_once() -> None:
    g = gateway("d0", "d1")
    names = [f"r{number}" for number in range(MAX_MIGRATIONS + 2)]
    for name in names:
        g.open(a_request(name))
        g.route("d0")
        g.say("d0", event(0, name=name))
    order(g)
    assert len(g["router"].take(Submit)) == MAX_MIGRATIONS
    g.refuse(1, name="r0")
    assert len(g["router"].take(Submit)) == 1


def test_timeline_shows_both_attempts() -> None:
    g = gateway("d0", "d1")
    sink = Answer()
    marks = g.frontend.open(a_request(), sink)
    g.route("d0")
    g.say("d0", event(0))
    order(g)
    g.route("d1")
    prepared(g)
    g.say("d1", event(1, STOP, attempt=1))
    assert [(each.decode, each.end, each.num_tokens) for each in marks.attempts] == [
        ("d0", MIGRATED, 1),
        ("d1", "finished", 1),
    ]
