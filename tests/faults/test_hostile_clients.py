"""Thousands of clients that hang up, send slowly or read slowly: other clients are served, and nothing leaks.

The cluster is `baton serve` on this machine. Bounds for other clients are generous: on two cores they also
wait for the clients of this process.
"""

import asyncio
import contextlib
import json
import random
import socket
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final, NamedTuple

import psutil
import pytest

from baton.bench.clusters import HELD
from baton.bench.serve.client import Address, Answer, Client, Connection
from baton.bench.serve.figures import token_ids_of
from baton.cluster.runtimes.base import descendants
from baton.request import Request
from tests.scripted_service import ScriptedService, events
from tests.served import SERVE, Served, served, until
from tests.served_gateway import ServedGateway

CANCELS_PER_S: Final = 1000  # if this machine opens connections that fast
NUM_STREAMS: Final = 4
STREAM_TOKENS: Final = 300
MAX_GAP_S: Final = 10.0  # of a stream, beside the prompts of clients that hang up
CALM_S: Final = 30.0  # until the cluster is at rest after a storm

NUM_SLOW: Final = 999  # a third slow in headers, a third in bodies, a third idle
NUM_GOOD: Final = 200
HEADER_S, BODY_S, IDLE_S = 3.0, 5.0, 3.0
CLOSED_S: Final = BODY_S + 20.0  # on a busy machine
MAX_GROWTH_BYTES: Final = 50 << 20

BYTES_A_ROUND: Final = 10
BATCH: Final = (300,) * 1000  # tokens of a stream in one event
NUM_ROUNDS: Final = 50
SEND_BUFFER_BYTES: Final = 16 << 10  # of the kernel for each client
MAX_READER_BYTES: Final = 128 << 10  # of the gateway for each client


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = {"header_timeout_s": HEADER_S, "body_timeout_s": BODY_S, "idle_timeout_s": IDLE_S}
    file = tmp_path_factory.mktemp("settings") / "baton.yaml"
    file.write_text(json.dumps({"gateway": settings}))
    with served(*SERVE, "--config", str(file)) as found:
        yield found


def body_of(rng: random.Random, max_tokens: int, *, streams: bool = True) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": [rng.randrange(2, 1024) for _ in range(200)],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": streams,
        "return_token_ids": True,
    }


async def ask(address: Address, body: dict[str, Any]) -> Answer:
    """Return a whole answer over a new connection. Raises PeerGone when the connection breaks."""
    with contextlib.closing(Client(address)) as client:
        return await client.post("/v1/completions", json.dumps(body).encode())


def token_ids(answer: Answer) -> list[int]:
    assert answer.status == 200, answer.body
    return token_ids_of(answer)


class Held(NamedTuple):
    """Open descriptors and threads of a cluster's processes."""

    num_descriptors: int
    num_threads: int


def held_by(cluster: Served) -> Held:
    processes = [psutil.Process(pid) for pid in descendants(cluster.process.pid)]
    return Held(sum(each.num_fds() for each in processes), sum(each.num_threads() for each in processes))


def is_at_rest(cluster: Served) -> bool:
    pages = [entry.load.pages for entry in cluster.status().values()]
    held = any(each[state] for each in pages for state in HELD)
    return all(pages) and not held and not any(router.num_attempts for router in cluster.routers())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_cancels", [500, pytest.param(2000, marks=pytest.mark.slow)])
def test_storm_of_cancels_leaks_nothing_and_changes_no_other_answer(
    cluster: Served, num_cancels: int
) -> None:
    address = Address(cluster.url)
    asked = [body_of(random.Random(number), STREAM_TOKENS) for number in range(NUM_STREAMS)]

    rng = random.Random("cancels")
    posts = [address.post("/v1/completions", json.dumps(body_of(rng, 200)).encode()) for _ in range(100)]

    async def hang_up(number: int) -> None:
        connection = await Connection.open(address)
        connection.send(posts[number % len(posts)], lambda end: None)
        await asyncio.sleep(number % 10 / 100)
        connection.close()

    async def storm() -> tuple[list[Answer], float]:
        streams = [asyncio.create_task(ask(address, body)) for body in asked]
        begun_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(num_cancels):
                group.create_task(hang_up(number))
                due_s = begun_s + (number + 1) / CANCELS_PER_S
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        took_s = time.perf_counter() - begun_s
        return await asyncio.gather(*streams), took_s

    async def quiet() -> list[Answer]:
        return await asyncio.gather(*(ask(address, body) for body in asked))

    golden = [token_ids(answer) for answer in asyncio.run(quiet())]
    until(lambda: is_at_rest(cluster))
    before = held_by(cluster)
    answers, took_s = asyncio.run(storm())
    print(f"{num_cancels / took_s:.0f} cancels/s")
    assert [token_ids(answer) for answer in answers] == golden
    moments = [[moment_s for moment_s, _ in answer.pieces] for answer in answers]
    assert max(after - before_s for each in moments for before_s, after in pairwise(each)) <= MAX_GAP_S
    until(lambda: is_at_rest(cluster), CALM_S)
    until(lambda: held_by(cluster).num_descriptors <= before.num_descriptors + 8, CALM_S)
    assert held_by(cluster).num_threads <= before.num_threads + 4
    assert [token_ids(answer) for answer in asyncio.run(quiet())] == golden


async def send_slowly(address: Address, number: int) -> float:
    """Send a byte now and then until the gateway ends the connection; returns the seconds until then."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    begun_s = time.perf_counter()
    said = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-slow: ",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4000\r\n\r\n",
        b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n",
    )[number % 3]
    writer.write(said)
    try:
        while True:
            with contextlib.suppress(TimeoutError):
                if not await asyncio.wait_for(reader.read(4096), 0.5):
                    return time.perf_counter() - begun_s
            if number % 3 < 2:
                writer.write(b" ")
    except ConnectionError:
        return time.perf_counter() - begun_s
    finally:
        writer.close()


@pytest.mark.timeout(300)
def test_thousand_slow_senders_are_closed_and_displace_no_client(cluster: Served) -> None:
    address = Address(cluster.url)
    gateway = psutil.Process(cluster.listening_on(cluster.port))
    body = body_of(random.Random("good"), 4, streams=False)

    async def crowd() -> tuple[list[float], list[int]]:
        slow = [asyncio.create_task(send_slowly(address, number)) for number in range(NUM_SLOW)]
        statuses = []
        for _ in range(NUM_GOOD // 10):
            good = await asyncio.gather(*(ask(address, body) for _ in range(10)))
            statuses += [answer.status for answer in good]
        return await asyncio.gather(*slow), statuses

    asyncio.run(ask(address, body))
    before_bytes = gateway.memory_info().rss
    ends_s, statuses = asyncio.run(crowd())
    assert statuses == [200] * NUM_GOOD
    assert max(ends_s) < CLOSED_S
    assert gateway.is_running() and gateway.memory_info().rss - before_bytes < MAX_GROWTH_BYTES


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_readers", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_slow_readers_cost_bounded_memory_and_delay_no_client(num_readers: int) -> None:
    process = psutil.Process()
    body = {"prompt": [5], "stream": True, "max_tokens": 1_000_000, "return_token_ids": True}
    with (
        ServedGateway(ScriptedService, send_buffer_bytes=SEND_BUFFER_BYTES) as gateway,
        contextlib.ExitStack() as ends,
    ):
        service = gateway.service

        def begin() -> tuple[socket.socket, Request]:
            client = ends.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(60.0)
            client.connect((gateway.address.host, gateway.address.port))
            num_before = len(service.requests)
            client.sendall(Address(gateway.url).post("/v1/completions", json.dumps(body).encode()))
            gateway.until(lambda: len(service.requests) > num_before)
            return client, service.requests[-1]

        good, request = begin()

        def token_s() -> float:
            """Return the seconds from a worker's token to the client that reads."""
            begun_s = time.perf_counter()
            gateway.on_loop(lambda: service.emit(request.request_id, events(request, [300], end=None)))
            while b"\n\n" not in good.recv(1 << 16):
                pass
            return time.perf_counter() - begun_s

        def step() -> None:
            for each in slow:
                service.emit(each.request_id, events(each, BATCH, end=None))

        before_s = [token_s() for _ in range(NUM_ROUNDS)]
        clients, asked = zip(*(begin() for _ in range(num_readers)), strict=True)
        before_bytes = process.memory_info().rss
        slow: list[Request] = list(asked)
        while slow:
            gateway.on_loop(step)
            for client in clients:
                with contextlib.suppress(BlockingIOError, ConnectionResetError):
                    client.recv(BYTES_A_ROUND, socket.MSG_DONTWAIT)
            growth = process.memory_info().rss - before_bytes
            assert growth < num_readers * MAX_READER_BYTES
            slow = [each for each in slow if each.request_id in service.sinks]
        beside_s = [token_s() for _ in range(NUM_ROUNDS)]
        assert len(service.cancelled) == num_readers
        assert statistics.median(beside_s) < 2 * statistics.median(before_s) + 0.005
