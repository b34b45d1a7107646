import json

import pytest

from baton.errors import IntegrityError, InvalidRequest, Overloaded, Refused, TransferFailed, WorkerLost
from baton.gateway.api.errors import ApiError, as_api_error, unsupported
from baton.gateway.app import STATUSES
from baton.tenants import Refusal


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("n"), 400, "invalid_value"),
        (Overloaded("full of 10.0.0.1", retry_after_s=2), 503, "overloaded"),
        (WorkerLost("0x7f12"), 500, "worker_crash"),
        (IntegrityError("0x7f12"), 500, "internal_error"),
        (TransferFailed("0x7f12"), 500, "internal_error"),
        (KeyError("0x7f12"), 500, "internal_error"),
        (unsupported("x"), 400, "unsupported"),
    ],
)
def test_errors_have_their_status(error: Exception, status: int, code: str) -> None:
    answer = as_api_error(error)
    assert (answer.status, answer.code) == (status, code)
    body = json.loads(answer.body())["error"]
    assert set(body) == {"message", "type", "param", "code"} and body["code"] == code
    assert "0x7f12" not in body["message"] and "10.0.0.1" not in body["message"]


@pytest.mark.parametrize(
    ("refusal", "status", "code", "is_retried"),
    [
        (Refusal.TOKENS_PER_S, 429, "rate_limit_exceeded", True),
        (Refusal.MAX_QUEUED, 429, "rate_limit_exceeded", True),
        (Refusal.SLO, 429, "slo_infeasible", True),
        (Refusal.SHED, 503, "shed", True),
        (Refusal.DEADLINE, 504, "deadline_passed", False),
    ],
)
def test_refusals_name_the_quota_and_the_time_to_retry(
    refusal: Refusal, status: int, code: str, is_retried: bool
) -> None:
    answer = as_api_error(Refused("5000 of them", refusal=refusal, retry_after_s=1.25))
    headers = dict(answer.headers())
    assert (answer.status, answer.code) == (status, code)
    assert headers[b"x-should-retry"] == (b"true" if is_retried else b"false")
    assert headers.get(b"retry-after-ms") == (b"1250" if is_retried else None)
    if refusal.is_quota:
        body = json.loads(answer.body())["error"]
        assert refusal in body["message"] and body["param"] == refusal
        assert body["type"] == "rate_limit_error"


@pytest.mark.parametrize("refusal", Refusal)
def test_openapi_document_has_the_status_of_every_refusal(refusal: Refusal) -> None:
    assert str(as_api_error(Refused("no", refusal=refusal, retry_after_s=1.0)).status) in STATUSES


def test_request_that_never_fits_is_not_retried() -> None:
    answer = as_api_error(Refused("too long a prompt", refusal=Refusal.SLO, retry_after_s=0.0))
    assert dict(answer.headers()) == {b"x-should-retry": b"false"}


def test_overload_is_retried_and_a_crash_is_not() -> None:
    busy = dict(as_api_error(Overloaded("full", retry_after_s=0.25)).headers())
    assert (busy[b"retry-after"], busy[b"retry-after-ms"], busy[b"x-should-retry"]) == (b"1", b"250", b"true")
    assert dict(as_api_error(WorkerLost("twice")).headers()) == {b"x-should-retry": b"false"}


def test_long_waits_are_not_retried_automatically() -> None:
    refused = Refused("5000 of them", refusal=Refusal.TOKENS_PER_S, retry_after_s=2000.5)
    headers = dict(as_api_error(refused).headers())
    assert (headers[b"retry-after"], headers[b"x-should-retry"]) == (b"2001", b"false")
    assert dict(ApiError(503, "x", retry_after_s=1e9).headers())[b"retry-after"] == b"86400"
    assert dict(ApiError(503, "x", retry_after_s=-1).headers())[b"retry-after"] == b"0"


def test_overload_closes_the_connection() -> None:
    assert (b"connection", b"close") in as_api_error(Overloaded("full", retry_after_s=1)).headers()
    over_quota = Refused("2 at once", refusal=Refusal.MAX_CONCURRENT_REQUESTS, retry_after_s=1.0)
    assert b"connection" not in dict(as_api_error(over_quota).headers())


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ("stop: a stop string must not be empty", "stop"),
        ("top_p must be greater than 0, got 0.0", "top_p"),
        ("top_k must fit 64 bits and a sign, got 67 bits", "top_k"),
        ("logit_bias[7] must be between -100.0 and 100.0, got 101.0", "logit_bias"),
        ("len(allowed_token_ids) must be between 1 and 65536, got 0", "allowed_token_ids"),
        ("the messages do not fit the chat template", None),
    ],
)
def test_key_of_a_message_is_the_param(message: str, key: str | None) -> None:
    assert as_api_error(InvalidRequest(message)).param == key


def test_half_a_surrogate_pair_in_a_message_is_escaped() -> None:
    assert b"ud800" in as_api_error(InvalidRequest("got '\ud800'")).body()


def test_extra_args_have_the_name_that_clients_give_them() -> None:
    answer = as_api_error(InvalidRequest("extra_args: no logits processor of this server takes a"))
    assert answer.param == "vllm_xargs" and str(answer).startswith("vllm_xargs: no logits processor")


@pytest.mark.parametrize("refusal", [Refusal.SLO, Refusal.SHED])
def test_refusal_without_return_is_not_retried_automatically(refusal: Refusal) -> None:
    answer = as_api_error(Refused("no", refusal=refusal, retry_after_s=30.0, should_retry=False))
    headers = dict(answer.headers())
    assert headers[b"x-should-retry"] == b"false" and headers[b"retry-after"] == b"30"
