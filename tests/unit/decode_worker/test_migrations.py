"""Attempts that migrate to a decode worker: another worker runs the attempt before."""

import pytest

from baton.engine.engine import Engine
from baton.kvtransfer.protocol.messages import Commit, PullRequest
from baton.messages.control import Dispatch, Failure, Prepared, TakeOver
from baton.request import Request
from tests.tiny_models import MAX_MODEL_LEN
from tests.worker_pair import GATEWAY, ROUTER, WorkerPair
from tests.worker_pair_cases import (
    LONG_PROMPT,
    MakePair,
    a_request,
    answer_alone,
    begun,
    has_pulled,
    said,
    warm,
)


def begin(pair: WorkerPair, request: Request) -> None:
    dispatch = Dispatch(request=request, gateway=GATEWAY.id, migrates_from=pair.prefill.id)
    pair.tell(pair.decode, ROUTER, dispatch)


def take_over(pair: WorkerPair, request: Request, tokens: tuple[int, ...]) -> None:
    order = TakeOver(request_id=request.request_id, attempt=request.attempt, token_ids=tokens)
    pair.tell(pair.decode, GATEWAY, order)


def is_prepared(pair: WorkerPair) -> bool:
    return any(isinstance(each, Prepared) for each in pair.said[GATEWAY.id])


@pytest.mark.parametrize("page_sizes", [(4, 4), (16, 4), (4, 16)])
def test_answer_goes_on_after_tokens_that_came_while_the_pages_moved(
    make_pair: MakePair, alone: Engine, page_sizes: tuple[int, int]
) -> None:
    pair = make_pair(page_sizes=page_sizes)
    warm(pair, pair.prefill)
    whole = answer_alone(alone, a_request(1, LONG_PROMPT, logprobs=2))
    request = a_request(1, LONG_PROMPT, logprobs=2, attempt=1, generated_token_ids=begun(whole, 1))
    begin(pair, request)
    pair.turns_until(lambda: is_prepared(pair))
    assert not pair.heard(request)
    take_over(pair, request, begun(whole, 4)[1:])
    rest = a_request(1, LONG_PROMPT, attempt=1, generated_token_ids=begun(whole, 4))
    pair.turns_until(lambda: pair.is_answered(rest))
    assert said(pair.heard(rest)) == whole[4:]
    assert has_pulled(pair.decode, pulls=1)
    assert pair.decode_worker.counters["migrations"] == 1


def test_tokens_that_leave_no_room_for_an_answer_are_no_migration(make_pair: MakePair) -> None:
    pair = make_pair()
    warm(pair, pair.prefill)
    request = a_request(1, LONG_PROMPT)
    begin(pair, request)
    pair.turns_until(lambda: is_prepared(pair))
    take_over(pair, request, (1,) * (MAX_MODEL_LEN - len(LONG_PROMPT)))
    failed = pair.failure()
    assert failed.failure is Failure.INVALID
    assert not pair.decode_worker.counters["migrations"]


@pytest.mark.parametrize("kind", [PullRequest, Commit])
def test_cancel_before_the_pages_are_here_gives_all_back(make_pair: MakePair, kind: type) -> None:
    pair = make_pair()
    warm(pair, pair.prefill)
    holding = pair.prefill.endpoint if kind is PullRequest else pair.decode.endpoint
    holding.holds = kind
    request = a_request(1, LONG_PROMPT)
    begin(pair, request)
    pair.turns_until(lambda: holding.is_holding)
    pair.cancel(request)
    holding.release()
    pair.quiet_down()
    assert not is_prepared(pair)


def test_cancel_of_a_prepared_attempt_gives_all_back(make_pair: MakePair) -> None:
    pair = make_pair()
    warm(pair, pair.prefill)
    request = a_request(1, LONG_PROMPT)
    begin(pair, request)
    pair.turns_until(lambda: is_prepared(pair))
    assert pair.decode.held()
    pair.cancel(request)
    take_over(pair, request, ())
    pair.quiet_down()
    assert not pair.heard(request)


def test_prepared_attempt_that_is_left_waiting_fails(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair()
    warm(pair, pair.prefill)
    request = a_request(1, LONG_PROMPT)
    begin(pair, request)
    pair.turns_until(lambda: is_prepared(pair))
    monkeypatch.setattr("baton.decode_worker.worker.MAX_PREPARED_S", 0.0)
    pair.decode_worker.tick()
    failed = pair.failure()
    assert failed.failure is Failure.BUSY
    pair.quiet_down()


def test_long_context_without_its_pages_is_not_taken(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.decode_worker.attempt.MAX_MISSING_TOKENS", 32)
    pair = make_pair()
    request = a_request(1, LONG_PROMPT)
    begin(pair, request)
    failed = pair.failure()
    assert failed.failure is Failure.BUSY and not is_prepared(pair)
    pair.quiet_down()
