import json

import pytest

from baton.errors import IntegrityError, InvalidRequest, Overloaded, TransferFailed, WorkerLost
from baton.gateway.api_errors import ApiError, as_api_error, unsupported


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("n"), 400, "invalid_value"),
        (Overloaded("full of 10.0.0.1", retry_after_s=2), 503, "overloaded"),
        (WorkerLost("0x7f12"), 500, "worker_crash"),
        (IntegrityError("0x7f12"), 500, "internal_error"),
        (TransferFailed("0x7f12"), 500, "internal_error"),
        (KeyError("0x7f12"), 500, "internal_error"),
        (unsupported("x", param="x"), 400, "unsupported"),
    ],
)
def test_errors_have_their_status(error: Exception, status: int, code: str) -> None:
    answer = as_api_error(error)
    assert (answer.status, answer.code) == (status, code)
    body = json.loads(answer.body())["error"]
    assert set(body) == {"message", "type", "param", "code"} and body["code"] == code
    assert "0x7f12" not in body["message"] and "10.0.0.1" not in body["message"]


def test_only_what_may_succeed_later_is_to_be_retried() -> None:
    busy = dict(as_api_error(Overloaded("full", retry_after_s=0.25)).headers())
    assert busy == {b"retry-after": b"1", b"retry-after-ms": b"250", b"x-should-retry": b"true"}
    assert dict(as_api_error(WorkerLost("twice")).headers()) == {b"x-should-retry": b"false"}


def test_no_client_is_asked_to_wait_longer_than_it_would() -> None:
    headers = dict(ApiError(503, "x", retry_after_s=1e9).headers())
    assert headers[b"retry-after"] == b"120"
    assert dict(ApiError(503, "x", retry_after_s=-1).headers())[b"retry-after"] == b"0"


def test_half_a_character_in_a_message_is_no_error_of_its_own() -> None:
    assert b"ud800" in as_api_error(InvalidRequest("got '\ud800'")).body()
