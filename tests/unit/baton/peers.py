"""Nodes and peers for tests of the hub: one that records what it hears, one that says whatever it likes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from baton.errors import WireError
from baton.messages.bounds import LINK_TIMEOUT_S, Kind
from baton.messages.codec import CONTROL_SCHEMA, AnyMessage, decode, encode
from baton.messages.control import Hello, Tokens
from baton.messages.workers import Address
from baton.request import TokenEvent
from baton.rpc.auth import MAX_CHALLENGE_BYTES, Challenge, ClusterKeys, KeyRing, LinkKeys, Role
from baton.rpc.liveness import is_ping
from baton.rpc.peers import Peer
from baton.rpc.server import RpcServer
from baton.rpc.session import Seals, encode_frame

KEY = b"k" * 16
HELLO = Hello(process=Kind.WORKER, id="c" * 32)
_rogues: list["Rogue"] = []  # to be closed with the hub


class Recorder:
    """A node that keeps all that it hears; `refuses` makes it call a message an offence."""

    def __init__(self, name: str, *, refuses: type[AnyMessage] | None = None) -> None:
        self.hello = Hello(process=Kind.GATEWAY, id=name * 32)
        self.peers: list[Peer] = []
        self.messages: list[AnyMessage] = []
        self.num_joined = self.num_left = self.num_ticks = 0
        self._refuses = refuses

    def joined(self, peer: Peer) -> None:
        self.num_joined += 1
        self.peers.append(peer)

    def received(self, peer: Peer, message: AnyMessage) -> None:
        if self._refuses is not None and isinstance(message, self._refuses):
            raise WireError("not from you", reason="protocol")
        self.messages.append(message)

    def left(self, peer: Peer) -> None:
        self.num_left += 1
        self.peers.remove(peer)

    def tick(self) -> None:
        self.num_ticks += 1


@contextlib.asynccontextmanager
async def hosted(
    node: Recorder, key: ClusterKeys = KEY, *, link_timeout_s: float = LINK_TIMEOUT_S
) -> AsyncIterator[tuple[RpcServer, Address]]:
    """A hub that listens; it is closed in the end."""
    rpc_server = RpcServer(key, link_timeout_s=link_timeout_s)
    try:
        address = await rpc_server.listen()
        rpc_server.serve(node)
        yield rpc_server, address
    finally:
        await rpc_server.close()
        while _rogues:
            await _rogues.pop().close()


async def until(is_so: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Raises TimeoutError when it does not become so."""
    async with asyncio.timeout(timeout_s):
        while not is_so():
            await asyncio.sleep(0.002)


class Rogue:
    """A peer that holds the key, and then decides byte by byte what it says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seals: Seals) -> None:
        self._reader, self._writer, self._seals = reader, writer, seals
        _rogues.append(self)

    @classmethod
    async def connect(
        cls, address: Address, key: bytes = KEY, kind: Kind = Kind.WORKER, schema: bytes = CONTROL_SCHEMA
    ) -> "Rogue":
        """After the challenge, before any Hello."""
        reader, writer = await asyncio.open_connection(address.host, address.port)
        keys = LinkKeys(KeyRing.of(key, kind))
        challenge = Challenge(keys, Role.CONNECTING, schema=schema)
        writer.write(encode_frame(challenge.first()))
        answer = await reader.readexactly(5 + MAX_CHALLENGE_BYTES)
        proof = challenge.receive(answer[5:])
        assert proof is not None and challenge.session_key is not None
        writer.write(encode_frame(proof))
        return cls(reader, writer, Seals(challenge.session_key, Role.CONNECTING))

    def frame(self, message: AnyMessage) -> bytes:
        return encode_frame(self._seals.seal(encode(message)))

    def frame_of(self, body: bytes) -> bytes:
        return encode_frame(self._seals.seal(body))

    def write(self, frames: bytes) -> None:
        self._writer.write(frames)

    async def read(self) -> AnyMessage | None:
        """The next message, pings left out; None at the end of the stream."""
        while True:
            try:
                header = await self._reader.readexactly(5)
                body = await self._reader.readexactly(int.from_bytes(header[:4], "big") - 1)
            except (asyncio.IncompleteReadError, ConnectionError):
                return None
            opened = self._seals.open(body)
            if not is_ping(opened):
                return decode(opened)

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


def tokens(num_events: int, start: int = 0) -> Tokens:
    return Tokens(
        events=tuple(
            TokenEvent("a" * 32, 0, index, index % 50_000) for index in range(start, start + num_events)
        )
    )


async def rogue_after_hello(address: Address) -> Rogue:
    rogue = await Rogue.connect(address)
    rogue.write(rogue.frame(HELLO))
    assert isinstance(await rogue.read(), Hello)
    return rogue
