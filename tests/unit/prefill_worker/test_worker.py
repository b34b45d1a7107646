"""What a prefill worker does for whom, and what it leaves behind.

That its pair answers as it should is tested with the decode worker.
"""

import pytest

from baton.engine.engine import Engine
from baton.errors import WireError
from baton.kvtransfer.protocol.messages import Reserve, Wrote
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
from baton.request import Request
from tests.tiny_models import MAX_MODEL_LEN
from tests.worker_pair import GATEWAY, PREFILL, ROUTER, WorkerPair
from tests.worker_pair_cases import STAGES, MakePair, a_request, answer_alone, bring_to, said

SMALL_STEPS = {"scheduler": {"max_num_batched_tokens": 8}}


def ask(pair: WorkerPair, request: Request, transfer: bytes = b"t" * 16) -> None:
    """As the decode worker asks, but it knows nothing of that."""
    prefill = Prefill(request=request, gateway=GATEWAY.id, transfer=transfer)
    pair.tell(pair.prefill, pair.decode.hello, prefill)


def refusals(pair: WorkerPair) -> list[tuple[Failure, str]]:
    """What it has said to the decode worker; those are held back."""
    said_ = [letter.message for letter in pair.post.held()]
    return [(each.failure, each.reason) for each in said_ if isinstance(each, PrefillFailed)]


def test_a_prompt_is_computed_while_pages_are_asked_for(make_pair: MakePair) -> None:
    pair, request = make_pair(), a_request()
    pair.decode.endpoint.holds = Reserve
    pair.dispatch(request)
    pair.turns_until(lambda: pair.decode.endpoint.is_holding and bool(pair.heard(request)))
    assert not pair.decode.endpoint.num_open and len(pair.heard(request)) == 1
    pair.decode.endpoint.release()
    pair.turns_until(lambda: pair.is_answered(request))
    assert not pair.decode_worker.counters["recomputed_prefills"]


def test_pages_refused_after_the_first_token_are_computed_where_they_were_refused(
    make_pair: MakePair, alone: Engine
) -> None:
    pair, request = make_pair(), a_request()
    bring_to(pair, request, "unreserved")
    pair.decode.endpoint._admit = lambda reserve, num_pages: None
    pair.decode.endpoint.release()
    pair.turns_until(lambda: pair.is_answered(request))
    assert said(pair.heard(request)) == answer_alone(alone, request)
    assert pair.decode_worker.counters["recomputed_prefills"] == 1


def test_pages_leave_while_the_rest_is_computed(make_pair: MakePair) -> None:
    pair, request = make_pair(**SMALL_STEPS), a_request(prompt=tuple(range(90)), max_tokens=2)
    pair.decode.endpoint.holds = Wrote
    pair.dispatch(request)
    pair.turns_until(pair.prefill.engine.has_work)
    pair.turn()  # a first step
    while not pair.decode.endpoint.is_holding:  # no other: the rest cannot be done before
        for host in (pair.prefill, pair.decode):
            assert not host.endpoint.poll()
            host.endpoint.wait(0.001)
    assert pair.prefill.engine.has_work() and not pair.heard(request)
    pair.decode.endpoint.release()
    pair.turns_until(lambda: pair.is_answered(request))


def test_the_first_token_goes_to_the_gateway_before_the_pages_have_come(
    make_pair: MakePair, alone: Engine
) -> None:
    pair, request = make_pair(), a_request()
    bring_to(pair, request, "token-only")
    assert said(pair.heard(request)) == answer_alone(alone, request)[:1]


@pytest.mark.parametrize("stage", STAGES)
def test_what_was_computed_makes_a_second_try_cheap(make_pair: MakePair, stage: str) -> None:
    pair, request = make_pair(**SMALL_STEPS), a_request()
    bring_to(pair, request, stage)
    for _ in range(1 if stage == "computing" else 0):
        pair.turn()
    pair.cancel(request)
    pair.hold()
    pair.decode.endpoint.release()
    pair.quiet_down()
    again = a_request(attempt=1)
    pair.decode.engine.scheduler.cache.make_room(96, keep=False)  # nothing is known at the decode worker
    (answer,) = pair.answer(again)
    num_cached = answer[0].num_cached_tokens
    if stage == "asked":
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


def test_an_attempt_may_be_asked_for_twice(make_pair: MakePair) -> None:
    """A router that starts anew may give to another decode worker what the last one gave to the first."""
    pair, request = make_pair(**SMALL_STEPS), a_request()
    pair.decode.endpoint._admit = lambda reserve, num_pages: "somebody"
    pair.hold(Prefilled)
    ask(pair, request, b"1" * 16)
    ask(pair, request, b"2" * 16)
    pair.turns_until(lambda: len(pair.post.held()) == 2 and not pair.prefill.node.attempts)
    said_ = [each.message for each in pair.post.held() if isinstance(each.message, Prefilled)]
    assert len({each.event.token_id for each in said_}) == 1
    ledger = pair.decode.engine.pages
    pair.turns_until(lambda: not pair.decode.endpoint.num_open)
    ledger.release([page for page in range(ledger.num_pages) if ledger.owners(page)], "somebody")


class TestRefusals:
    def test_of_a_worker_that_pages_cannot_reach(self, make_pair: MakePair) -> None:
        pair = make_pair()
        pair.tell(pair.prefill, ROUTER, Members(workers=()))
        pair.hold(PrefillFailed)
        ask(pair, a_request())
        assert refusals(pair) == [(Failure.BUSY, "no pages can be sent to that worker now")]

    def test_of_a_transfer_that_goes_on(self, make_pair: MakePair) -> None:
        pair = make_pair()
        pair.hold(PrefillFailed)
        ask(pair, a_request())
        ask(pair, a_request(1))
        assert [failure for failure, _ in refusals(pair)] == [Failure.BUSY]
        assert pair.prefill.node.attempts == ((a_request().request_id, 0),)

    def test_while_it_drains(self, make_pair: MakePair) -> None:
        pair = make_pair()
        pair.hold(PrefillFailed)
        pair.tell(pair.prefill, ROUTER, Drain(worker=PREFILL))
        ask(pair, a_request())
        assert refusals(pair) == [(Failure.BUSY, "the worker is about to end")]
        assert pair.prefill.node.is_idle

    def test_of_what_cannot_run(self, make_pair: MakePair) -> None:
        pair = make_pair()
        pair.hold(PrefillFailed)
        ask(pair, a_request(prompt=(1,) * MAX_MODEL_LEN))
        ((failure, reason),) = refusals(pair)
        assert failure is Failure.INVALID and f"the model takes {MAX_MODEL_LEN}" in reason

    def test_of_what_no_transfer_can_carry(
        self, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pair = make_pair()
        pair.hold(PrefillFailed)
        monkeypatch.setattr("baton.kvtransfer.protocol.pull.MAX_PAGES", 10)
        ask(pair, a_request())
        ((failure, reason),) = refusals(pair)
        assert failure is Failure.BUSY and "1 to 10 units are" in reason
        assert pair.prefill.node.is_idle

    def test_by_the_destination_are_said(self, make_pair: MakePair) -> None:
        """Nobody there knows of that transfer."""
        pair = make_pair()
        pair.hold(PrefillFailed)
        ask(pair, a_request())
        pair.turns_until(lambda: bool(refusals(pair)))
        assert refusals(pair) == [(Failure.BUSY, "refused: no room")]
        assert not pair.prefill.node.attempts


def test_a_cancel_is_of_the_worker_that_asked(make_pair: MakePair) -> None:
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
        (GATEWAY, Prefill(request=a_request(), gateway=GATEWAY.id, transfer=b"t" * 16)),
        (ROUTER, Dispatch(request=a_request(), gateway=GATEWAY.id)),
        (GATEWAY, Drain(worker=PREFILL)),
        (GATEWAY, Members(workers=())),
    ],
)
def test_who_asks_for_what_is_not_theirs_is_dropped(
    make_pair: MakePair, sender: Hello, message: AnyMessage
) -> None:
    pair = make_pair()
    with pytest.raises(WireError, match="is nothing for a prefill worker"):
        pair.tell(pair.prefill, sender, message)
    assert pair.prefill.node.is_idle and not pair.prefill.node.is_draining
