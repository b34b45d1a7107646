"""The router's process, a gateway's end and stub workers over real sockets."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from baton.bench.serve.stub import StubWorker, token_at
from baton.clock import SystemClock
from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.gateway.streams.frontend import Frontend
from baton.messages.workers import Address, WorkerRole
from baton.request import Request, SamplingParams
from baton.router.router import serve_router
from baton.rpc.server import RpcServer
from tests.answer import Answer
from tests.event_loop import on_loop
from tests.new_status import new_status
from tests.node_peers import a_request, a_worker, id_of
from tests.unit.baton.rpc.rpc_peers import KEY, until

VOCAB_SIZE = 50_000


@contextlib.asynccontextmanager
async def a_router(port: int = 0) -> AsyncIterator[Address]:
    """Serve until the block ends."""
    stopping, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve_router(RouterConfig(port=port), KEY, ready.set_result, stopping))
    try:
        yield await ready
    finally:
        stopping.set()
        await serving


@contextlib.asynccontextmanager
async def a_stub(name: str, router: Address) -> AsyncIterator[None]:
    """Run a worker that computes nothing until the block ends."""
    role = WorkerRole.PREFILL if name.startswith("p") else WorkerRole.DECODE
    rpc_server = RpcServer(KEY)
    address = await rpc_server.listen()
    worker = a_worker(name, role, address=address, kv_address=address)
    rpc_server.serve(StubWorker(worker, (router,), rpc_server.dial, VOCAB_SIZE, step_s=0.001))
    try:
        yield
    finally:
        await rpc_server.close()


def answer(request: Request) -> list[int]:
    """Return every token of the whole answer."""
    return [token_at(request, index, VOCAB_SIZE) for index in range(request.sampling.max_tokens or 0)]


@contextlib.asynccontextmanager
async def a_frontend(router: Address, num_workers: int) -> AsyncIterator[Frontend]:
    rpc_server = RpcServer(KEY)
    frontend = Frontend(id_of("g"), [router], rpc_server.dial, SystemClock())
    rpc_server.serve(frontend)
    try:
        await until(lambda: not frontend.why_not_ready and len(frontend.workers) == num_workers)
        yield frontend
    finally:
        await rpc_server.close()


class Client(Answer):
    """A sink that knows its request."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request


def open_some(frontend: Frontend, num_requests: int, max_tokens: int, start: int = 0) -> list[Client]:
    clients = []
    for number in range(start, start + num_requests):
        sampling = SamplingParams(max_tokens=max_tokens, seed=number)
        client = Client(a_request(f"r{number}", num_tokens=40, sampling=sampling))
        frontend.open(client.request, client)
        clients.append(client)
    return clients


@on_loop
async def test_requests_are_answered_through_pairs() -> None:
    async with (
        a_router() as router,
        a_stub("p0", router),
        a_stub("d0", router),
        a_frontend(router, 2) as frontend,
    ):
        clients = open_some(frontend, 50, 20)
        await until(lambda: not frontend.num_open)
        assert all(client.token_ids == answer(client.request) for client in clients)
        status = new_status(frontend)
        await until(lambda: (new := status()) is not None and new.num_attempts == 0)


@on_loop
async def test_next_router_on_the_port_takes_over() -> None:
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        router = await first.enter_async_context(a_router())
        await stack.enter_async_context(a_stub("d0", router))
        frontend = await stack.enter_async_context(a_frontend(router, 1))
        running = open_some(frontend, 3, 2_000)
        await until(lambda: all(client.token_ids for client in running))
        await first.aclose()
        await until(lambda: bool(frontend.why_not_ready))
        waiting = open_some(frontend, 5, 10, start=3)
        num_tokens = len(running[0].token_ids)
        await until(lambda: len(running[0].token_ids) > num_tokens)
        await stack.enter_async_context(a_router(router.port))
        await until(lambda: all(client.finish for client in waiting), timeout_s=10)
        for client in running:
            frontend.cancel(client.request.request_id)
        assert all(client.token_ids == answer(client.request) for client in waiting)


@on_loop
async def test_stranger_is_dropped_and_its_reason_is_in_the_status() -> None:
    async with a_router() as router, a_stub("d0", router), a_frontend(router, 1) as frontend:
        reader, writer = await asyncio.open_connection(router.host, router.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n" * 100)
        await until(lambda: reader.at_eof() or reader.exception() is not None)
        status = new_status(frontend)

        def num_dropped() -> int:
            new = status()
            counters = {} if new is None else new.routers[0].counters
            return sum(number for name, number in counters.items() if name.startswith("dropped_"))

        await until(lambda: num_dropped() == 1)
        writer.close()


@on_loop
async def test_taken_port_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = RouterConfig(port=taken.getsockname()[1])
        with pytest.raises(OSError):
            await serve_router(config, KEY, lambda address: None, asyncio.Event())


@on_loop
async def test_short_key_is_an_error() -> None:
    stopping = asyncio.Event()
    stopping.set()
    with pytest.raises(ConfigError, match="cluster key"):
        await serve_router(RouterConfig(), b"short", lambda address: None, stopping)


def test_router_without_sharing_needs_no_redis_library_and_serve_no_torch() -> None:
    program = """
import sys; sys.modules['redis'] = sys.modules['torch'] = None
import baton.router.router, baton.cluster.serve
from baton.cluster.cli.commands import serve
from baton.config.cluster import ServeConfig
serve._check(ServeConfig(model="tiny"))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_missing_redis_library_is_explained() -> None:
    program = """
import sys; sys.modules['redis'] = None
import asyncio
from baton.errors import ConfigError
from baton.router.router import serve_router
from baton.config.router import RouterConfig

config = RouterConfig(policy="cost", redis="redis://127.0.0.1:1")
try:
    asyncio.run(serve_router(config, b"k" * 32, print, asyncio.Event()))
except ConfigError as error:
    sys.exit(str(error))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 1 and "Python library is not installed" in result.stderr
