"""Losses, cancels, new attempts and drains at each stage of an attempt."""

from typing import Any

import pytest

from baton.engine.engine import Engine
from baton.messages.control import Failure, Heartbeat
from baton.messages.operations import Drain
from baton.request import Request
from tests.worker_pair import DECODE, PREFILL, ROUTER, WorkerPair
from tests.worker_pair_cases import STAGES, MakePair, Said, a_request, answer_alone, begun, bring_to, said


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def small_steps(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of both workers."""
    return {"scheduler": {"max_num_batched_tokens": 8, "async_scheduling": request.param}}


def rest_of(pair: WorkerPair, request: Request, whole: list[Said]) -> Request:
    """The next attempt, as the gateway makes it from what it has heard."""
    heard = pair.heard(request)
    assert said(heard) == whole[: len(heard)]
    return a_request(attempt=request.attempt + 1, generated_token_ids=begun(whole, len(heard)))


@pytest.mark.parametrize("stage", STAGES)
class TestAtEachStage:
    def test_the_prefill_worker_is_lost(
        self, make_pair: MakePair, alone: Engine, stage: str, small_steps: dict[str, Any]
    ) -> None:
        pair, request = make_pair(**small_steps), a_request()
        whole = answer_alone(alone, request)
        bring_to(pair, request, stage)
        pair.lose_prefill_worker()
        pair.release()
        pair.turns_until(lambda: bool(pair.failures()) or pair.is_answered(request))
        if stage == "running":
            assert said(pair.heard(request)) == whole and not pair.failures()
            return
        (failed,) = pair.failures()
        assert (failed.failure, failed.worker, failed.attempt) == (Failure.LOST, PREFILL, 0)
        pair.quiet_down()
        rest = rest_of(pair, request, whole)
        pair.dispatch(rest, is_local=True)
        pair.turns_until(lambda: pair.is_answered(rest))
        assert said(pair.heard(request) + pair.heard(rest)) == whole

    def test_the_router_says_that_the_prefill_worker_is_lost(
        self, make_pair: MakePair, alone: Engine, stage: str, small_steps: dict[str, Any]
    ) -> None:
        pair, request = make_pair(**small_steps), a_request()
        bring_to(pair, request, stage)
        pair.list_members(pair.decode)
        pair.turns_until(lambda: bool(pair.failures()) or pair.is_answered(request))
        assert [failed.worker for failed in pair.failures()] == ([] if stage == "running" else [PREFILL])
        pair.quiet_down()

    def test_the_gateway_is_lost(
        self, make_pair: MakePair, alone: Engine, stage: str, small_steps: dict[str, Any]
    ) -> None:
        pair, request = make_pair(**small_steps), a_request()
        bring_to(pair, request, stage)
        num_heard = len(pair.heard(request))
        pair.lose_gateway()
        pair.hold()
        pair.release()
        pair.quiet_down()
        assert len(pair.heard(request)) == num_heard and not pair.failures()

    def test_it_is_cancelled(
        self, make_pair: MakePair, alone: Engine, stage: str, small_steps: dict[str, Any]
    ) -> None:
        pair, request = make_pair(**small_steps), a_request()
        bring_to(pair, request, stage)
        pair.cancel(request)
        pair.hold()
        pair.release()
        pair.quiet_down()
        assert not pair.failures()  # a cancel is not answered
        assert not pair.is_answered(request)

    def test_a_newer_attempt_overtakes_it(
        self, make_pair: MakePair, alone: Engine, stage: str, small_steps: dict[str, Any]
    ) -> None:
        pair, request = make_pair(**small_steps), a_request()
        whole = answer_alone(alone, request)
        bring_to(pair, request, stage)
        rest = rest_of(pair, request, whole)
        num_heard = len(pair.heard(request))
        pair.hold()
        pair.release()
        pair.dispatch(rest)
        pair.dispatch(request)  # comes once more, late
        pair.turns_until(lambda: pair.is_answered(rest))
        assert said(pair.heard(rest)) == whole[num_heard:]
        assert not pair.is_answered(request) and not pair.failures()

    def test_draining_finishes_it(
        self, make_pair: MakePair, alone: Engine, stage: str, small_steps: dict[str, Any]
    ) -> None:
        pair, request, late = make_pair(**small_steps), a_request(), a_request(1)
        bring_to(pair, request, stage)
        pair.tell(pair.decode, ROUTER, Drain(worker=DECODE))
        pair.tell(pair.prefill, ROUTER, Drain(worker=PREFILL))
        pair.hold()
        pair.release()
        pair.dispatch(late)
        assert not pair.decode_worker.is_idle
        pair.turns_until(lambda: pair.is_answered(request))
        assert said(pair.heard(request)) == answer_alone(alone, request)
        assert [(failed.request_id, failed.failure) for failed in pair.failures()] == [
            (late.request_id, Failure.BUSY)
        ]
        pair.turns_until(lambda: pair.decode_worker.is_idle and pair.prefill.node.is_idle)
        beats = [each for each in pair.said[ROUTER.id] if isinstance(each, Heartbeat)]
        assert sum(beat.is_draining for beat in beats) >= 2
