import pytest

from baton.errors import InvalidRequest
from baton.gateway.api_errors import ApiError
from baton.gateway.served_model import ServedModel
from baton.gateway.text_work import TextWork
from tests.unit.gateway.frontend_peers import Gateway, gateway


def model_of(made: Gateway) -> ServedModel:
    return ServedModel(name="tiny", text=TextWork(None, None), service=made.frontend, created_s=0)


@pytest.mark.parametrize(
    ("members", "message"),
    [((), "no worker is there to answer"), (("p0",), "no decode worker is there to answer")],
)
def test_without_a_decode_worker_the_client_is_told_at_once_when_to_retry(
    members: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ApiError, match=f"^{message}$") as refused:
        model_of(gateway(*members)).check_length(1)
    headers = dict(refused.value.headers())
    assert (refused.value.status, headers[b"retry-after"], headers[b"x-should-retry"]) == (503, b"2", b"true")


def test_with_one_prompts_are_held_to_its_length() -> None:
    model = model_of(gateway("d0"))
    model.check_length(model.max_model_len - 1)
    with pytest.raises(ApiError, match="one of them for the answer"):
        model.check_length(model.max_model_len)
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        model.check_length(0)


def test_a_new_router_that_knows_nobody_yet_makes_no_worker_disappear() -> None:
    made = gateway("d0")
    made.join_router("another")
    made.list_members(is_complete=False)
    model_of(made).check_length(1)
