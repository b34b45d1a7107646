"""Prompts that a decode worker computes itself after their prefix has been fetched from a prefill worker."""

import pytest

from baton.engine.engine import Engine
from baton.kvtransfer.protocol.messages import Commit, PullRequest
from baton.messages.control import Dispatch, KvEventsWanted, PullSource
from baton.request import Request
from tests.tiny_models import VOCAB_SIZE
from tests.worker_pair import GATEWAY, ROUTER, WorkerPair
from tests.worker_pair_cases import MakePair, a_request, answer_alone, has_pulled, known_at, prefills, said

PROMPT = tuple((3 * i + i * i) % VOCAB_SIZE for i in range(70))


def begin(pair: WorkerPair, request: Request, source: PullSource) -> None:
    pair.tell(pair.decode, ROUTER, Dispatch(request=request, gateway=GATEWAY.id, source=source))


def warm(pair: WorkerPair) -> PullSource:
    """The prefill worker alone knows the prompt; what the router would have learned of it."""
    pair.answer(a_request(90, PROMPT))
    pair.quiet_down()
    ledger = pair.decode.engine.pages
    pair.decode.engine.scheduler.cache.make_room(ledger.num_pages, keep=False)
    return known_at(pair.prefill, PROMPT)


@pytest.mark.parametrize("page_sizes", [(4, 4), (16, 4), (4, 16)])
def test_pulled_prefix_is_not_computed_and_changes_no_token(
    make_pair: MakePair, alone: Engine, page_sizes: tuple[int, int]
) -> None:
    pair = make_pair(page_sizes=page_sizes)
    source = warm(pair)
    request = a_request(1, PROMPT, logprobs=2)
    begin(pair, request, source)
    pair.turns_until(lambda: pair.is_answered(request))
    events = pair.heard(request)
    assert said(events) == answer_alone(alone, request)
    assert has_pulled(pair.decode, pulls=1) and events[0].num_cached_tokens == source.num_tokens >= 64


def test_tokens_of_an_earlier_attempt_are_gone_on_from(make_pair: MakePair, alone: Engine) -> None:
    pair = make_pair()
    source = warm(pair)
    whole = answer_alone(alone, a_request(1, PROMPT))
    tokens = tuple(token.token_id for token in whole[:3] if token.token_id is not None)
    request = a_request(1, PROMPT, attempt=1, generated_token_ids=tokens)
    begin(pair, request, source)
    pair.turns_until(lambda: pair.is_answered(request))
    assert said(pair.heard(request)) == whole[3:]
    assert has_pulled(pair.decode, pulls=1)


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_cancel_in_the_middle_gives_all_back(make_pair: MakePair, is_asked: bool) -> None:
    pair = make_pair()
    source = warm(pair)
    holding = pair.prefill.endpoint if is_asked else pair.decode.endpoint
    holding.holds = PullRequest if is_asked else Commit
    request = a_request(1, PROMPT)
    begin(pair, request, source)
    pair.turns_until(lambda: holding.is_holding)
    pair.cancel(request)
    holding.release()
    pair.quiet_down()
    assert not pair.heard(request)


def test_the_pull_is_told_with_the_prompts_times(make_pair: MakePair) -> None:
    pair = make_pair()
    source = warm(pair)
    pair.tell(pair.decode, ROUTER, KvEventsWanted())
    begin(pair, a_request(1, PROMPT), source)
    pair.turns_until(lambda: bool(prefills(pair)))
    (times,) = prefills(pair)
    assert (times.num_tokens, times.num_new_tokens, times.pulled_bytes) == (70, 2, 68 * 512)
    assert 0 < times.pulled_s <= times.waited_s
