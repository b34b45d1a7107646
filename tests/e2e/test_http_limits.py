"""Requests that the server refuses before any route sees them."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from baton.gateway.api.answer import AnswerChoice
from baton.gateway.http.protocol import MAX_PIPELINED
from tests.http_wire import exchange, post_bytes, read_all, read_response, status
from tests.scripted_service import ScriptedService, answer_at_once
from tests.served_gateway import ServedGateway

Served = ServedGateway[ScriptedService]
BODY = json.dumps({"prompt": [5, 6], "max_tokens": 2}).encode()
TIMEOUT_S = 0.3


def answering() -> ScriptedService:
    return ScriptedService(answer_at_once([300, 301]))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with ServedGateway(answering, max_body_bytes=64 * 1024) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def hasty() -> Iterator[Served]:
    """A gateway with short timeouts, for requests that never end."""
    with ServedGateway(
        answering, header_timeout_s=TIMEOUT_S, body_timeout_s=TIMEOUT_S, idle_timeout_s=1.0
    ) as gateway:
        yield gateway


def post(body: bytes = BODY, *headers: bytes, path: bytes = b"/v1/completions") -> bytes:
    return post_bytes(body, *headers, path=path)


def error(answer: bytes) -> dict[str, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"x-request-id: req-" in head and b"connection: close" in head
    found: dict[str, str] = json.loads(body)["error"]
    return found


def test_connection_is_kept_after_an_answer(served: Served) -> None:
    with served.connect() as client:
        for _ in range(3):
            client.sendall(post())
            answer = read_response(client)
            assert status(answer) == 200 and b'"finish_reason":"length"' in answer


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    good = post(b'{"prompt": [5], "max_tokens": 2, "echo": true}')
    bad = post(b'{"prompt": [1], "n": 129}', b"connection: close")
    first, _, second = exchange(served.connect(), good + bad).partition(b'"usage"')
    assert status(first) == 200 and b"HTTP/1.1 400" in second


def test_request_that_offers_http_2_is_answered_by_http_1(served: Served) -> None:
    """Java's HttpClient offers HTTP/2 with its first request, which may have a body."""
    offer = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAAA")
    with served.connect() as client:
        for request in (post(BODY, *offer), post(BODY, *offer)[: -len(BODY)]):
            client.sendall(request)
            client.sendall(b"" if request.endswith(BODY) else BODY)
            answer = read_response(client)
            assert status(answer) == 200 and b"HTTP/1.1 101" not in answer


def test_more_pipelined_requests_than_allowed_end_the_connection(served: Served) -> None:
    refused = served.gateway.metrics.refused
    before = refused["too_many_pipelined"]
    answer = exchange(served.connect(), b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" * 5000)
    assert status(answer) == 400 and error(answer)["code"] == "too_many_pipelined"
    assert refused["too_many_pipelined"] == before + 1
    as_many = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" * (MAX_PIPELINED - 1)
    last = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    assert exchange(served.connect(), as_many + last).count(b"HTTP/1.1 200 ") == MAX_PIPELINED


def test_header_that_never_ends_is_refused(hasty: Served) -> None:
    begun = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-slow: "
    assert status(exchange(hasty.connect(), begun)) == 408


def test_header_that_never_ends_is_refused_after_an_answer(hasty: Served) -> None:
    with hasty.connect() as client:
        client.sendall(post())
        assert status(read_response(client)) == 200
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nx-slow: ")
        assert status(read_all(client)) == 408


def test_body_that_never_ends_is_refused(hasty: Served) -> None:
    answer = exchange(hasty.connect(), post()[:-3])
    assert status(answer) == 408 and error(answer)["code"] == "request_timeout"


def test_silent_connection_is_closed(hasty: Served) -> None:
    assert exchange(hasty.connect()) == b""


def test_empty_lines_keep_no_connection_open(hasty: Served) -> None:
    with hasty.connect() as client:
        client.sendall(post())
        assert status(read_response(client)) == 200
        client.sendall(b"\r\n\r\n")
        assert read_all(client) == b""


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param([b"x-h%d: 1" % index for index in range(70)], id="too many"),
        pytest.param([b"x-long: " + b"a" * 40_000], id="one too long"),
        pytest.param([b"x-h%d: " % index + b"b" * 1000 for index in range(40)], id="too long together"),
    ],
)
def test_large_headers_are_refused(served: Served, headers: list[bytes]) -> None:
    answer = exchange(served.connect(), post(BODY, *headers))
    assert status(answer) == 431 and error(answer)["code"] == "headers_too_large"


def test_largest_number_of_headers_is_accepted(served: Served) -> None:
    with served.connect() as client:
        client.sendall(post(BODY, *[b"x-h%d: 1" % index for index in range(62)]))
        assert status(read_response(client)) == 200


def test_large_body_is_refused_by_its_length(served: Served) -> None:
    answer = exchange(
        served.connect(),
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n\r\n",
    )
    assert status(answer) == 413 and error(answer)["code"] == "body_too_large"


def test_large_body_is_refused_while_it_comes(served: Served) -> None:
    """A chunked body announces no size."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    assert status(exchange(served.connect(), head, chunk, chunk, chunk)) == 413


def test_two_lengths_are_refused(served: Served) -> None:
    assert status(exchange(served.connect(), post(BODY, b"transfer-encoding: chunked"))) == 400
    assert status(exchange(served.connect(), post(BODY, b"content-length: 3"))) == 400


def test_bytes_that_are_not_http_are_refused(served: Served) -> None:
    answer = exchange(served.connect(), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 tls\r\n\r\n")
    assert status(answer) == 400 and error(answer)["code"] == "bad_request"


def test_last_connections_are_reserved_for_health_checks() -> None:
    with ServedGateway(answering, max_connections=20) as served, ExitStack() as idle:
        for _ in range(18):
            idle.enter_context(served.connect())
        with served.connect() as client, served.connect() as watcher:
            client.sendall(post())
            answer = read_all(client)
            assert status(answer) == 503
            assert b"retry-after: 1" in answer and b"x-should-retry: true" in answer
            watcher.sendall(b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert status(read_response(watcher)) == 200


def test_wrong_methods_and_paths_are_refused(served: Served) -> None:
    get = b"GET /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    answer = exchange(served.connect(), get)
    assert status(answer) == 405 and b"allow: POST" in answer and b"this path takes POST" in answer
    assert (
        status(exchange(served.connect(), post(BODY, b"connection: close", path=b"/v1/completions/"))) == 404
    )


def test_answer_that_could_be_too_large_is_refused() -> None:
    """A small body, 10.8 million log probabilities: the limit and its setting are named."""
    body = {"prompt": [[5] * 1000] * 64, "n": 8, "echo": True, "logprobs": 20, "max_tokens": 1}
    data = json.dumps(body, separators=(",", ":")).encode()
    with (
        ServedGateway(answering) as roomy,
        roomy.connect() as client,
    ):
        client.sendall(post(data))
        answer = read_response(client)
        assert roomy.service.requests == []
    assert status(answer) == 400
    assert b"10762752 entries" in answer and b"at most 4194304" in answer
    assert b"gateway.max_answer_entries" in answer


@pytest.mark.parametrize("is_streamed", [False, True])
def test_log_probabilities_of_prompts_are_charged(is_streamed: bool) -> None:
    """A stream keeps those of all prompts until its end."""
    asked = {"prompt": [[5] * 50], "echo": True, "logprobs": 1, "max_tokens": 1, "stream": is_streamed}
    with ServedGateway(answering, max_answer_bytes=2048) as small, small.connect() as client:
        client.sendall(post(json.dumps(asked).encode()))
        answer = read_response(client)
        assert status(answer) == 503 and b"no room" in answer
        assert not small.service.requests and not small.gateway.limiter.answers.num_taken


def test_call_that_finds_no_room_makes_no_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = list[str](), AnswerChoice.__init__

    def spy(self: AnswerChoice, *arguments: Any) -> None:
        make(self, *arguments)
        made.append(self.request_id)

    monkeypatch.setattr(AnswerChoice, "__init__", spy)
    pair = post(b'{"prompt": [5], "n": 2}')
    with ServedGateway(ScriptedService, max_open_requests=3) as full, full.connect() as first:
        first.sendall(pair)
        full.until(lambda: len(full.service.requests) == 1)
        with full.connect() as second:
            second.sendall(pair)
            assert status(read_response(second)) == 503
        assert len(made) == 2


def test_call_with_choices_that_cannot_be_made_leaves_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: AnswerChoice, *arguments: Any) -> None:
        raise ZeroDivisionError

    with ServedGateway(answering) as served, served.connect() as client:
        with monkeypatch.context() as patched:
            patched.setattr(AnswerChoice, "__init__", broken)
            client.sendall(post())
            assert status(read_response(client)) == 500
        assert not served.gateway.limiter.slots.num_taken and not served.gateway.metrics.num_open
        client.sendall(post())
        assert status(read_response(client)) == 200
