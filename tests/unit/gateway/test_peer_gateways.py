"""Real sockets of the kernel's, in one process: as processes of one machine find each other."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

from baton.gateway.api.dialects.response_store import ResponseStore, StoredResponse
from baton.gateway.api.errors import ApiError
from baton.gateway.metrics.exporter import Exporter
from baton.gateway.metrics.metrics import Metrics
from baton.gateway.peer_gateways import TIMEOUT_S, PeerGateways
from baton.messages.bounds import Kind
from baton.messages.workers import Address
from baton.rpc.auth import KeyRing
from baton.rpc.listener import MAX_NEWCOMERS
from tests.event_loop import on_loop
from tests.scripted_service import ScriptedService

KEY = secrets.token_bytes(32)  # tests that run beside this one have another
PORT = Address("127.0.0.1", 8000)


class PeerGateway:
    """The parts of a gateway that answer the other gateways of its port."""

    def __init__(self, name: str, key: bytes = KEY) -> None:
        self.peers = PeerGateways(KeyRing.of(key, Kind.GATEWAY))
        metrics = Metrics(gateway=name, num_open=len(name))
        self.exporter = Exporter(metrics, ScriptedService(), self.peers, models=["tiny"], vllm_names=False)
        self.store = ResponseStore(max_entries=4, max_bytes=2**24, peers=self.peers)


@asynccontextmanager
async def listening(
    *names: str, key: bytes = KEY, address: Address = PORT
) -> AsyncIterator[list[PeerGateway]]:
    """Yield a gateway for each name, which has as many open calls as its name has letters."""
    made = []
    for name in names:
        one = PeerGateway(name, key)
        one.store.put("acme", f"resp_{name}", StoredResponse(name.encode() * 2**20, b"[]", b"[]"))
        one.peers.listen(address)
        made.append(one)
    try:
        yield made
    finally:
        for one in made:
            await one.peers.close()


async def found_by(one: PeerGateway) -> dict[str, int]:
    _, *others = await one.exporter.gateways()
    return {counts.gateway: counts.num_open for counts in others}


async def response_of(
    one: PeerGateway, id: str, *, tenant: str = "acme", forgets: bool = False
) -> StoredResponse | None:
    try:
        return await one.store.find(tenant, id, forgets=forgets)
    except ApiError as error:
        assert error.status == 404
        return None


async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a handshake without the key."""
    await reader.read(1)
    writer.write(bytes(64))
    writer.close()


async def hung_up_on(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionResetError):
        assert await reader.read() == b""


@on_loop
async def test_each_gateway_hears_all_others() -> None:
    async with listening("a", "bb", "ccc") as (first, second, third):
        assert await found_by(first) == {"bb": 2, "ccc": 3}
        assert await found_by(second) == {"a": 1, "ccc": 3}
        await third.peers.close()
        assert await found_by(second) == {"a": 1}


@on_loop
async def test_gateways_of_another_port_or_cluster_are_left_out() -> None:
    async with (
        listening("a") as (one,),
        listening("bb", address=Address("127.0.0.1", 8001)),
        listening("ccc", key=b"another key, of another cluster!"),
    ):
        assert await found_by(one) == {}


@on_loop
async def test_process_without_the_key_hears_and_tells_nothing() -> None:
    async with listening("a", "bb") as (one, other):
        path = f"\0{other.peers._prefix}impostor"  # such a name is for all to see
        async with await asyncio.start_unix_server(pretend, path):
            assert await found_by(one) == {"bb": 2}
        reader, writer = await asyncio.open_unix_connection(f"\0{one.peers._name}")
        writer.write(b"x" * 1000)
        await hung_up_on(reader)
        writer.close()
        assert await found_by(other) == {"a": 1}


@on_loop
async def test_of_too_many_connections_the_oldest_is_closed() -> None:
    async with listening("a", "bb") as (one, other):
        idle = [await asyncio.open_unix_connection(f"\0{one.peers._name}") for _ in range(MAX_NEWCOMERS)]
        assert await found_by(other) == {"a": 1}
        await hung_up_on(idle[0][0])
        for _, writer in idle:
            writer.close()


@on_loop
async def test_gateway_that_does_not_listen_has_no_others() -> None:
    alone = PeerGateway("a")
    async with listening("bb"):
        assert await found_by(alone) == {}
        assert await response_of(alone, "resp_bb") is None


@on_loop
async def test_stored_response_is_found_at_the_gateway_that_has_it() -> None:
    async with listening("a", "bb", "ccc") as (one, other, _):
        for _ in range(2):
            found = await response_of(one, "resp_ccc")
            assert found is not None and found.response == b"ccc" * 2**20  # more than a frame
        assert await response_of(one, "resp_ccc", tenant="other") is None
        assert await response_of(one, "resp_d") is None
        assert await response_of(other, "resp_ccc", forgets=True) == found
        assert await response_of(one, "resp_ccc") is None


@on_loop
async def test_gateway_that_does_not_answer_holds_no_thread_of_the_loop() -> None:
    """The loop's own threads look for revoked keys."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(2))
    async with listening("a") as (one,):
        silent = socket.socket(socket.AF_UNIX)
        silent.bind(f"\0{one.peers._prefix}silent")
        silent.listen(100)
        silent.setblocking(False)
        asked = asyncio.gather(*(response_of(one, "resp_d") for _ in range(50)))
        accepted = [(await loop.sock_accept(silent))[0] for _ in range(2)]
        async with asyncio.timeout(TIMEOUT_S / 2):
            await asyncio.to_thread(int)
        for each in (silent, *accepted):  # so that no question waits for its time
            each.close()
        assert set(await asked) == {None}


@on_loop
async def test_more_questions_at_once_than_a_gateway_answers_are_all_answered() -> None:
    async with listening("a", "bb") as (one, _):
        asked = (response_of(one, "resp_bb") for _ in range(32))
        assert all(await asyncio.gather(*asked))
