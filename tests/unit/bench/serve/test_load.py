"""Clients, jobs and loads, before the bare servers that the bench has as its limits."""

import asyncio
import itertools
import json
import random
from argparse import ArgumentTypeError
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from baton.bench.serve.client import Address, Answer, Client, Connection
from baton.bench.serve.figures import Slo
from baton.bench.serve.load import (
    Hammer,
    Job,
    LengthBounds,
    Load,
    Model,
    Point,
    Shape,
    VllmPair,
    model_of,
    poisson,
    random_jobs,
    trace_jobs,
)
from baton.bench.serve.overhead import limit
from baton.errors import ConfigError, PeerGone
from baton.sim.timed.workload import TraceRequest
from tests.event_loop import on_loop


class Scripted(asyncio.Protocol):
    """Gives these answers, byte for byte, one to each request without a body; then closes."""

    def __init__(self, answers: tuple[bytes, ...]) -> None:
        self._answers = list(answers)
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *requests, self._unread = (self._unread + data).split(b"\r\n\r\n")
        for _ in requests:
            self._transport.write(self._answers.pop(0))
            if not self._answers:
                self._transport.close()
                return


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[str]:
    """The URL of a server like that."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Scripted(answers), "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await asyncio.sleep(0)  # what was closed is closed


WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


class TestClient:
    @on_loop
    async def test_connections_are_used_again(self) -> None:
        async with answering(WHOLE, WHOLE.replace(b"hi", b"ho")) as url:
            with closing(Client(Address(url))) as client:
                assert [(await client.get("/")).body, (await client.get("/")).body] == [b"hi", b"ho"]

    @on_loop
    async def test_a_server_that_closes_after_an_answer_is_asked_anew(self) -> None:
        async with answering(WHOLE.replace(b"OK\r\n", b"OK\r\nconnection: close\r\n")) as url:
            with closing(Client(Address(url))) as client:
                assert [(await client.get("/")).status for _ in range(3)] == [200] * 3

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (WHOLE[:-1], "in the middle of an answer"),
            (b"SSH-2.0-OpenSSH\r\n", "speaks no HTTP"),
            (b"", "in the middle of an answer"),
        ],
    )
    @on_loop
    async def test_half_an_answer_is_an_error(self, answer: bytes, message: str) -> None:
        with pytest.raises(PeerGone, match=message):
            async with answering(answer) as url:
                with closing(Client(Address(url))) as client:
                    await client.get("/")

    @on_loop
    async def test_refused_connection_is_an_os_error(self) -> None:
        with pytest.raises(OSError, match="9"):
            await Client(Address("http://127.0.0.1:9")).get("/")

    @pytest.mark.parametrize("url", ["127.0.0.1:8000", "https://host", "http://", ""])
    def test_a_url_is_of_http(self, url: str) -> None:
        with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
            Address(url)

    def test_url_may_end_in_v1_and_requests_carry_the_key(self) -> None:
        request = Address("http://host:81/base/v1", api_key="sk-1").post("/v1/x", b"{}")
        head, _, body = request.partition(b"\r\n\r\n")
        assert head.startswith(b"POST /base/v1/x HTTP/1.1\r\nhost: host:81\r\n") and body == b"{}"
        assert b"authorization: Bearer sk-1" in head

    @on_loop
    async def test_a_connection_has_one_request_at_a_time(self) -> None:
        with pytest.raises(AssertionError, match="one request at a time"):
            async with answering(WHOLE) as url:
                with closing(await Connection.open(Address(url))) as connection:
                    connection.send(Address(url).get("/"), lambda answer: None)
                    connection.send(Address(url).get("/"), lambda answer: None)


@pytest.mark.parametrize("stream", [True, False])
@on_loop
async def test_closed_loop_sends_every_job_once(stream: bool) -> None:
    jobs, shape = random_jobs(20, 1, vocab_size=100), Shape(stream, concurrency=3, slo=Slo(e2el_s=60.0))
    with limit() as server, closing(Client(Address(server.url))) as client:
        ran = await Load(client, "m", shape).run(jobs)
    assert len(ran.samples) == 20 and not ran.failures
    assert ran.goodput == pytest.approx(20 / ran.duration_s)
    assert ran.num_tokens == sum(job.num_tokens for job in jobs)
    assert ran.max_lag_s == 0.0
    assert all(len(sample.gaps_s) == (sample.num_tokens - 1 if stream else 0) for sample in ran.samples)


@on_loop
async def test_open_loop_sends_jobs_when_they_are_due() -> None:
    jobs = poisson(random_jobs(10, 1, vocab_size=100), rate=100.0, seed=2)
    with limit() as server, closing(Client(Address(server.url))) as client:
        ran = await Load(client, "m", Shape()).run(jobs)
    assert len(ran.samples) == 10
    assert ran.duration_s >= jobs[-1].arrival_s
    assert ran.max_lag_s > 0


def whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


@on_loop
async def test_failures_are_counted_by_their_reason() -> None:
    body = b'{"error":{"code":"too_busy","message":"come back later"}}'
    refusal = whole(body, b"429 Too Many Requests")
    async with answering(refusal) as url:
        with closing(Client(Address(url))) as client:
            ran = await Load(client, "m", Shape(concurrency=1)).run([Job((1,), 1)])
    assert ran.failures == ["status 429 too_busy"] and not ran.samples
    assert ran.said == "come back later"
    with closing(Client(Address(url))) as client:
        gone = await Load(client, "m", Shape(concurrency=1)).run([Job((1,), 1)] * 2)
    assert len(gone.failures) == 2


async def model_at(url: str) -> Model:
    with closing(Client(Address(url))) as client:
        return await model_of(client)


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        (b'{"id": "tiny"}', Model("tiny", None)),
        (b'{"id": "tiny", "vocab_size": 512}', Model("tiny", 512)),
        (b'{"id": "tiny", "vocab_size": "many"}', Model("tiny", None)),
    ],
)
@on_loop
async def test_model_is_the_first_that_the_server_lists(card: bytes, expected: Model) -> None:
    async with answering(whole(b'{"data": [' + card + b"]}")) as url:
        assert await model_at(url) == expected


@on_loop
async def test_server_that_wants_a_key_is_named_as_such() -> None:
    with pytest.raises(ConfigError, match="wants a key that it knows: --api-key KEY"):
        async with answering(whole(b"{}", b"401 Unauthorized")) as url:
            await model_at(url)


@on_loop
async def test_server_without_models_is_an_error() -> None:
    with pytest.raises(ConfigError, match="lists no model"):
        async with answering(WHOLE) as url:
            await model_at(url)


@pytest.mark.parametrize("stream", [True, False])
@on_loop
async def test_hammer_counts_whole_answers(stream: bool) -> None:
    with limit() as server:
        point = Point(num_tokens=5, stream=stream, num_connections=4)
        hammered = await Hammer(Address(server.url), "m", point).run(0.2)
    assert not hammered.failures and len(hammered.samples) >= 4
    assert hammered.tokens_per_s == pytest.approx(5 * hammered.requests_per_s)


@on_loop
async def test_hammer_ends_when_the_server_does() -> None:
    async with answering(WHOLE, WHOLE[:-1]) as url:
        hammered = await Hammer(Address(url), "m", Point(1, stream=False, num_connections=2)).run(5.0)
    assert not hammered.samples
    assert any("in the middle" in failure for failure in hammered.failures)


def test_default_prompts_are_those_of_the_rivals() -> None:
    """Lengths and ids are drawn in the order of the client that measured them."""
    source = random.Random(3)
    expected = []
    for _ in range(32):
        num_input, num_output = source.randint(16, 256), source.randint(16, 128)
        expected.append((tuple(source.randrange(4, 32_000) for _ in range(num_input)), num_output))
    assert [(job.prompt, job.num_tokens) for job in random_jobs(32, 3, vocab_size=32_000)] == expected


def test_lengths_are_within_their_bounds_and_reach_them() -> None:
    jobs = random_jobs(200, 0, vocab_size=50, num_input=LengthBounds(1, 3), num_output=LengthBounds(5, 5))
    assert {len(job.prompt) for job in jobs} == {1, 2, 3}
    assert {job.num_tokens for job in jobs} == {5}
    assert all(4 <= token < 50 for job in jobs for token in job.prompt)


@pytest.mark.parametrize(("text", "expected"), [("16-256", (16, 256)), ("64", (64, 64))])
def test_lengths_are_read(text: str, expected: tuple[int, int]) -> None:
    assert LengthBounds.parse(text) == expected


@pytest.mark.parametrize("text", ["", "a", "5-3", "0-4", "-3", "1-2-3"])
def test_invalid_lengths_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="LOW-HIGH"):
        LengthBounds.parse(text)


def test_arrivals_are_poisson() -> None:
    jobs = poisson([Job((5,), 1)] * 4000, rate=50.0, seed=1)
    gaps = [later.arrival_s - job.arrival_s for job, later in itertools.pairwise(jobs)]
    mean = sum(gaps) / len(gaps)
    assert jobs[0].arrival_s == 0.0
    assert mean == pytest.approx(1 / 50, rel=0.1)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance**0.5 == pytest.approx(mean, rel=0.1)  # as of no other distribution at hand
    assert poisson([Job((5,), 1)] * 4000, rate=50.0, seed=1) == jobs


def test_equal_block_ids_are_equal_prompt_tokens() -> None:
    requests = [
        TraceRequest(arrival_s=0.0, input_tokens=10, output_tokens=3, block_ids=(7, 8), block_tokens=4),
        TraceRequest(arrival_s=4.0, input_tokens=9, output_tokens=2, block_ids=(7, 9), block_tokens=4),
        TraceRequest(arrival_s=6.0, input_tokens=6, output_tokens=1),
    ]
    first, second, third = trace_jobs(requests, vocab_size=1000, speed=2.0)
    assert [len(job.prompt) for job in (first, second, third)] == [10, 9, 6]
    assert first.prompt[:4] == second.prompt[:4] and first.prompt[4:8] != second.prompt[4:8]
    assert [job.arrival_s for job in (first, second, third)] == [0.0, 2.0, 3.0]
    assert [job.num_tokens for job in (first, second, third)] == [3, 2, 1]


def test_body_is_an_openai_completion() -> None:
    job = Job((5, 6), 9)
    assert json.loads(job.body("m", stream=False)) == {
        "model": "m",
        "prompt": [5, 6],
        "max_tokens": 9,
        "ignore_eos": True,
        "temperature": 0,
    }
    streamed = json.loads(job.body("m", stream=True))
    assert streamed["stream"] is True and streamed["stream_options"] == {"include_usage": True}


class Heard(asyncio.Protocol):
    """Keeps what it is asked and gives one answer to all of it."""

    def __init__(self, bodies: list[Any], answer: bytes) -> None:
        self._bodies, self._answer = bodies, answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._bodies.append(json.loads(data.partition(b"\r\n\r\n")[2]))
        self._transport.write(self._answer)


@asynccontextmanager
async def hearing(answer: bytes) -> AsyncIterator[tuple[Address, list[Any]]]:
    bodies: list[Any] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Heard(bodies, answer), "127.0.0.1", 0)
    async with server:
        yield Address(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), bodies
    await asyncio.sleep(0)


async def ask(prefill_answer: bytes) -> tuple[Answer, list[Any], list[Any]]:
    async with hearing(prefill_answer) as (prefill, asked), hearing(whole(b"rest")) as (decode, told):
        with closing(VllmPair(prefill, decode)) as pair:
            answer = await pair.post("/v1/completions", Job((5, 6), 9).body("m", stream=True))
        return answer, asked, told


@on_loop
async def test_transfer_parameters_of_the_prefill_server_reach_the_decode_server() -> None:
    params = {"remote_engine_id": "e", "remote_block_ids": [1, 2]}
    answer, (asked,), (told,) = await ask(whole(json.dumps({"kv_transfer_params": params}).encode()))
    assert answer.body == b"rest"
    assert asked["max_tokens"] == 1 and asked["stream"] is False and "stream_options" not in asked
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert told["kv_transfer_params"] == params
    assert told["max_tokens"] == 9 and told["stream"] is True and told["prompt"] == [5, 6]


@on_loop
async def test_refusal_of_the_prefill_server_is_the_answer() -> None:
    answer, asked, told = await ask(whole(b"{}", b"503 Busy"))
    assert answer.status == 503 and len(asked) == 1 and not told
