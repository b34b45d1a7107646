"""What a decode worker tells a router that asks for it: times of the prompts that it has computed itself."""

from time import perf_counter

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
    assert times.waited_s >= 0 and times.computed_s > 0


def test_prompts_that_share_steps_have_parts_of_them(make_pair: MakePair) -> None:
    pair = make_pair(scheduler={"max_num_batched_tokens": 8})
    pair.tell(pair.decode, ROUTER, KvEventsWanted())
    began_s = perf_counter()
    for number, prompt in enumerate((tuple(range(41)), tuple(range(1, 41)))):
        pair.dispatch(a_request(number, prompt), is_local=True)
    pair.turns_until(lambda: len(prefills(pair)) == 2)
    elapsed_s = perf_counter() - began_s
    shares_s = [times.own_s for times in prefills(pair)]
    # A step's cost includes the time since the step before it, so one share alone may exceed its computed_s.
    assert min(shares_s) > 0 and sum(shares_s) <= elapsed_s


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
