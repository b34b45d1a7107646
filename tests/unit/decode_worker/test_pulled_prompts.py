"""Prompts that a decode worker computes itself after their prefix has been fetched from a prefill worker."""

import pytest

from baton.engine.engine import Engine
from baton.messages.control import KvEventsWanted
from tests.worker_pair import ROUTER
from tests.worker_pair_cases import (
    LONG_PROMPT,
    MakePair,
    a_request,
    answer_alone,
    has_pulled,
    prefills,
    said,
    warm,
)


@pytest.mark.parametrize("page_sizes", [(4, 4), (16, 4), (4, 16)])
def test_pulled_prefix_is_not_computed_and_changes_no_token(
    make_pair: MakePair, alone: Engine, page_sizes: tuple[int, int]
) -> None:
    pair = make_pair(page_sizes=page_sizes)
    source = warm(pair, pair.prefill)
    request = a_request(1, LONG_PROMPT, logprobs=2)
    pair.dispatch(request, is_local=True, source=source)
    pair.turns_until(lambda: pair.is_answered(request))
    events = pair.heard(request)
    assert said(events) == answer_alone(alone, request)
    assert has_pulled(pair.decode, pulls=1) and events[0].num_cached_tokens == source.num_tokens >= 64


def test_tokens_of_an_earlier_attempt_are_gone_on_from(make_pair: MakePair, alone: Engine) -> None:
    pair = make_pair()
    source = warm(pair, pair.prefill)
    whole = answer_alone(alone, a_request(1, LONG_PROMPT))
    tokens = tuple(token.token_id for token in whole[:3] if token.token_id is not None)
    request = a_request(1, LONG_PROMPT, attempt=1, generated_token_ids=tokens)
    pair.dispatch(request, is_local=True, source=source)
    pair.turns_until(lambda: pair.is_answered(request))
    assert said(pair.heard(request)) == whole[3:]
    assert has_pulled(pair.decode, pulls=1)


def test_the_pull_is_told_with_the_prompts_times(make_pair: MakePair) -> None:
    pair = make_pair()
    source = warm(pair, pair.prefill)
    pair.tell(pair.decode, ROUTER, KvEventsWanted())
    pair.dispatch(a_request(1, LONG_PROMPT), is_local=True, source=source)
    pair.turns_until(lambda: bool(prefills(pair)))
    (times,) = prefills(pair)
    assert (times.num_tokens, times.num_new_tokens, times.pulled_bytes) == (70, 2, 68 * 512)
    assert 0 < times.pulled_s <= times.waited_s
