"""The client, the loads and the hammer against the bare servers that the bench has as its limits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import pytest

from baton.bench.serve.client import Address, Client, Connection
from baton.bench.serve.figures import Slo
from baton.bench.serve.load import Hammer, Job, Load, Model, Point, Shape, model_of, poisson, random_jobs
from baton.bench.serve.overhead import limit
from baton.errors import ConfigError, PeerGone


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
    def test_connections_are_used_again(self) -> None:
        async def ask() -> list[bytes]:
            async with answering(WHOLE, WHOLE.replace(b"hi", b"ho")) as url:
                with closing(Client(Address(url))) as client:
                    return [(await client.get("/")).body, (await client.get("/")).body]

        assert asyncio.run(ask()) == [b"hi", b"ho"]

    def test_a_server_that_closes_after_an_answer_is_asked_anew(self) -> None:
        async def ask() -> list[int]:
            async with answering(WHOLE.replace(b"OK\r\n", b"OK\r\nconnection: close\r\n")) as url:
                with closing(Client(Address(url))) as client:
                    return [(await client.get("/")).status for _ in range(3)]

        assert asyncio.run(ask()) == [200] * 3

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (WHOLE[:-1], "in the middle of an answer"),
            (b"SSH-2.0-OpenSSH\r\n", "speaks no HTTP"),
            (b"", "in the middle of an answer"),
        ],
    )
    def test_half_an_answer_is_an_error(self, answer: bytes, message: str) -> None:
        async def ask() -> None:
            async with answering(answer) as url:
                with closing(Client(Address(url))) as client:
                    await client.get("/")

        with pytest.raises(PeerGone, match=message):
            asyncio.run(ask())

    def test_refused_connection_is_an_os_error(self) -> None:
        async def ask() -> None:
            await Client(Address("http://127.0.0.1:9")).get("/")

        with pytest.raises(OSError, match="9"):
            asyncio.run(ask())

    @pytest.mark.parametrize("url", ["127.0.0.1:8000", "https://host", "http://", ""])
    def test_a_url_is_of_http(self, url: str) -> None:
        with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
            Address(url)

    def test_url_may_end_in_v1_and_requests_carry_the_key(self) -> None:
        request = Address("http://host:81/base/v1", api_key="sk-1").post("/v1/x", b"{}")
        head, _, body = request.partition(b"\r\n\r\n")
        assert head.startswith(b"POST /base/v1/x HTTP/1.1\r\nhost: host:81\r\n") and body == b"{}"
        assert b"authorization: Bearer sk-1" in head

    def test_a_connection_has_one_request_at_a_time(self) -> None:
        async def ask() -> None:
            async with answering(WHOLE) as url:
                with closing(await Connection.open(Address(url))) as connection:
                    connection.send(Address(url).get("/"), lambda answer: None)
                    connection.send(Address(url).get("/"), lambda answer: None)

        with pytest.raises(AssertionError, match="one request at a time"):
            asyncio.run(ask())


@pytest.mark.parametrize("kind", ["uvicorn", "asyncio"])
@pytest.mark.parametrize("stream", [True, False])
def test_closed_loop_sends_every_job_once(kind: str, stream: bool) -> None:
    async def run() -> None:
        jobs, shape = random_jobs(20, 1, vocab_size=100), Shape(stream, concurrency=3, slo=Slo(e2el_s=60.0))
        with limit(kind) as url, closing(Client(Address(url))) as client:
            ran = await Load(client, "m", shape).run(jobs)
        assert len(ran.samples) == 20 and not ran.failures
        assert ran.goodput == pytest.approx(20 / ran.duration_s)
        assert ran.num_tokens == sum(job.num_tokens for job in jobs)
        assert ran.max_lag_s == 0.0
        assert all(len(sample.gaps_s) == (sample.num_tokens - 1 if stream else 0) for sample in ran.samples)

    asyncio.run(run())


def test_open_loop_sends_jobs_when_they_are_due() -> None:
    async def run() -> None:
        jobs = poisson(random_jobs(10, 1, vocab_size=100), rate=100.0, seed=2)
        with limit("asyncio") as url, closing(Client(Address(url))) as client:
            ran = await Load(client, "m", Shape()).run(jobs)
        assert len(ran.samples) == 10
        assert ran.duration_s >= jobs[-1].arrival_s
        assert ran.max_lag_s > 0

    asyncio.run(run())


def whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


def test_failures_are_counted_by_their_reason() -> None:
    async def run() -> None:
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

    asyncio.run(run())


async def model_at(url: str) -> Model:
    with closing(Client(Address(url))) as client:
        return await model_of(client)


def test_model_is_the_first_that_the_server_lists() -> None:
    async def ask(card: bytes) -> Model:
        async with answering(whole(b'{"data": [' + card + b"]}")) as url:
            return await model_at(url)

    assert asyncio.run(ask(b'{"id": "tiny"}')) == Model("tiny", None)
    assert asyncio.run(ask(b'{"id": "tiny", "vocab_size": 512}')) == Model("tiny", 512)
    assert asyncio.run(ask(b'{"id": "tiny", "vocab_size": "many"}')) == Model("tiny", None)


def test_server_that_wants_a_key_is_named_as_such() -> None:
    async def ask() -> None:
        async with answering(whole(b"{}", b"401 Unauthorized")) as url:
            await model_at(url)

    with pytest.raises(ConfigError, match="wants a key that it knows: --api-key KEY"):
        asyncio.run(ask())


def test_server_without_models_is_an_error() -> None:
    async def ask() -> None:
        async with answering(WHOLE) as url:
            await model_at(url)

    with pytest.raises(ConfigError, match="lists no model"):
        asyncio.run(ask())


@pytest.mark.parametrize("stream", [True, False])
def test_hammer_counts_whole_answers(stream: bool) -> None:
    async def run() -> None:
        with limit("asyncio") as url:
            point = Point(num_tokens=5, stream=stream, num_connections=4)
            hammered = await Hammer(Address(url), "m", point).run(0.2)
        assert not hammered.failures and len(hammered.samples) >= 4
        assert hammered.tokens_per_s == pytest.approx(5 * hammered.requests_per_s)

    asyncio.run(run())


def test_hammer_ends_when_the_server_does() -> None:
    async def run() -> None:
        async with answering(WHOLE, WHOLE[:-1]) as url:
            hammered = await Hammer(Address(url), "m", Point(1, stream=False, num_connections=2)).run(5.0)
        assert not hammered.samples
        assert any("in the middle" in failure for failure in hammered.failures)

    asyncio.run(run())
