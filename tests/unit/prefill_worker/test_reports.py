"""Reports of a prefill worker to routers that asked for KV events."""

import time

import pytest

from baton.errors import TransferFailed
from baton.kvtransfer.protocol.messages import Commit
from baton.kvtransfer.transports.base import Sender
from baton.kvtransfer.transports.direct import ShmTransport
from baton.messages.control import KvEventBatch, KvEventsWanted, Measured
from baton.messages.workers import PairTransport, StepTimes
from tests.worker_pair import ROUTER, WorkerPair
from tests.worker_pair_cases import (
    LONG_PROMPT,
    MakePair,
    a_request,
    prefills,
    warm,
)


def events(pair: WorkerPair) -> list[KvEventBatch]:
    return [each for each in pair.said[ROUTER.id] if isinstance(each, KvEventBatch)]


def test_a_router_that_does_not_ask_is_told_nothing(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.answer(a_request())
    pair.quiet_down()
    assert not events(pair) and not prefills(pair)


def test_pages_are_told_as_they_become_known(make_pair: MakePair) -> None:
    pair = make_pair()
    for host in (pair.prefill, pair.decode):
        pair.tell(host, ROUTER, KvEventsWanted())
    pair.turns_until(lambda: len(events(pair)) == 2)
    assert all(each.is_snapshot and not each.keys for each in events(pair))
    pair.answer(a_request())
    # Forty of the prompt's tokens at one, all whole pages of prompt and answer at the other.
    pair.turns_until(lambda: sorted({each.num_changes for each in events(pair)})[1:] != [])
    pair.turns_until(lambda: sum(each.num_changes for each in events(pair)) == 10 + 12)


def test_a_prompts_times_are_told_when_its_pages_are_gone(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.tell(pair.prefill, ROUTER, KvEventsWanted())
    pair.decode.endpoint.holds = Commit
    request = a_request()
    pair.dispatch(request)
    pair.turns_until(lambda: bool(pair.heard(request)) and pair.decode.endpoint.is_holding)
    assert not prefills(pair)
    pair.decode.endpoint.release()
    pair.turns_until(lambda: bool(prefills(pair)))
    (times,) = prefills(pair)
    assert (times.request_id, times.attempt) == (request.request_id, 0)
    assert (times.num_tokens, times.num_new_tokens) == (41, 41)
    assert times.waited_s > 0 and times.computed_s > 0 and times.exposed_s > 0
    assert times.moved_bytes >= 41 * 512 and not times.pulled_bytes


def test_both_workers_tell_a_requests_part_of_their_steps(make_pair: MakePair) -> None:
    pair, requests = make_pair(), [a_request(number, tuple(range(number, 41))) for number in (0, 1)]
    began_s = time.monotonic()
    for request in requests:
        pair.dispatch(request)
    pair.turns_until(
        lambda: all(pair.heard(each) and pair.heard(each)[-1].finish_reason for each in requests)
    )
    used_s = [
        event.times.used_s for each in requests for event in pair.heard(each) if event.times is not None
    ]
    assert len(used_s) == 4 and min(used_s) > 0
    assert sum(used_s) < 2 * (time.monotonic() - began_s)


def test_times_include_the_prefix_pull(make_pair: MakePair) -> None:
    pair = make_pair()
    source = warm(pair, pair.decode)
    pair.tell(pair.prefill, ROUTER, KvEventsWanted())
    pair.dispatch(a_request(1, LONG_PROMPT), source=source)
    pair.turns_until(lambda: bool(prefills(pair)))
    (times,) = prefills(pair)
    assert (times.num_tokens, times.num_new_tokens) == (70, 2)
    assert times.pulled_bytes == 68 * 512 and 0 < times.pulled_s <= times.waited_s


def test_a_prompt_that_is_not_wanted_any_more_has_no_times(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.tell(pair.prefill, ROUTER, KvEventsWanted())
    pair.decode.endpoint.holds = Commit
    request = a_request()
    pair.dispatch(request)
    pair.turns_until(lambda: bool(pair.heard(request)) and pair.decode.endpoint.is_holding)
    pair.cancel(request)
    pair.decode.endpoint.release()
    pair.quiet_down()
    pair.answer(a_request(2))
    pair.turns_until(lambda: bool(prefills(pair)))
    assert [times.request_id for times in prefills(pair)] == [a_request(2).request_id]


def test_some_steps_are_told(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.tell(pair.prefill, ROUTER, KvEventsWanted())
    pair.answer(a_request())

    def steps() -> list[StepTimes]:
        told = [each for each in pair.said[ROUTER.id] if isinstance(each, Measured)]
        return [step for each in told for step in each.steps]

    pair.turns_until(lambda: bool(steps()))
    step = steps()[0]
    assert (step.num_sequences, step.num_new_tokens, step.num_context_tokens) == (1, 41, 41)
    assert step.step_s > 0


def test_load_has_the_times_of_prompts_and_transfers(make_pair: MakePair) -> None:
    pair = make_pair()
    for number in range(3):
        pair.answer(a_request(number))
    pair.quiet_down()
    sent, received = pair.prefill.node.load(), pair.decode.node.load()
    assert {name: sent.times[name].num for name in ("queue", "prefill", "transfer", "exposed_transfer")} == {
        "queue": 3,
        "prefill": 3,
        "transfer": 3,
        "exposed_transfer": 3,
    }
    assert sent.times["exposed_transfer"].sum <= sent.times["transfer"].sum
    assert sent.counters["transfers_handed_over"] == received.counters["transfers_adopted"] == 3
    assert received.counters["verified_shards"] == 3 and not received.counters["digest_mismatches"]


def test_load_names_the_transport_to_each_peer(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.answer(a_request())
    assert pair.prefill.node.load().pairs == (PairTransport("decode-0", "shm", "shm"),)


def test_load_names_a_transport_that_is_only_a_fallback(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: object) -> Sender:
        raise TransferFailed("no shared memory")

    monkeypatch.setattr(ShmTransport, "connect", connect)
    pair = make_pair()
    pair.answer(a_request())
    (found,) = pair.prefill.node.load().pairs
    assert found.has_fallen_back and (found.best, found.peer) == ("shm", "decode-0")


def test_wrong_digest_is_counted(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.decode.endpoint.num_flips = 1
    pair.answer(a_request())
    counters = pair.decode.node.load().counters
    assert (counters["digest_mismatches"], counters["verified_shards"]) == (1, 2)


def test_first_token_tells_the_gateway_the_phases_of_the_prompt(make_pair: MakePair) -> None:
    pair = make_pair()
    began_s = time.monotonic()
    (events,) = pair.answer(a_request())
    ended_s = time.monotonic()
    first, last = events[0].times, events[-1].times
    assert first is not None and last is not None and not any(event.times for event in events[1:-1])
    assert began_s <= first.arrived_s <= first.started_s < first.first_token_s <= ended_s
    assert 0 < first.prompt_s <= first.first_token_s - first.started_s
    assert (first.granted_s, first.ended_s, first.decode_s) == (0.0, 0.0, 0.0)
    assert began_s <= last.arrived_s <= last.granted_s < last.pages_s < last.ended_s <= ended_s
    assert 0 < last.decode_s <= last.ended_s - last.pages_s
    assert (last.started_s, last.first_token_s, last.prompt_s) == (0.0, 0.0, 0.0)
