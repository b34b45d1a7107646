"""Attempts that end early, fail or arrive out of order."""

import pytest

from baton.decode_worker import attempt
from baton.engine.engine import Engine
from baton.errors import WireError
from baton.kvtransfer.protocol.messages import Commit, Grant
from baton.messages.bounds import LINK_TIMEOUT_S, Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import (
    AttemptFailed,
    Cancel,
    Dispatch,
    Failure,
    Heartbeat,
    Hello,
    Prefilled,
    PrefillFailed,
)
from baton.messages.operations import Drain, StatusQuery
from baton.request import FinishReason, Request, TokenEvent
from tests.tiny_models import MAX_MODEL_LEN
from tests.worker_pair import DECODE, GATEWAY, PREFILL, ROUTER, WorkerPair, prefill_of
from tests.worker_pair_cases import (
    PROMPT,
    SMALL_STEPS,
    MakePair,
    a_request,
    answer_after_ticks,
    answer_alone,
    answer_of,
    bring_to,
    said,
)

OPERATOR = Hello(process=Kind.OPERATOR, id="9" * 32)


def test_prompt_without_a_prefill_worker_is_computed_here(make_pair: MakePair, alone: Engine) -> None:
    pair = make_pair()
    request = a_request()
    pair.dispatch(request, is_local=True)
    assert answer_of(pair, request) == answer_alone(alone, request)
    assert not pair.prefill.engine.load().prefix_queries_tokens


def test_first_token_may_come_before_the_dispatch(make_pair: MakePair, alone: Engine) -> None:
    pair, request, transfer = make_pair(), a_request(), b"t" * 16
    pair.post.put(ROUTER.id, PREFILL, prefill_of(request, transfer))
    pair.turns_until(lambda: bool(pair.heard(request)))
    pair.turn()  # the first token reaches the decode worker, which does not know of the attempt
    dispatch = Dispatch(request=request, gateway=GATEWAY.id, prefill=PREFILL, transfer=transfer)
    pair.tell(pair.decode, ROUTER, dispatch)
    assert answer_of(pair, request) == answer_alone(alone, request)
    assert not pair.decode_worker.counters["recomputed_prefills"]


def test_heartbeat_names_an_attempt_that_came_during_a_long_step(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.rpc.worker_node.BEAT_S", 0.0)
    pair, request = make_pair(), a_request()
    pair.turn()
    pair.said[ROUTER.id].clear()
    pair.decode_worker.tick()  # ticks and messages have waited for the step in the order in which they came
    pair.dispatch(request)
    pair.turn()
    beats = [each for each in pair.said[ROUTER.id] if isinstance(each, Heartbeat)]
    (named,) = [each.attempts for each in beats if each.attempts]  # the prefill worker gets its order later
    assert named == ((request.request_id, request.attempt),) and len(beats) == 2


def test_late_dispatch_whose_prompt_was_cancelled_is_computed_here(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, alone: Engine
) -> None:
    monkeypatch.setattr("baton.decode_worker.worker.MAX_EARLY_S", 0.0)
    monkeypatch.setattr("baton.prefill_worker.worker.MAX_ORDER_WAIT_S", 0.0)
    pair, request = make_pair(), a_request()
    pair.tell(pair.decode, pair.prefill.hello, Prefilled(event=TokenEvent(request.request_id, 0, 0, 7)))
    pair.decode_worker.tick()
    pair.turn()  # the prefill worker is told to cancel
    pair.dispatch(request)
    assert answer_after_ticks(pair, request) == answer_alone(alone, request)
    assert pair.decode_worker.counters["recomputed_prefills"] == 1


@pytest.mark.parametrize("end", ["cancelled before", "cancelled after", "no Dispatch", "no connection"])
def test_prompt_whose_dispatch_does_not_come_frees_its_pages(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    pair, request = make_pair(), a_request()
    if end == "cancelled before":
        pair.cancel(request)
    elif end == "no connection":
        pair.leave(pair.prefill, pair.decode.hello)
    elif end == "no Dispatch":
        monkeypatch.setattr("baton.decode_worker.worker.MAX_EARLY_S", 0.0)
    pair.post.put(ROUTER.id, PREFILL, prefill_of(request, b"t" * 16))
    pair.turns_until(lambda: bool(pair.heard(request)))
    pair.turn()  # the first token reaches the decode worker
    if end == "cancelled after":
        pair.cancel(request)
    pair.decode_worker.tick()
    pair.quiet_down()


class TestPagesThatDoNotCome:
    def _is_recomputed(self, pair: WorkerPair, request: Request, alone: Engine) -> None:
        assert answer_of(pair, request) == answer_alone(alone, request)
        assert not pair.failures()
        assert pair.decode_worker.counters["recomputed_prefills"] == 1

    @pytest.mark.parametrize("point", ["before Commit", "after Grant", "after Verified"])
    def test_a_broken_transfer(self, make_pair: MakePair, alone: Engine, point: str) -> None:
        pair = make_pair(**SMALL_STEPS)
        (pair.decode if point == "before Commit" else pair.prefill).endpoint.abort_at = point
        request = a_request()
        pair.dispatch(request)
        if point == "after Verified":  # too late to matter
            assert answer_of(pair, request) == answer_alone(alone, request)
            assert not pair.decode_worker.counters["recomputed_prefills"]
        else:
            self._is_recomputed(pair, request, alone)

    def test_pages_that_have_not_come_in_their_time(
        self, make_pair: MakePair, alone: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(attempt, "TRANSFER_TIMEOUT_S", 0.5)
        pair, request = make_pair(), a_request()
        pair.decode.endpoint.holds = Commit
        pair.dispatch(request)
        self._is_recomputed(pair, request, alone)

    def test_pages_that_are_damaged_again_and_again(self, make_pair: MakePair, alone: Engine) -> None:
        pair = make_pair()
        pair.decode.endpoint.num_flips = 1000
        request = a_request()
        pair.dispatch(request)
        self._is_recomputed(pair, request, alone)

    def test_pages_that_are_damaged_once_come_again(self, make_pair: MakePair, alone: Engine) -> None:
        pair = make_pair()
        pair.decode.endpoint.num_flips = 1
        request = a_request()
        (answer,) = pair.answer(request)
        assert said(answer) == answer_alone(alone, request)
        assert not pair.decode_worker.counters["recomputed_prefills"]

    def test_prefill_worker_behind_a_silent_link_is_not_waited_for(
        self, make_pair: MakePair, alone: Engine
    ) -> None:
        pair, request = make_pair(), a_request()
        bring_to(pair, request, "ordered")
        link = pair.decode.peers[PREFILL]
        link.silence_s = LINK_TIMEOUT_S / 2
        pair.decode_worker.tick()
        was_patient = not pair.decode_worker.counters["silent_prefill_links"]
        link.silence_s += 0.5
        pair.decode_worker.tick()
        self._is_recomputed(pair, request, alone)
        assert (was_patient, pair.decode_worker.counters["silent_prefill_links"]) == (True, 1)

    def test_silent_link_in_the_middle_of_a_transfer_leaves_no_page_to_two_owners(
        self, make_pair: MakePair, alone: Engine
    ) -> None:
        pair, request = make_pair(**SMALL_STEPS), a_request()
        bring_to(pair, request, "computing")
        pair.decode.peers[PREFILL].silence_s = LINK_TIMEOUT_S
        pair.decode_worker.tick()
        self._is_recomputed(pair, request, alone)

    def test_silent_prefill_worker_that_no_router_lists_may_have_died_of_the_prompt(
        self, make_pair: MakePair
    ) -> None:
        pair, request = make_pair(), a_request()
        bring_to(pair, request, "ordered")
        pair.decode.peers[PREFILL].silence_s = LINK_TIMEOUT_S
        pair.list_members(pair.decode)
        pair.decode_worker.tick()
        failed = pair.failure()
        assert (failed.failure, failed.worker) == (Failure.LOST, PREFILL)
        assert not pair.heard(request)

    def test_a_lost_link_for_pages_after_the_first_token(self, make_pair: MakePair, alone: Engine) -> None:
        """Its process is not known to be dead: control connections end by themselves."""
        pair, request = make_pair(**SMALL_STEPS), a_request()
        bring_to(pair, request, "token-only")
        pair.lose_prefill_worker(is_heard=False)  # its Commit has come, and is never heard
        self._is_recomputed(pair, request, alone)

    def test_lost_page_link_before_the_first_token_waits_for_the_routers_verdict(
        self, make_pair: MakePair
    ) -> None:
        """It may have died of this very prompt, and one victim is enough."""
        pair, request = make_pair(**SMALL_STEPS), a_request()
        bring_to(pair, request, "computing")
        pair.lose_prefill_worker(is_heard=False)
        pair.decode.endpoint.release()
        pair.turns_until(lambda: not pair.decode.endpoint.num_open)
        pair.turn()
        assert not pair.heard(request) and not pair.decode.engine.has_work()
        pair.leave(pair.decode, pair.prefill.hello)
        failed = pair.failure()
        assert (failed.failure, failed.worker) == (Failure.LOST, PREFILL)

    def test_endpoint_that_closes_before_it_has_read_a_grant_leaves_no_page_reserved(
        self, make_pair: MakePair
    ) -> None:
        """Its process lives on, as one that sleeps does, so no death tells that it writes nothing."""
        pair = make_pair(transport="shm")
        pair.answer(a_request())  # the pages of the decode worker are mapped now
        pair.prefill.endpoint.holds = Grant
        pair.dispatch(a_request(1, (7, *PROMPT[1:])))
        pair.turns_until(lambda: pair.prefill.endpoint.is_holding)
        pair.lose_prefill_worker()
        pair.turns_until(lambda: not pair.decode.held())

    def test_a_prefill_worker_that_is_busy(self, make_pair: MakePair, alone: Engine) -> None:
        pair, request = make_pair(), a_request()
        pair.prefill.node.drain()
        pair.dispatch(request)
        self._is_recomputed(pair, request, alone)

    def test_a_prompt_that_the_prefill_worker_has_no_room_for_waits_there(
        self, make_pair: MakePair, alone: Engine
    ) -> None:
        pair, request = make_pair(), a_request()
        ledger = pair.prefill.engine.pages
        pages = ledger.allocate(90, "somebody else")
        pair.dispatch(request)
        pair.turns_until(pair.prefill.engine.has_work)
        pair.turn()
        assert not pair.heard(request)
        ledger.release(pages, "somebody else")
        assert answer_of(pair, request) == answer_alone(alone, request)


class TestCancel:
    def test_cancel_may_overtake_the_dispatch(self, make_pair: MakePair) -> None:
        pair, request = make_pair(), a_request()
        pair.cancel(request)
        pair.dispatch(request)
        assert pair.decode_worker.is_idle

    def test_cancel_ends_the_attempt_and_earlier_attempts(self, make_pair: MakePair) -> None:
        pair = make_pair()
        first, second = a_request(), a_request(attempt=1)
        pair.dispatch(first)
        pair.cancel(second)  # of which nothing is known yet
        assert pair.decode_worker.is_idle
        pair.dispatch(second)
        assert not pair.decode_worker.attempts
        third = a_request(attempt=2)
        pair.dispatch(third)
        pair.cancel(first)  # of which nothing is left
        pair.turns_until(lambda: pair.is_answered(third))

    def test_a_late_dispatch_of_an_earlier_attempt_begins_nothing(self, make_pair: MakePair) -> None:
        """A router that stood still sends it when it goes on."""
        pair, second = make_pair(), a_request(attempt=1)
        pair.dispatch(second)
        pair.cancel(second)
        pair.dispatch(a_request())
        assert pair.decode_worker.is_idle

    def test_only_its_gateway_may(self, make_pair: MakePair) -> None:
        pair, request = make_pair(), a_request()
        other = Hello(process=Kind.GATEWAY, id="8" * 32)
        pair.join(pair.decode, other)
        pair.dispatch(request)
        pair.tell(pair.decode, other, Cancel(request_id=request.request_id, attempt=0))
        pair.turns_until(lambda: pair.is_answered(request))

    def test_its_phases_follow_when_it_was_decoding(self, make_pair: MakePair) -> None:
        pair, request = make_pair(), a_request(max_tokens=80, prompt=PROMPT[:10])
        pair.dispatch(request)
        pair.turns_until(lambda: len(pair.heard(request)) > 3)
        pair.cancel(request)
        pair.turns_until(lambda: any(event.finish_reason for event in pair.heard(request)))
        (last,) = [event for event in pair.heard(request) if event.finish_reason]
        assert (last.finish_reason, last.token_id) == (FinishReason.ABORT, None)
        assert last.times is not None and 0 < last.times.decode_s < last.times.ended_s - last.times.arrived_s


def test_a_gateway_that_connects_anew_is_heard_and_its_old_connection_is_no_loss(
    make_pair: MakePair,
) -> None:
    pair, request = make_pair(), a_request()
    old = pair.decode.peers[GATEWAY.id]
    pair.join(pair.decode, GATEWAY)
    pair.dispatch(request)
    pair.decode.node.left(old)
    pair.turns_until(lambda: pair.is_answered(request))


class TestADispatchWithoutItsGateway:
    def _dispatched(self, make_pair: MakePair) -> tuple[WorkerPair, Request]:
        pair, request = make_pair(), a_request(max_tokens=80, prompt=PROMPT[:10])
        pair.leave(pair.decode, GATEWAY)
        pair.dispatch(request)
        pair.decode_worker.tick()
        return pair, request

    def test_gateway_may_connect_after_the_dispatch(self, make_pair: MakePair, alone: Engine) -> None:
        pair, request = self._dispatched(make_pair)
        pair.join(pair.decode, GATEWAY)
        pair.decode_worker.tick()
        assert answer_of(pair, request) == answer_alone(alone, request)

    def test_attempt_of_a_missing_gateway_is_dropped(self, make_pair: MakePair) -> None:
        pair, _ = self._dispatched(make_pair)
        pair.decode_worker.tick()
        assert not pair.decode_worker.attempts


def test_prompt_beyond_the_models_length_is_refused_at_once(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.dispatch(a_request(prompt=(1,) * MAX_MODEL_LEN))
    failed = pair.failure()
    assert failed.failure is Failure.INVALID
    assert f"the model takes {MAX_MODEL_LEN}" in failed.reason
    assert not failed.worker


def test_several_choices_are_several_attempts(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.dispatch(a_request(n=2))
    failed = pair.failure()
    assert failed.failure is Failure.INVALID and "one choice, got n 2" in failed.reason


def test_prefill_worker_that_is_gone_before_the_dispatch_may_have_died_of_the_prompt(
    make_pair: MakePair,
) -> None:
    pair, request = make_pair(), a_request()
    pair.lose_prefill_worker()
    pair.dispatch(request)
    failed = pair.failure()
    assert (failed.failure, failed.worker) == (Failure.LOST, PREFILL)


@pytest.mark.parametrize(
    ("sender", "message"),
    [
        (GATEWAY, Dispatch(request=a_request(), gateway=GATEWAY.id)),
        (GATEWAY, Drain(worker=DECODE)),
        (OPERATOR, Drain(worker=DECODE)),
        (ROUTER, StatusQuery()),
        (GATEWAY, Heartbeat(load={})),  # type: ignore[arg-type]
    ],
)
def test_peer_that_sends_a_message_of_another_role_is_dropped(
    make_pair: MakePair, sender: Hello, message: AnyMessage
) -> None:
    pair = make_pair()
    if sender is OPERATOR:
        pair.join(pair.decode, OPERATOR)
    with pytest.raises(WireError, match="a decode worker takes no"):
        pair.tell(pair.decode, sender, message)
    assert not pair.decode_worker.is_draining and pair.decode_worker.is_idle


def test_first_token_from_another_process_is_ignored(make_pair: MakePair, alone: Engine) -> None:
    pair, request = make_pair(**SMALL_STEPS), a_request()
    bring_to(pair, request, "computing")
    for message in (
        Prefilled(event=TokenEvent(request.request_id, 0, 0, 77)),
        PrefillFailed(request_id=request.request_id, attempt=0, failure=Failure.ERROR, reason="a lie"),
    ):
        pair.tell(pair.decode, GATEWAY, message)
    assert answer_of(pair, request) == answer_alone(alone, request)


@pytest.mark.parametrize("failure", [Failure.ERROR, Failure.INVALID])
def test_failure_of_the_prefill_worker_fails_the_attempt(make_pair: MakePair, failure: Failure) -> None:
    pair, request = make_pair(**SMALL_STEPS), a_request()
    bring_to(pair, request, "computing")
    failed = PrefillFailed(request_id=request.request_id, attempt=0, failure=failure, reason="why")
    pair.tell(pair.decode, pair.prefill.hello, failed)
    assert pair.failure() == AttemptFailed(
        request_id=request.request_id, attempt=0, failure=failure, reason="why", worker=PREFILL
    )


def test_load_counts_incoming_pages_and_tokens(make_pair: MakePair) -> None:
    pair, request = make_pair(), a_request()
    pair.decode.endpoint.holds = Commit
    pair.dispatch(request)
    pair.turns_until(lambda: pair.decode.endpoint.is_holding)
    load = pair.decode_worker.load()
    assert (load.num_incoming, load.num_running, load.pages["leased"]) == (1, 0, 11)
    assert pair.decode_worker.attempts == ((request.request_id, 0),)
    pair.decode.endpoint.release()
    pair.turns_until(lambda: pair.is_answered(request))
    pair.quiet_down()
    assert pair.decode_worker.load().num_tokens == 7  # the first one was the prefill worker's
    assert pair.prefill.node.load().num_tokens == 1
    assert pair.prefill.node.load().kv_bytes >= 41 * 512


class TestProbes:
    """Of a gateway that asks whether pages come."""

    def test_its_prompt_is_never_computed_here(self, make_pair: MakePair, alone: Engine) -> None:
        pair = make_pair()
        request = a_request(is_probe=True)
        pair.dispatch(request)
        assert answer_of(pair, request) == answer_alone(alone, request)
        assert pair.prefill.engine.load().prefix_queries_tokens
        assert pair.decode_worker.load().counters["remote_prefills"] == 1

    def test_probe_fails_when_pages_do_not_come(self, make_pair: MakePair) -> None:
        pair = make_pair()
        pair.decode.endpoint.num_flips = 1000
        request = a_request(is_probe=True)
        pair.dispatch(request)
        failed = pair.failure()
        assert (failed.failure, failed.worker) == (Failure.ERROR, PREFILL)
        assert not pair.decode_worker.load().counters.get("remote_prefills")
        pair.turns_until(lambda: pair.decode_worker.is_idle)

    def test_probe_fails_without_a_prefill_worker(self, make_pair: MakePair) -> None:
        pair = make_pair()
        pair.dispatch(a_request(is_probe=True), is_local=True)
        failed = pair.failure()
        assert failed.failure is Failure.ERROR and pair.decode_worker.is_idle

    def test_prompts_computed_here_are_not_counted_as_transferred(self, make_pair: MakePair) -> None:
        pair = make_pair()
        request = a_request(0, PROMPT[:9])
        pair.dispatch(request, is_local=True)
        pair.turns_until(lambda: pair.is_answered(request))
        assert not pair.decode_worker.load().counters.get("remote_prefills")
