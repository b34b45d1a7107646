"""Orders, grants and cancels of a prefill worker, and the pages that it frees.

That its pair answers as it should is tested with the decode worker.
"""

from collections import Counter

import pytest

from baton.engine.engine import Engine
from baton.errors import WireError
from baton.kvtransfer.protocol.messages import Grant, Wrote
from baton.messages.codec import AnyMessage
from baton.messages.control import (
    Cancel,
    Dispatch,
    Failure,
    Hello,
    Members,
    Prefill,
    Prefilled,
    PrefillFailed,
    Reachable,
)
from baton.messages.operations import Drain
from baton.messages.workers import MAX_DESTINATIONS
from baton.prefill_worker.worker import add_sent
from baton.request import Request
from tests.tiny_models import MAX_MODEL_LEN
from tests.worker_pair import GATEWAY, PREFILL, ROUTER, WorkerPair, prefill_of
from tests.worker_pair_cases import (
    PROMPT,
    SMALL_STEPS,
    STAGES,
    MakePair,
    a_request,
    answer_after_ticks,
    answer_alone,
    answer_of,
    bring_to,
    said,
)


def order(pair: WorkerPair, request: Request, transfer: bytes = b"t" * 16) -> None:
    """Order a prompt as the router does; the decode worker does not know of the attempt."""
    pair.tell(pair.prefill, ROUTER, prefill_of(request, transfer))


def refusals(pair: WorkerPair) -> list[tuple[Failure, str]]:
    """What it has said to the decode worker; those are held back."""
    said_ = [letter.message for letter in pair.post.held()]
    return [(each.failure, each.reason) for each in said_ if isinstance(each, PrefillFailed)]


def test_prompt_is_computed_before_pages_are_granted(make_pair: MakePair, alone: Engine) -> None:
    pair, request = make_pair(), a_request()
    bring_to(pair, request, "ungranted")
    assert len(pair.heard(request)) == 1
    pair.release()
    assert answer_of(pair, request) == answer_alone(alone, request)
    assert not pair.decode_worker.counters["recomputed_prefills"]


def test_grant_may_come_before_its_order(make_pair: MakePair, alone: Engine) -> None:
    pair, request = make_pair(), a_request()
    bring_to(pair, request, "ordered")
    pair.turns_until(lambda: bool(pair.prefill.endpoint.num_open))
    pair.turn()
    pair.hold()
    assert answer_of(pair, request) == answer_alone(alone, request)
    assert not pair.decode_worker.counters["recomputed_prefills"]


def test_grant_whose_order_never_comes_is_given_back(
    make_pair: MakePair, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router may die between its two messages: the decode worker computes the prompt itself."""
    monkeypatch.setattr("baton.prefill_worker.worker.MAX_ORDER_WAIT_S", 0.05)
    pair, request = make_pair(), a_request()
    bring_to(pair, request, "ordered")
    pair.turns_until(lambda: bool(pair.prefill.endpoint.num_open))
    assert answer_after_ticks(pair, request) == answer_alone(alone, request)
    assert pair.decode_worker.counters["recomputed_prefills"] == 1
    pair.cancel(request)


def test_computed_prompt_without_a_grant_is_given_up(
    make_pair: MakePair, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.prefill_worker.worker.MAX_GRANT_WAIT_S", 0.05)
    pair, request = make_pair(), a_request()
    bring_to(pair, request, "ungranted")
    assert answer_after_ticks(pair, request) == answer_alone(alone, request)
    assert pair.decode_worker.counters["recomputed_prefills"] == 1


def test_ungranted_prompts_make_way_when_nothing_else_can_run(make_pair: MakePair, alone: Engine) -> None:
    """The prefill worker has pages for two prompts, and both wait for grants while a third is granted."""
    pair = make_pair(num_pages=(26, 96))
    pair.prefill.endpoint.holds = Grant
    requests = [a_request(number, (number, *PROMPT[1:])) for number in range(3)]
    for request in requests:
        pair.dispatch(request)
    pair.turns_until(lambda: all(pair.heard(request) for request in requests))
    assert pair.decode_worker.counters["recomputed_prefills"] == 1
    pair.release()
    pair.turns_until(lambda: all(pair.is_answered(request) for request in requests))
    for request in requests:
        assert said(pair.heard(request)) == answer_alone(alone, request)


def test_ungranted_prompts_stay_while_another_waits_for_the_queue_window(make_pair: MakePair) -> None:
    pair = make_pair(scheduler={"max_queue_delay_ms": 60.0})
    pair.prefill.endpoint.holds = Grant
    requests = [a_request(number, (number, *PROMPT[1:])) for number in range(3)]
    for request in requests[:2]:
        pair.dispatch(request)
    pair.turns_until(lambda: all(pair.heard(request) for request in requests[:2]))
    pair.dispatch(requests[2])
    pair.turns_until(lambda: bool(pair.heard(requests[2])))
    assert len(pair.prefill.node.attempts) == 3
    assert not pair.decode_worker.counters["recomputed_prefills"]
    pair.release()
    pair.quiet_down()


def test_ungranted_prompts_make_way_for_one_that_lacks_pages_and_not_for_one_that_is_held(
    make_pair: MakePair,
) -> None:
    """The prefill worker has pages for two prompts. A prompt is held while its grammar is compiled."""
    pair = make_pair(num_pages=(26, 96))
    pair.prefill.endpoint.holds = Grant
    engine, requests = pair.prefill.engine, [a_request(n, (n, *PROMPT[1:])) for n in range(4)]
    for request in requests[:2]:
        pair.dispatch(request)
    pair.turns_until(lambda: all(pair.heard(request) for request in requests[:2]))
    pair.dispatch(requests[2])
    pair.turn()
    (held,) = engine.scheduler.sequences()
    held.is_held = True
    for _ in range(9):
        pair.turn()
    assert len(pair.prefill.node.attempts) == 3
    pair.dispatch(requests[3])
    pair.turns_until(lambda: bool(pair.heard(requests[3])))
    assert pair.decode_worker.counters["recomputed_prefills"] == 1
    held.is_held = False
    pair.release()
    pair.turns_until(lambda: all(pair.is_answered(request) for request in requests))


def test_pages_leave_while_the_rest_is_computed(make_pair: MakePair) -> None:
    pair, request = make_pair(**SMALL_STEPS), a_request(prompt=tuple(range(90)), max_tokens=2)
    pair.decode.endpoint.holds = Wrote
    bring_to(pair, request, "ordered")
    pair.turns_until(lambda: bool(pair.prefill.endpoint.num_open))  # the grant is there before the order
    pair.hold()
    pair.turns_until(pair.prefill.engine.has_work)
    pair.turn()  # a first step
    while not pair.decode.endpoint.is_holding:  # no other: the rest cannot be done before
        for host in (pair.prefill, pair.decode):
            assert not host.endpoint.poll()
            host.endpoint.wait(0.001)
    assert pair.prefill.engine.has_work() and not pair.heard(request)
    pair.decode.endpoint.release()
    pair.turns_until(lambda: pair.is_answered(request))


@pytest.mark.parametrize("stage", STAGES)
def test_computed_pages_make_a_second_attempt_cheap(make_pair: MakePair, stage: str) -> None:
    pair, request = make_pair(**SMALL_STEPS), a_request()
    bring_to(pair, request, stage)
    for _ in range(1 if stage == "computing" else 0):
        pair.turn()
    pair.cancel(request)
    pair.hold()
    pair.release()
    pair.quiet_down()
    again = a_request(attempt=1)
    pair.decode.engine.scheduler.cache.make_room(96, keep=False)  # nothing is known at the decode worker
    (answer,) = pair.answer(again)
    num_cached = answer[0].num_cached_tokens
    if stage == "ordered":
        assert num_cached == 0
    elif stage == "computing":
        assert 8 <= num_cached < 40
    else:
        assert num_cached == 40


def test_a_decode_worker_that_is_lost_ends_its_prompts(make_pair: MakePair) -> None:
    pair, request = make_pair(**SMALL_STEPS), a_request()
    bring_to(pair, request, "computing")
    pair.leave(pair.prefill, pair.decode.hello)
    assert not pair.prefill.node.attempts and not pair.prefill.engine.has_work()
    pair.leave(pair.decode, pair.prefill.hello)  # a connection ends at both ends
    pair.turns_until(lambda: bool(pair.failures()))


def test_a_decode_worker_that_is_not_listed_any_more_ends_its_prompts(make_pair: MakePair) -> None:
    pair, request = make_pair(**SMALL_STEPS), a_request()
    bring_to(pair, request, "computing")
    num_said = len(pair.said[ROUTER.id])
    pair.tell(pair.prefill, ROUTER, Members(workers=(pair.prefill.worker,)))
    assert not pair.prefill.node.attempts
    pair.turns_until(lambda: pair.is_answered(request))  # it is told, as it lives after all
    assert pair.decode_worker.counters["recomputed_prefills"] == 1
    assert Reachable(workers=()) in pair.said[ROUTER.id][num_said:]


def test_attempt_may_be_ordered_twice(make_pair: MakePair) -> None:
    """A router that starts anew may give to another decode worker what the last one gave to the first."""
    pair, request = make_pair(**SMALL_STEPS), a_request()
    pair.hold(Prefilled)
    order(pair, request, b"1" * 16)
    order(pair, request, b"2" * 16)
    pair.turns_until(lambda: len(pair.post.held()) == 2)
    said_ = [each.message for each in pair.post.held() if isinstance(each.message, Prefilled)]
    assert len({each.event.token_id for each in said_}) == 1
    assert len(pair.prefill.node.attempts) == 2
    cancel = Cancel(request_id=request.request_id, attempt=0)
    pair.tell(pair.prefill, pair.decode.hello, cancel)
    assert not pair.prefill.node.attempts


class TestRefusals:
    def test_while_it_drains(self, make_pair: MakePair) -> None:
        pair = make_pair()
        pair.hold(PrefillFailed)
        pair.tell(pair.prefill, ROUTER, Drain(worker=PREFILL))
        order(pair, a_request())
        assert refusals(pair) == [(Failure.BUSY, "the worker is about to end")]
        assert pair.prefill.node.is_idle

    def test_of_what_cannot_run(self, make_pair: MakePair) -> None:
        pair = make_pair()
        pair.hold(PrefillFailed)
        order(pair, a_request(prompt=(1,) * MAX_MODEL_LEN))
        ((failure, reason),) = refusals(pair)
        assert failure is Failure.INVALID and f"the model takes {MAX_MODEL_LEN}" in reason


def test_prompt_that_no_transfer_can_carry_is_computed_by_the_decode_worker(
    make_pair: MakePair, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, request = make_pair(), a_request()
    monkeypatch.setattr("baton.kvtransfer.protocol.messages.MAX_PAGES", 10)
    pair.dispatch(request)
    assert answer_of(pair, request) == answer_alone(alone, request)
    assert pair.decode_worker.counters["recomputed_prefills"] == 1


def test_grant_for_another_prompt_is_refused(make_pair: MakePair, alone: Engine) -> None:
    pair, request = make_pair(**SMALL_STEPS), a_request()
    bring_to(pair, request, "ordered")
    (ordered,) = (each.message for each in pair.post.held())
    assert isinstance(ordered, Prefill)
    order(pair, a_request(1, PROMPT[:20]), ordered.transfer)
    assert answer_of(pair, request) == answer_alone(alone, request)
    assert pair.decode_worker.counters["recomputed_prefills"] == 1
    pair.tell(pair.prefill, pair.decode.hello, Cancel(request_id=a_request(1).request_id, attempt=0))


def test_cancel_may_come_before_the_order(make_pair: MakePair) -> None:
    pair, request = make_pair(), a_request()
    pair.tell(pair.prefill, pair.decode.hello, Cancel(request_id=request.request_id, attempt=0))
    order(pair, request)
    assert not pair.prefill.node.attempts and not pair.prefill.engine.has_work()


def test_only_the_jobs_decode_worker_cancels_it(make_pair: MakePair) -> None:
    pair, request = make_pair(**SMALL_STEPS), a_request()
    bring_to(pair, request, "computing")
    cancel = Cancel(request_id=request.request_id, attempt=0)
    pair.tell(pair.prefill, GATEWAY, cancel)
    pair.tell(pair.prefill, pair.decode.hello, Cancel(request_id=request.request_id, attempt=1))
    assert pair.prefill.node.attempts
    pair.tell(pair.prefill, pair.decode.hello, cancel)
    assert not pair.prefill.node.attempts and not pair.prefill.engine.has_work()
    pair.cancel(request)


@pytest.mark.parametrize(
    ("sender", "message"),
    [
        (GATEWAY, prefill_of(a_request(), b"t" * 16)),
        (ROUTER, Dispatch(request=a_request(), gateway=GATEWAY.id)),
        (GATEWAY, Drain(worker=PREFILL)),
        (GATEWAY, Members(workers=())),
    ],
)
def test_peer_that_sends_a_message_of_another_role_is_dropped(
    make_pair: MakePair, sender: Hello, message: AnyMessage
) -> None:
    pair = make_pair()
    with pytest.raises(WireError, match="a prefill worker takes no"):
        pair.tell(pair.prefill, sender, message)
    assert pair.prefill.node.is_idle and not pair.prefill.node.is_draining


def test_sent_bytes_are_counted_by_the_latest_decode_workers() -> None:
    sent: Counter[str] = Counter()
    for number in range(MAX_DESTINATIONS):
        add_sent(sent, f"d{number}", 10)
    add_sent(sent, "d0", 5)
    add_sent(sent, "another", 1)
    assert list(sent)[-2:] == ["d0", "another"] and len(sent) == MAX_DESTINATIONS
    assert sent["d0"] == 15 and "d1" not in sent
