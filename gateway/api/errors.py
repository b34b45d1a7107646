"""Errors as clients see them: OpenAI's shape, a status, and when to retry.

    400 the request is wrong   401 no key   403 not your model   404 no such model or path   405 wrong method
    408, 413, 431 refused while the request arrives   429 a quota, or an objective that cannot be kept
    503 no room, retry   504 the deadline has passed   500 a fault of Baton's

Texts are fixed or made from the client's own input. The log has the cause, under the id in every response.
"""

import logging
import math
import re
from collections.abc import Mapping
from typing import Final

import msgspec
import orjson
from msgspec import inspect

from baton.errors import BatonError, InvalidRequest, Overloaded, Refused, WorkerLost
from baton.tenants import Refusal

MAX_RETRY_AFTER_S: Final = 120  # clients wait no longer by themselves
MAX_TOLD_S: Final = 86_400
INVALID: Final = "invalid_request_error"
OVERLOADED: Final = "overloaded"
KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# The key at the beginning of a message: "stop: ...", "top_p must be ..." or "len(logit_bias) must be ...".
KEY: Final = re.compile(r"(?:len\()?([a-z]+(?:_[a-z]+)*)(?:\[[^\]]*\])*\)?(?::| must )")
# The key in an error of msgspec that says no place.
FIELD: Final = re.compile(r"(?:missing required|contains unknown) field `(.+)`")
MAX_KEY_CHARS: Final = 80
# A part of a path in an error of msgspec: the name of a field, or "" for an element of a list.
PLACE: Final = re.compile(r"\.([^.\[]+)|\[")
# A key that this server does not serve -> what to do instead.
INSTEAD: Final = {
    "best_of": "give n",
    "functions": "give tools",
    "function_call": "give tool_choice",
    "documents": "put their text into a message",
    "chat_template": "start the server with --chat-template",
    "regex": "give structured_outputs",
    "ebnf": "give structured_outputs",
    "json_schema": "give response_format",
    "stop_regex": "give stop",
    "lora_path": "give the adapter's name as model",
}
EXPECTED: Final = frozenset({503, 504})  # server errors that are no bugs: logged without a traceback
Headers = list[tuple[bytes, bytes]]
logger = logging.getLogger(__name__)


class ApiError(BatonError):
    """An error with the status and the fields that the client gets."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool = True,
    ) -> None:
        """should_retry: the client may retry by itself after `retry_after_s`."""
        super().__init__(message)
        self.should_retry = should_retry
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """OpenAI's `type` of the error."""
        if self.status >= 500:
            return "overloaded_error" if self.status == 503 else "server_error"
        return KINDS.get(self.status, INVALID)

    def body(self) -> bytes:
        """Return the JSON of the error."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def headers(self) -> Headers:
        """Return headers that say whether and when to retry."""
        if self.retry_after_s is not None:
            wait_s = min(max(self.retry_after_s, 0.0), MAX_TOLD_S)
            is_retried = self.should_retry and wait_s <= MAX_RETRY_AFTER_S
            headers = [
                (b"retry-after", str(math.ceil(wait_s)).encode()),
                (b"retry-after-ms", str(math.ceil(wait_s * 1000)).encode()),
                (b"x-should-retry", b"true" if is_retried else b"false"),
            ]
            # Without room, other clients need the connection.
            return [*headers, (b"connection", b"close")] if self.code == OVERLOADED else headers
        # A request that failed in two workers would fail again.
        return [(b"x-should-retry", b"false")] if self.status >= 400 else []


class ClientGone(Exception):
    """The client has left: there is no one to answer, and nothing is wrong."""


def unsupported(key: str, value: str | None = None) -> ApiError:
    """Return the error for a key that this server does not serve. value: None where no value is served."""
    what = key if value is None else f"{key} = {value}"
    instead = f": {INSTEAD[key]}" if key in INSTEAD else ""
    return ApiError(400, f"{what} is not supported by this server{instead}", code="unsupported", param=key)


def invalid(key: str, problem: str) -> ApiError:
    """Return the error for a wrong value of a key."""
    return ApiError(400, f"{key}: {problem}", code="invalid_value", param=key)


def misread(error: msgspec.ValidationError, kind: type[msgspec.Struct], within: str = "") -> BatonError:
    """Return the error for data of a wrong form, in msgspec's words, with the values that were expected.

    kind: of the data. within: the key that has the data.
    """
    problem, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`")
    if problem.startswith("Invalid enum value") and (values := _values_at(kind, path)):
        problem += f", expected one of {', '.join(values)}"
    found = FIELD.search(problem)
    key = f"{within}{path}".lstrip(".") or (found[1] if found else "")
    return invalid(key[:MAX_KEY_CHARS], problem) if key else InvalidRequest(problem)


def _values_at(kind: type[msgspec.Struct], path: str) -> list[str]:
    """Return the values that a field may have. path: msgspec's, such as `.tools[0].type`."""
    types: list[inspect.Type] = [inspect.type_info(kind)]
    for name in PLACE.findall(path):  # "": an element of a list
        inner: list[inspect.Type] = []
        for each in types:
            if isinstance(each, inspect.StructType):
                inner += [field.type for field in each.fields if field.encode_name == name]
            elif isinstance(each, inspect.ListType):
                inner.append(each.item_type)
        types = [part for each in inner for part in getattr(each, "types", (each,))]
    return [str(value) for each in types if isinstance(each, inspect.LiteralType) for value in each.values]


def renamed(error: BatonError, names: Mapping[str, str]) -> BatonError:
    """Return an error about a wrong request with its key in the words of another API.

    names: regular expressions of keys -> the key that the client knows.
    """
    answer = as_api_error(error)
    if answer.status != 400:
        return error
    for pattern, name in names.items():
        message = re.sub(rf"\A{pattern}", name, str(answer))
        if message != str(answer):
            param = answer.param and re.sub(rf"\A{pattern}", name, answer.param)
            return ApiError(400, message, code=answer.code, param=param)
    return answer


def as_api_error(error: Exception) -> ApiError:
    """Return any error as the client sees it. The message of a bug is for the log, not for the client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        message = re.sub(r"\Aextra_args\b", "vllm_xargs", _encodable(str(error)))  # the API's name of the key
        key = KEY.match(message)
        return ApiError(400, message, code="invalid_value", param=key and key[1])
    if isinstance(error, Refused):
        return _refused(error)
    if isinstance(error, Overloaded):
        return ApiError(
            503,
            "the service has no room for this request now",
            code=OVERLOADED,
            retry_after_s=error.retry_after_s,
        )
    if isinstance(error, WorkerLost):
        return ApiError(500, "the workers that held this request failed", code="worker_crash")
    return ApiError(500, "an internal error ended this request", code="internal_error")


def answer_to(error: Exception, request_id: str) -> ApiError:
    """Return an error as the client sees it, and log it where the status is 500 or more.

    Only a bug is logged with its traceback.
    """
    answer = as_api_error(error)
    if answer.status in EXPECTED:
        logger.info("request %s found no room: %s", request_id, error)
    elif answer.status >= 500:
        logger.error("request %s failed: %s", request_id, error, exc_info=error)
    return answer


def _refused(error: Refused) -> ApiError:
    refusal, retry_after_s = error.refusal, error.retry_after_s or None  # 0: it would never be admitted
    if refusal.is_quota:
        message = f"the key's tenant is at its quota {refusal}: {error}"
        return ApiError(
            429, message, code="rate_limit_exceeded", param=refusal.value, retry_after_s=retry_after_s
        )
    if refusal is Refusal.SLO:
        message = "the request would miss its latency objective now"
        return ApiError(
            429, message, code="slo_infeasible", retry_after_s=retry_after_s, should_retry=error.should_retry
        )
    if refusal is Refusal.DEADLINE:
        return ApiError(
            504, "the request cannot have its first token by its deadline", code="deadline_passed"
        )
    message = "the service is overloaded, and the request's class gives way to others"
    return ApiError(503, message, code="shed", retry_after_s=retry_after_s, should_retry=error.should_retry)


def _encodable(text: str) -> str:
    """Escape halves of surrogate pairs, which clients may send and UTF-8 cannot have."""
    return text.encode("utf-8", "backslashreplace").decode()
