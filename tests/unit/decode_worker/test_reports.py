"""Reports of a decode worker to routers that asked for KV events: times of the prompts that it computes."""

from baton.messages.control import KvEventsWanted
from tests.worker_pair import ROUTER
from tests.worker_pair_cases import MakePair, a_request, prefills


def test_a_prompt_that_is_computed_here_has_times(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.tell(pair.decode, ROUTER, KvEventsWanted())
    request = a_request(max_tokens=3)
    pair.dispatch(request, is_local=True)
    pair.turns_until(lambda: bool(prefills(pair)))
    (times,) = prefills(pair)
    assert (times.request_id, times.attempt) == (request.request_id, 0)
    assert (times.num_tokens, times.num_new_tokens, times.moved_bytes) == (41, 41, 0)
    assert times.waited_s >= 0 and times.computed_s > 0 and times.own_s > 0


def test_times_exclude_cached_and_answered_tokens(make_pair: MakePair) -> None:
    pair = make_pair()
    (answer,) = pair.answer(a_request())
    pair.tell(pair.decode, ROUTER, KvEventsWanted())
    tokens = tuple(event.token_id for event in answer[:2] if event.token_id is not None)
    again = a_request(attempt=1, generated_token_ids=tokens)
    pair.dispatch(again, is_local=True)
    pair.turns_until(lambda: bool(prefills(pair)))
    (times,) = prefills(pair)
    assert (times.num_tokens, times.num_new_tokens) == (43, 3)


def test_a_prompt_that_comes_from_elsewhere_has_none_here(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.tell(pair.decode, ROUTER, KvEventsWanted())
    pair.answer(a_request(1))
    pair.dispatch(a_request(2, prompt=tuple(range(9))), is_local=True)
    pair.turns_until(lambda: bool(prefills(pair)))
    assert [times.request_id for times in prefills(pair)] == [a_request(2).request_id]
