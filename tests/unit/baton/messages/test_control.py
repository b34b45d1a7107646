"""Control messages on the wire, and values that their decoder refuses."""

import random
from typing import Any

import msgspec
import pytest

from baton.errors import WireError
from baton.messages import control as c
from baton.messages.bounds import MAX_EVENTS, MAX_WORKERS, Kind
from baton.messages.codec import AnyMessage, decode, encode
from baton.messages.control import Decision, Weighed
from baton.messages.operations import (
    Decisions,
    Drain,
    Explain,
    FindRequests,
    Flip,
    FoundRequests,
    GatewayReport,
    GatewayStatus,
    Migrate,
    Migrated,
    OrderedWorkers,
    PlanSummary,
    RecordingPart,
    RecordingQuery,
    RestartWorker,
    Scale,
    Status,
    StatusQuery,
    SupervisorReport,
    Undrain,
    WatchWorkers,
    WorkerRemoved,
)
from baton.messages.orders import Sleep, Wake
from baton.messages.status import OverloadLevel, QueueStatus, RouterStatus, TenantStatus
from baton.messages.timeline import RequestTimeline, TimelineAttempt, TimelinePart
from baton.messages.workers import (
    Address,
    Load,
    PrefillTimes,
    RunningStep,
    StepTimes,
    Tier,
    Worker,
    WorkerRole,
    WorkerStatus,
    WorkerTimes,
)
from baton.request import FinishReason, Request, SamplingParams, TokenEvent, TokenIds, TokenLogprobs
from baton.tenants import Refusal
from tests.node_peers import a_worker

ID, OTHER_ID = "a" * 32, "b" * 32
TIMES = WorkerTimes(arrived_s=7.0, started_s=7.5, prompt_s=0.25)


def worker(**changes: Any) -> Worker:
    return a_worker("decode-0", **{"id": OTHER_ID, **changes})


def one_of_each(rng: random.Random) -> list[AnyMessage]:
    request = Request(
        request_id=ID,
        token_ids=TokenIds.of(tuple(rng.randrange(2**17) for _ in range(rng.randrange(1, 50)))),
        sampling=SamplingParams(seed=rng.randrange(2**63), logit_bias={3: 1.5}, stop_token_ids=(1, 2)),
        cache_salt=rng.randbytes(8),
        generated_token_ids=tuple(range(rng.randrange(5))),
    )
    logprobs = TokenLogprobs(token_id=5, logprob=-0.5, rank=1, top=((5, -0.5), (6, -1.5)))
    event = TokenEvent(ID, 1, rng.randrange(100), 7, FinishReason.STOP, 3, logprobs, (None, logprobs), TIMES)
    load = Load(num_running=3, pages={"free": 5}, counters={"dropped_key": 1})
    attempts = ((ID, 0), (OTHER_ID, 2**16))
    return [
        c.Hello(process=Kind.WORKER, id=ID, worker=worker()),
        c.Members(workers=(worker(), worker(id=ID)), is_complete=False),
        c.Reachable(workers=(ID, OTHER_ID)),
        c.Submit(request=request, sticky_worker=OTHER_ID, avoid=(ID,)),
        c.Queued(request_id=ID, attempt=1),
        c.Routed(
            request_id=ID,
            attempt=1,
            decode=OTHER_ID,
            prefill=ID,
            reason="least loaded",
            received_s=7.5,
            dispatched_s=8.0,
            num_ahead=3,
            ahead_tenant="acme",
        ),
        c.Rejected(request_id=ID, attempt=1, reason="full", retry_after_s=1.5),
        c.Started(attempts=attempts),
        c.Ended(attempts=attempts, num_tokens=(17, 0)),
        c.Dispatch(request=request, gateway=ID, prefill=OTHER_ID),
        c.Prefill(request=request, gateway=ID, decode=OTHER_ID, transfer=rng.randbytes(16)),
        c.Tokens(events=(event, event)),
        c.Prefilled(event=event),
        c.PrefillFailed(request_id=ID, attempt=0, failure=c.Failure.BUSY, reason="no room"),
        c.AttemptFailed(request_id=ID, attempt=0, failure=c.Failure.LOST, reason="gone", worker=OTHER_ID),
        c.Cancel(request_id=ID, attempt=0),
        c.Prepared(request_id=ID, attempt=1),
        c.TakeOver(request_id=ID, attempt=1, token_ids=(5, 7)),
        c.Alive(step=RunningStep(age_s=6.0, num_tokens=2048, bound_s=30.0)),
        c.Heartbeat(load=load, is_draining=True, attempts=attempts),
        c.KvEventBatch(first=7, keys=bytes(16), tier=Tier.HOST, is_snapshot=True),
        c.KvEventBatch(first=9, keys=bytes(8), tier=None),
        c.KvEventsWanted(),
        c.Measured(
            prefills=(PrefillTimes(ID, 0, 0.1, 0.2, 100, 120, 10, 0.01, 1000, 0.001),),
            steps=(StepTimes(3, 0, 500, 0.01),),
        ),
        Drain(worker="decode-0"),
        c.Pressure(level=OverloadLevel.MAKE_ROOM),
        StatusQuery(),
        Status(
            workers=(WorkerStatus(worker=worker(), load=load, num_attempts=1, beat_age_s=0.5),),
            num_gateways=1,
            routers=(RouterStatus(id=ID, redis="up", counters={"routed": 5}, queue=queue_status()),),
            left_out={"counters": 3},
        ),
        Explain(request_id=ID),
        Decisions(decisions=(decision(),)),
        WatchWorkers(),
        WorkerRemoved(worker=ID, name="decode-0", reason="it was silent for 3 s", is_hung=False),
        Undrain(worker="decode-0"),
        SupervisorReport(
            head_away_s=4,
            ordered=(OrderedWorkers(model="a", role=WorkerRole.DECODE, number=3),),
            plans=(PlanSummary(id="p", before_s=0, outcome="keep", workers="1P1D"),),
        ),
        GatewayReport(status=GatewayStatus(id=ID, node="host", pid=7, num_open=2, num_refused=1)),
        RestartWorker(worker="decode-0"),
        Flip(worker="decode-0", role=WorkerRole.PREFILL),
        Scale(num_prefill=0, num_decode=3, model="a"),
        Sleep(model="a", level=2),
        Wake(model="a"),
        Migrate(question=1, worker="decode-0", to=OTHER_ID, asker=ID, num_asked=2),
        Migrated(question=1, asker=ID, num_asked=2, num_moved=3, num_left=1, reason="full"),
        FindRequests(question=1, order="slowest", limit=7, tenant="acme", asker=ID, num_asked=2),
        FoundRequests(question=1, asker=ID, num_asked=2, timelines=(timeline(),)),
        RecordingQuery(last_s=90.0, number=7, first=2**19),
        RecordingPart(number=7, body=random.randbytes(64), num_bytes=2**19 + 64, next_number=8),
    ]


def timeline() -> RequestTimeline:
    return RequestTimeline(
        request_id=ID,
        outcome="answered",
        began_s=1.7e9,
        total_s=2.0,
        parts=(TimelinePart("queued", 0.5, 1.5, "router 1"),),
        attempts=(TimelineAttempt(number=0, begin_s=0.5, end_s=2.0, decode="decode-0", num_tokens=3),),
    )


def queue_status() -> QueueStatus:
    tenant = TenantStatus(tenant="acme", num_queued=3, oldest_wait_s=1.5, refused={Refusal.SLO: 2})
    return QueueStatus(level=OverloadLevel.CLIP, num_queued=3, oldest_wait_s=1.5, tenants=(tenant,))


def decision() -> Decision:
    chosen = Weighed(decode=ID, prefill=OTHER_ID, source=ID, num_held_tokens=64, terms={"queue_s": 0.5})
    return Decision(
        request_id=ID,
        attempt=1,
        age_s=2.0,
        reason="cost",
        num_tokens=100,
        chosen=chosen,
        weighed=(chosen, Weighed(decode=ID)),
        first_token_s=0.75,
        measured=PrefillTimes(ID, 1, 0.1, 0.2, 100, 120),
    )


def test_every_message_survives_the_wire() -> None:
    messages = one_of_each(random.Random(1))
    assert {type(message) for message in messages} == set(AnyMessage.__args__)
    for message in messages:
        assert decode(encode(message)) == message


def test_plain_msgpack_reads_a_body() -> None:
    msgpack = pytest.importorskip("msgpack")
    for message in one_of_each(random.Random(2)):
        fields = msgpack.unpackb(encode(message), strict_map_key=False)
        assert fields["kind"] == type(message).__name__
        packed = msgpack.packb(fields)
        assert decode(packed) == message


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "Nothing"},
        {"extra": 1},
        {"request_id": "a" * 31},
        {"request_id": "../" + "a" * 29},
        {"attempt": -1},
        {"attempt": 2**16 + 1},
        {"failure": "boredom"},
        {"reason": "x" * 513},
        {"worker": "x" * 33},
    ],
)
def test_value_out_of_its_bounds_is_refused(changes: dict[str, object]) -> None:
    message = c.AttemptFailed(request_id=ID, attempt=0, failure=c.Failure.LOST, reason="gone")
    fields = msgspec.msgpack.decode(encode(message), type=dict[str, object])
    assert decode(msgspec.msgpack.encode(fields)) == message
    with pytest.raises(WireError) as caught:
        decode(msgspec.msgpack.encode(fields | changes))
    assert caught.value.reason == "message"


@pytest.mark.parametrize(
    "message",
    [
        c.Reachable(workers=(ID,) * (MAX_WORKERS + 1)),
        c.Ended(attempts=((ID, 0),) * (MAX_EVENTS + 1)),
        c.Tokens(events=(TokenEvent(ID, 0, 0, -1),)),
        c.Tokens(events=(TokenEvent(ID, 0, 0, 2**31),)),
        c.Tokens(events=(TokenEvent(ID, 0, 2**53 + 1, 1),)),
        c.Prefill(
            request=Request(request_id=ID, token_ids=TokenIds.of((1,))),
            gateway=ID,
            decode=ID,
            transfer=b"short",
        ),
        c.Submit(request=Request(request_id="../etc/passwd", token_ids=TokenIds.of((1,)))),
        c.Submit(request=Request(request_id=ID, token_ids=TokenIds.of((1,)), attempt=2**17)),
        c.Submit(request=Request(request_id=ID, token_ids=TokenIds.of((1,)), attempt=-1)),
        c.Submit(request=Request(request_id=ID, token_ids=TokenIds.of((1,)), generated_token_ids=(-1,))),
        c.Submit(request=Request(request_id=ID, token_ids=TokenIds.of((1,)), generated_token_ids=(2**31,))),
        c.Rejected(request_id=ID, attempt=0, reason="", retry_after_s=float("nan")),
        c.Rejected(request_id=ID, attempt=0, reason="", retry_after_s=-1.0),
        c.Hello(process=Kind.WORKER, id=ID, worker=worker(address=Address("", 1))),
        c.Hello(process=Kind.WORKER, id=ID, worker=worker(address=Address("h", 0))),
        c.Hello(process=Kind.WORKER, id=ID, worker=worker(num_pages=-1)),
    ],
)
def test_receiver_refuses_values_that_the_sender_does_not_check(message: AnyMessage) -> None:
    with pytest.raises(WireError):
        decode(encode(message))


def test_sampling_out_of_range_is_refused() -> None:
    request = Request(request_id=ID, token_ids=TokenIds.of((1,)), sampling=SamplingParams(temperature=0.5))
    fields = msgspec.msgpack.decode(encode(c.Submit(request=request)), type=dict[str, Any])
    fields["request"]["sampling"]["temperature"] = -1.0
    with pytest.raises(WireError, match="temperature"):
        decode(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("reason", [2**64, "half a pair: \ud800", object()])
def test_unencodable_value_is_refused_by_the_sender(reason: Any) -> None:
    failed = c.AttemptFailed(request_id=ID, attempt=0, failure=c.Failure.LOST, reason=reason)
    with pytest.raises(WireError, match="an? AttemptFailed that can't be written") as caught:
        encode(failed)
    assert caught.value.reason == "message"


def test_longest_prompt_of_a_large_context_fits_a_frame() -> None:
    request = Request(request_id=ID, token_ids=TokenIds.of((150_000,) * 131_072))
    assert decode(encode(c.Submit(request=request))) == c.Submit(request=request)
    with pytest.raises(WireError, match="is most"):
        encode(c.Submit(request=Request(request_id=ID, token_ids=TokenIds.of((150_000,) * 262_144))))
