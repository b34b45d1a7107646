"""The parts of a request's time, from what the gateway has noted."""

from itertools import pairwise
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from baton.gateway.metrics.requests import EndedRequest
from baton.gateway.streams.request_stream import AttemptMarks, RequestMarks, WorkerMarks
from baton.messages.control import Failure, Routed
from baton.messages.timeline import MAX_ATTEMPTS, RequestTimeline
from baton.messages.workers import WorkerTimes
from baton.request import FinishReason
from baton.rpc.peer_clock import SAME_CLOCK, ClockOffset
from tests.answer import Answer
from tests.node_peers import a_request, id_of
from tests.unit.gateway.frontend_peers import event, failed, gateway

CALL = {"received_s": 10.0, "read_s": 10.1, "tokenised_s": 0.2, "ended_s": 20.0}
OPENED_S = 10.5
ROUTER, PREFILL, DECODE = (ClockOffset(offset_s, 1e-4) for offset_s in (1000.0, -5.0, 70.0))


def routed(received_s: float, dispatched_s: float, **fields: Any) -> Routed:
    """Times are by the gateway's clock."""
    return Routed(
        request_id=id_of("r"),
        attempt=0,
        decode=id_of("d"),
        received_s=received_s + ROUTER.offset_s,
        dispatched_s=dispatched_s + ROUTER.offset_s,
        **fields,
    )


def told(name: str, clock: ClockOffset, **times: float) -> WorkerMarks:
    """Moments are by the gateway's clock."""
    moments = {"arrived_s", "started_s", "first_token_s", "granted_s", "pages_s", "ended_s"}
    by_worker: dict[str, Any] = {
        key: value + clock.offset_s if key in moments else value for key, value in times.items()
    }
    return WorkerMarks(name, WorkerTimes(**by_worker), clock)


def disaggregated() -> AttemptMarks:
    """An attempt of which every part takes another time."""
    attempt = AttemptMarks(0, 10.6, "1", routed(10.7, 11.0, num_ahead=3, ahead_tenant="bulk"), ROUTER)
    attempt.decode, attempt.prefill = "decode-0", "prefill-0"
    attempt.workers.append(
        told(
            "prefill-0",
            PREFILL,
            arrived_s=11.1,
            pulled_s=0.2,
            started_s=11.5,
            first_token_s=13.0,
            prompt_s=1.0,
            prompt_preempted_s=0.1,
            hidden_s=0.25,
        )
    )
    attempt.first_token_s = 13.2
    attempt.workers.append(
        told(
            "decode-0",
            DECODE,
            arrived_s=11.1,
            granted_s=13.3,
            pages_s=14.0,
            ended_s=18.0,
            decode_s=2.5,
            decode_preempted_s=0.5,
        )
    )
    attempt.end, attempt.ended_s, attempt.num_tokens = "finished", 18.5, 9
    return attempt


def timeline(
    *attempts: AttemptMarks, last_token_s: float = 18.5, call: dict[str, Any] = CALL
) -> RequestTimeline:
    marks = RequestMarks(OPENED_S, last_token_s, list(attempts))
    ended = EndedRequest(request_id=id_of("r"), outcome="answered", gateway="gateway 1", marks=marks, **call)
    return ended.timeline()


def check(found: RequestTimeline) -> None:
    """The parts follow each other, and sum to the whole with what is unaccounted."""
    for before, after in pairwise(found.parts):
        assert after.begin_s >= before.begin_s + before.seconds - 1e-9, (before, after)
    assert all(part.seconds > 0 for part in found.parts) and found.unaccounted_s >= 0
    assert sum(found.seconds.values()) == pytest.approx(found.total_s)


def test_every_part_of_a_disaggregated_request_has_its_seconds() -> None:
    found = timeline(disaggregated())
    check(found)
    assert {name: round(seconds, 6) for name, seconds in found.seconds.items()} == {
        "received": 0.1,
        "tokenised": 0.2,
        "parsed": 0.2,
        "queued": 0.5,
        "dispatched": 0.1,
        "prefix_pulled": 0.2,
        "prefill_queued": 0.2,
        "prefill_computing": 1.0,
        "prefill_preempted": 0.1,
        "prefill_waiting": 0.4,
        "first_token": 0.2,
        "decode_queued": 0.1,
        "transfer_exposed": 0.7,
        "decode_computing": 2.5,
        "decode_preempted": 0.5,
        "decode_waiting": 1.0,
        "delivered": 0.5,
        "written": 1.5,
        "unaccounted": 0.0,
    }
    processes = {part.name: part.process for part in found.parts}
    assert processes["queued"] == "router 1" and processes["dispatched"] == "prefill-0"
    assert processes["transfer_exposed"] == "decode-0" and processes["written"] == "gateway 1"
    assert (found.num_ahead, found.ahead_tenant, found.hidden_transfer_s) == (3, "bulk", 0.25)
    assert found.first_token_s == pytest.approx(3.2) and found.clock_error_s == 1e-4


def test_draft_tokens_of_all_attempts_are_summed() -> None:
    first, second = disaggregated(), disaggregated()
    for attempt, num in ((first, 3), (second, 5)):
        attempt.workers[1] = told(
            "decode-0",
            DECODE,
            ended_s=18.0,
            arrived_s=11.1,
            num_draft_tokens=2 * num,
            num_accepted_tokens=num,
        )
    found = timeline(first, second)
    assert (found.num_draft_tokens, found.num_accepted_tokens) == (16, 8)


def test_failed_attempt_is_replayed_from_its_dispatch_to_the_next_submission() -> None:
    lost = AttemptMarks(0, 10.6, "1", routed(10.7, 10.8), ROUTER, "decode-1")
    lost.first_token_s, lost.end, lost.ended_s = 10.85, "lost", 10.9
    rejected = AttemptMarks(1, 10.92, "1", end="rejected", ended_s=10.95)
    last = disaggregated()
    last.number, last.submitted_s = 2, 10.96
    found = timeline(lost, rejected, last)
    check(found)
    assert found.seconds["replayed"] == pytest.approx(10.92 - 10.8)
    assert found.seconds["queued"] == pytest.approx((10.8 - OPENED_S) + (11.0 - 10.92))
    assert found.first_token_s == pytest.approx(0.85), "the client had the token of the lost attempt"
    assert [attempt.end for attempt in found.attempts] == ["lost", "rejected", "finished"]


def test_time_that_no_process_tells_of_is_unaccounted() -> None:
    attempt = disaggregated()
    del attempt.workers[0]
    found = timeline(attempt)
    check(found)
    assert found.unaccounted_s == pytest.approx(13.2 - 11.0)


def test_without_offsets_the_phases_are_placed_by_the_arrival_of_their_tokens() -> None:
    attempt = disaggregated()
    attempt.workers = [replace(each, clock=None) for each in attempt.workers]
    attempt.router_clock = None
    found = timeline(attempt)
    check(found)
    assert found.seconds["queued"] == pytest.approx(0.4)  # without the way to the router
    assert found.seconds["prefill_computing"] == 1.0 and "first_token" not in found.seconds
    assert found.seconds["decode_computing"] == 2.5


def test_answer_that_the_gateway_ended_is_streamed_after_its_first_token() -> None:
    attempt = disaggregated()
    del attempt.workers[1]
    attempt.end = "cancelled"
    found = timeline(attempt)
    check(found)
    assert found.seconds["streamed"] == pytest.approx(18.5 - 13.2)


@pytest.mark.parametrize(("end", "part"), [("cancelled", "cancelled"), ("WorkerLost", "lost")])
def test_attempt_without_a_token_is_one_part(end: str, part: str) -> None:
    attempt = AttemptMarks(0, 10.6, "1", routed(10.7, 11.0), ROUTER, "decode-0")
    attempt.end, attempt.ended_s = end, 15.0
    found = timeline(attempt, last_token_s=15.0)
    check(found)
    assert found.seconds[part] == pytest.approx(4.0) and "written" not in found.seconds


@pytest.mark.parametrize("seeds", [range(first, first + 20) for first in range(0, 200, 20)], ids=str)
def test_parts_never_overlap_whatever_processes_tell(seeds: range) -> None:
    for seed in seeds:
        check_random_timeline(Random(seed))


def check_random_timeline(rng: Random) -> None:

    def moment() -> float:
        return rng.choice((0.0, rng.uniform(5.0, 25.0)))

    def seconds() -> float:
        return rng.choice((0.0, rng.expovariate(1.0)))

    attempts = []
    for number in range(rng.randrange(4)):
        attempt = AttemptMarks(number, rng.uniform(9.0, 21.0), "1")
        if rng.random() < 0.8:
            attempt.routed = routed(moment(), moment())
            attempt.router_clock = rng.choice((ROUTER, None))
        for _ in range(rng.randrange(3)):
            times = {
                **{f"{name}_s": moment() for name in ("started", "first_token", "granted", "pages", "ended")},
                **{f"{name}_s": seconds() for name in ("pulled", "prompt", "decode", "decode_preempted")},
            }
            worker = told("w", rng.choice((PREFILL, DECODE)), arrived_s=moment() + 100.0, **times)
            attempt.workers.append(replace(worker, clock=rng.choice((worker.clock, None))))
        attempt.first_token_s = rng.choice((None, moment()))
        attempt.end, attempt.ended_s = rng.choice(("", "lost", "finished", "cancelled")), moment()
        attempts.append(attempt)
    call = {
        **CALL,
        "read_s": rng.uniform(9.0, 12.0),
        "tokenised_s": seconds(),
        "ended_s": rng.uniform(9.0, 21.0),
    }
    check(timeline(*attempts, last_token_s=moment(), call=call))


# What the frontend notes.


def test_frontend_notes_attempts_tokens_and_the_clocks_of_senders() -> None:
    g = gateway("p0", "d0", "d1")
    g["p0"].clock_offset, g["d1"].clock_offset = PREFILL, DECODE
    marks = g.frontend.open(a_request(tenant="acme"), sink := Answer())
    g.route("d0", "p0", received_s=7.0, dispatched_s=8.0)
    g.clock.advance(1.0)
    g["d0"].say(failed(Failure.LOST))
    g.clock.advance(0.5)
    g.route("d1", "p0")
    g.clock.advance(0.25)
    first, last = WorkerTimes(arrived_s=1.0, used_s=0.5), WorkerTimes(arrived_s=2.0, used_s=0.25)
    g.say("p0", replace(event(0, attempt=1), times=first))
    g.clock.advance(2.0)
    g.say("d1", replace(event(1, FinishReason.LENGTH, attempt=1), times=last))
    assert sink.finish is FinishReason.LENGTH
    lost, kept = marks.attempts
    assert (lost.number, lost.decode, lost.prefill, lost.end, lost.ended_s) == (0, "d0", "p0", "lost", 51.0)
    assert lost.routed is not None and lost.routed.dispatched_s == 8.0
    assert (kept.submitted_s, kept.end, kept.num_tokens) == (51.0, "finished", 2)
    assert (kept.first_token_s, marks.last_token_s) == (51.75, 53.75)
    assert kept.workers == [WorkerMarks("p0", first, PREFILL), WorkerMarks("d1", last, DECODE)]
    assert g.frontend.worker_us == {"acme": 750_000}


def test_cancelled_attempt_gets_its_phases_a_moment_after_its_end() -> None:
    g = gateway("d0")
    marks = g.frontend.open(a_request(), Answer())
    g.route("d0")
    g.say("d0", event(0))
    g.frontend.cancel(id_of("r"))
    times = WorkerTimes(arrived_s=1.0, ended_s=2.0, used_s=2.0)
    aborted = replace(event(0, FinishReason.ABORT, token_id=None), times=times)
    g["d0"].received.clear()
    g.say("d0", aborted)
    (attempt,) = marks.attempts
    assert (attempt.end, attempt.workers) == ("cancelled", [WorkerMarks("d0", times, SAME_CLOCK)])
    g.say("d0", aborted)
    assert g.frontend.worker_us == {"": 2_000_000}
    assert len(attempt.workers) == 1 and not g["d0"].received and not g.frontend.counters["stale_events"]


def test_only_the_latest_attempts_are_kept() -> None:
    marks = RequestMarks(1.0)
    for number in range(MAX_ATTEMPTS + 5):
        marks.submitted(number, "router", 1.0)
        marks.ended("rejected", 0, 2.0)
    assert [attempt.number for attempt in marks.attempts] == list(range(5, MAX_ATTEMPTS + 5))
