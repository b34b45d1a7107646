import pytest

from baton.decode_worker.attempt import Attempt
from baton.messages.control import Dispatch
from baton.request import FilledPages, TokenEvent
from tests.worker_pair import GATEWAY
from tests.worker_pair_cases import PROMPT, a_request


def an_attempt() -> Attempt:
    request = a_request(attempt=2, generated_token_ids=(5, 6))
    return Attempt.of(Dispatch(request=request, gateway=GATEWAY.id))


def test_two_attempts_at_a_request_have_different_names_in_the_engine() -> None:
    first = Attempt.of(Dispatch(request=a_request(), gateway=GATEWAY.id))
    assert first.request_id == an_attempt().request_id
    assert first.engine_id != an_attempt().engine_id


def test_the_answer_so_far_needs_its_kv_too() -> None:
    assert an_attempt().token_ids == (*PROMPT, 5, 6)


@pytest.mark.parametrize("num_filled", [None, 8, 43])
@pytest.mark.parametrize("has_first", [False, True])
def test_it_is_complete_with_the_first_token_and_all_pages(has_first: bool, num_filled: int | None) -> None:
    attempt = an_attempt()
    if has_first:
        attempt.first = TokenEvent(attempt.request_id, 2, 2, 7)
    if num_filled is not None:
        attempt.filled = FilledPages(tuple(range(-(-num_filled // 4))), num_filled, attempt.engine_id)
    assert attempt.is_complete == (has_first and num_filled == 43)


def test_the_engine_goes_on_after_the_first_token() -> None:
    attempt, again = an_attempt(), an_attempt()
    again.first = TokenEvent(again.request_id, 2, 2, 7)
    assert attempt.engine_request.generated_token_ids == (5, 6)
    assert again.engine_request.generated_token_ids == (5, 6, 7)
    assert again.engine_request.request_id == again.engine_id
