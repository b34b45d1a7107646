import pytest

from baton.errors import InvalidRequest
from baton.gateway.api.errors import ApiError
from baton.gateway.text.work import ServedModel, TextWork
from tests.unit.gateway.calls import TENANT
from tests.unit.gateway.frontend_peers import Gateway, gateway


def model_of(made: Gateway) -> ServedModel:
    return ServedModel(name="tiny", text=TextWork(None, None), service=made.frontend, created_s=0)


def test_before_there_was_any_worker_the_client_is_told_when_to_retry() -> None:
    with pytest.raises(ApiError, match="^no worker has been there yet") as refused:
        model_of(gateway()).request_policy(TENANT).check_length(1)
    headers = dict(refused.value.headers())
    assert (refused.value.status, headers[b"retry-after"], headers[b"x-should-retry"]) == (503, b"2", b"true")


def test_while_workers_are_away_prompts_are_held_to_what_they_took() -> None:
    made = gateway("d0")
    model = model_of(made)
    length = model.request_policy(TENANT).longest()
    made.list_members()
    assert not made.frontend.workers
    model.request_policy(TENANT).check_length(length - 1)
    with pytest.raises(ApiError, match="one of them for the answer"):
        model.request_policy(TENANT).check_length(length)


def test_with_one_prompts_are_held_to_its_length() -> None:
    model = model_of(gateway("d0"))
    model.request_policy(TENANT).check_length(model.request_policy(TENANT).longest() - 1)
    with pytest.raises(ApiError, match="one of them for the answer"):
        model.request_policy(TENANT).check_length(model.request_policy(TENANT).longest())
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        model.request_policy(TENANT).check_length(0)


def test_a_new_router_that_knows_nobody_yet_makes_no_worker_disappear() -> None:
    made = gateway("d0")
    made.join_router("another")
    made.list_members(is_complete=False)
    model_of(made).request_policy(TENANT).check_length(1)
