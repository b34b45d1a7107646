"""Nodes and peers for tests of RPC servers.

A node that records what it hears, and a peer that breaks rules.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Final

from baton.errors import WireError
from baton.messages.bounds import LINK_TIMEOUT_S, Kind
from baton.messages.codec import CONTROL_SCHEMA, AnyMessage, decode, encode
from baton.messages.control import Hello, Tokens
from baton.messages.workers import Address
from baton.request import TokenEvent
from baton.rpc.auth import ClusterKeys, KeyRing, LinkKeys, Role
from baton.rpc.liveness import is_ping
from baton.rpc.peers import Peer
from baton.rpc.server import RpcServer
from baton.rpc.session import Session
from tests import waiting

KEY = b"k" * 16
HELLO = Hello(process=Kind.WORKER, id="c" * 32)
_rogues: list["Rogue"] = []  # closed with the server


class Recorder:
    """A node that keeps everything that it hears; `refuses` is a message type that it calls an offence."""

    def __init__(self, name: str, *, refuses: type[AnyMessage] | None = None) -> None:
        self.hello = Hello(process=Kind.WORKER, id=name * 32)
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
    """Serve a node at an address; the server is closed in the end."""
    rpc_server = RpcServer(key, link_timeout_s=link_timeout_s)
    try:
        address = await rpc_server.listen()
        rpc_server.serve(node)
        yield rpc_server, address
    finally:
        await rpc_server.close()
        while _rogues:
            await _rogues.pop().close()


class Joined:
    """Two nodes, of which `other` has dialled `one`."""

    def __init__(self, link_timeout_s: float = LINK_TIMEOUT_S) -> None:
        self.one, self.other = Recorder("a"), Recorder("b")
        self._link_timeout_s = link_timeout_s
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "Joined":
        timeout_s = self._link_timeout_s
        self.accepting, self.address = await self._stack.enter_async_context(
            hosted(self.one, link_timeout_s=timeout_s)
        )
        self.dialling, _ = await self._stack.enter_async_context(hosted(self.other, link_timeout_s=timeout_s))
        self.dialling.dial(self.address)
        await until(lambda: self.one.num_joined == self.other.num_joined == 1)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def again(self) -> None:
        """Dial until both have joined a second time."""

        def is_joined() -> bool:
            self.dialling.dial(self.address)
            return self.one.num_joined == self.other.num_joined == 2

        await until(is_joined)


# A peer that is dropped for its silence takes longer.
until: Final = functools.partial(waiting.until, timeout_s=5.0)


class Rogue:
    """A peer that holds the key, and then chooses its bytes freely."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: Session) -> None:
        self._reader, self._writer, self._session = reader, writer, session
        self._bodies: list[bytes] = []
        _rogues.append(self)

    @classmethod
    async def connect(
        cls, address: Address, kind: Kind = Kind.WORKER, schema: bytes = CONTROL_SCHEMA
    ) -> "Rogue":
        """Return a peer after the handshake, before any Hello."""
        reader, writer = await asyncio.open_connection(address.host, address.port)
        keys = LinkKeys(KeyRing.of(KEY, kind))
        session = Session(keys, Role.CONNECTING, writer.write, schema=schema)
        session.open()
        rogue = cls(reader, writer, session)
        with contextlib.suppress(WireError):  # of another schema
            while not session.is_proven:
                await rogue._feed()
        return rogue

    def frame(self, message: AnyMessage) -> bytes:
        return self._session.frame(encode(message))

    def frame_of(self, body: bytes) -> bytes:
        return self._session.frame(body)

    def write(self, frames: bytes) -> None:
        self._writer.write(frames)

    def read_nothing(self) -> None:
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    async def read(self) -> AnyMessage | None:
        """Return the next message, without pings; None at the end of the stream."""
        while not self._bodies:
            if not await self._feed():
                return None
        return decode(self._bodies.pop(0))

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _feed(self) -> bool:
        try:
            received = await self._reader.read(65_536)
        except ConnectionError:
            return False
        bodies = list(self._session.receive(received, 0.0))
        self._bodies += [body for body in bodies if not is_ping(body)]
        return bool(received)


async def rogue_after_hello(address: Address) -> Rogue:
    """Return a peer after both Hellos."""
    rogue = await Rogue.connect(address)
    rogue.write(rogue.frame(HELLO))
    assert isinstance(await rogue.read(), Hello)
    return rogue


def tokens(num_events: int, start: int = 0) -> Tokens:
    indices = range(start, start + num_events)
    return Tokens(events=tuple(TokenEvent("a" * 32, 0, index, index % 50_000) for index in indices))
