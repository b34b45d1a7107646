"""The gateways behind one port of this machine: each answers the questions of the others.

The kernel hands a call of the port to any gateway. Counts, stored responses and adapters belong to one
gateway; the others ask for them. The module that has them calls `PeerGateways.answer`. Each gateway listens
on an abstract unix socket; its name begins with the shared address. Both ends prove that they hold the key.
The socket ends with its process.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from baton.errors import PeerGone, WireError
from baton.messages.bounds import MAX_BODY_BYTES, schema_hash
from baton.messages.workers import Address
from baton.rpc.auth import GATEWAYS, KeyRing, LinkKeys, Role
from baton.rpc.connection import Connection, DroppedPeers
from baton.rpc.listener import BACKLOG, Listener

SOCKETS: Final = Path("/proc/net/unix")
TIMEOUT_S: Final = 2.0  # for a gateway to answer; a slower one is left out
RETRY_S: Final = 0.05  # after a gateway was too busy
MAX_PEERS: Final = 64
MAX_ASKED: Final = 16  # gateways at once, by all questions together
MORE, LAST = b"\1", b"\0"  # before each piece of an answer
PIECE_BYTES: Final = MAX_BODY_BYTES - 1

logger = logging.getLogger(__name__)


Question = TypeVar("Question", bound=msgspec.Struct)
Reply = TypeVar("Reply", bound=msgspec.Struct)


class _Subject(NamedTuple):
    """The questions of one type: `tell` decodes one and returns the encoded reply, b"" for none."""

    question: type[msgspec.Struct]
    reply: type[msgspec.Struct]
    tell: Callable[[bytes], bytes]


class PeerGateways:
    """Call `answer` for each type of question, then `listen`, on one event loop.

    A gateway that does not listen has no others.
    """

    def __init__(self, keys: KeyRing) -> None:
        """keys: of a gateway."""
        self._keys = LinkKeys(keys, GATEWAYS)
        self._subjects: dict[str, _Subject] = {}  # by the name of the question's type
        self._schema = b""  # from `listen` on
        self._prefix = self._name = ""
        self._listener: Listener | None = None
        # A gateway that does not answer would hold the loop's threads, which also read the tenants file.
        self._threads = ThreadPoolExecutor(MAX_ASKED, "peer-gateways")

    def answer(
        self, question: type[Question], reply: type[Reply], tell: Callable[[Question], Reply | None]
    ) -> Callable[[Question], Awaitable[list[Reply]]]:
        """Answer questions of a type, and return the function that asks the others such a question.

        tell: the reply to another gateway, None if there is none; called on the event loop. The returned
        function returns the replies of the gateways that answer in time, in no order.
        """

        def told(data: bytes) -> bytes:
            found = tell(msgspec.msgpack.decode(data, type=question))
            return b"" if found is None else msgspec.msgpack.encode(found)

        async def ask(asked: Question) -> list[Reply]:
            replies = await self._ask_all(b"%s\0%s" % (name.encode(), msgspec.msgpack.encode(asked)))
            return [msgspec.msgpack.decode(each, type=reply) for each in replies if each]

        name = question.__name__
        self._subjects[name] = _Subject(question, reply, told)
        return ask

    def listen(self, address: Address) -> None:
        """Listen for the others. address: the address that all of them share."""
        subjects = sorted(self._subjects.items())
        self._schema = schema_hash(*(type for _, each in subjects for type in (each.question, each.reply)))
        self._prefix = f"baton-gateway/{address.host}:{address.port}/"
        self._name = self._prefix + secrets.token_hex(8)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(f"\0{self._name}")
            listener.listen(BACKLOG)
        except OSError as error:
            logger.warning("the gateways of this port cannot ask each other: %s", error)
            listener.close()
            return
        tell = partial(self._tell, asyncio.get_running_loop())
        self._listener = Listener(listener, tell, "peer-gateway", DroppedPeers())

    async def close(self) -> None:
        """Stop listening and asking. May be called twice."""
        if self._listener is not None:
            await asyncio.to_thread(self._listener.close)  # its threads may wait for this loop
            self._listener = None
        self._threads.shutdown(wait=False)

    def _names(self) -> list[str]:
        """Return the names in the kernel's list: the last column, with @ for the first byte."""
        if self._listener is None:
            return []
        try:
            lines = SOCKETS.read_text(errors="replace").splitlines()
        except OSError:
            return []
        found = {line.rpartition(" @")[2] for line in lines if f" @{self._prefix}" in line}
        return sorted(found - {self._name})[:MAX_PEERS]

    async def _ask_all(self, question: bytes) -> list[bytes]:
        names = await asyncio.to_thread(self._names)  # a host may have tens of thousands of sockets
        if self._listener is None:
            return []
        loop = asyncio.get_running_loop()
        asked = (loop.run_in_executor(self._threads, self._ask, name, question) for name in names)
        return [told for told in await asyncio.gather(*asked) if told is not None]

    def _ask(self, name: str, question: bytes) -> bytes | None:
        """Ask a gateway again while it is too busy; return None if it does not answer in TIMEOUT_S."""
        until_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return self._ask_once(name, question)
            except (WireError, PeerGone, TimeoutError, msgspec.MsgspecError) as error:
                if time.monotonic() >= until_s:
                    logger.warning("a gateway of this port does not answer: %s", error)
                    return None
            time.sleep(RETRY_S)

    def _ask_once(self, name: str, question: bytes) -> bytes | None:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(TIMEOUT_S)
        try:
            sock.connect(f"\0{name}")
        except OSError:  # it has just ended
            sock.close()
            return None
        if not _is_ours(sock):
            sock.close()
            return None
        connection = Connection(sock, self._keys, Role.CONNECTING, schema=self._schema)
        with contextlib.closing(connection.handshake(TIMEOUT_S)):
            connection.send(question, timeout_s=TIMEOUT_S)
            return b"".join(_received(connection))

    def _tell(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        if not _is_ours(sock):
            sock.close()
            return
        connection = Connection(sock, self._keys, Role.ACCEPTING, schema=self._schema)
        failures = (WireError, PeerGone, TimeoutError, msgspec.MsgspecError)
        with contextlib.closing(connection), contextlib.suppress(*failures):
            connection.handshake(TIMEOUT_S)
            question = connection.recv(TIMEOUT_S)
            told = asyncio.run_coroutine_threadsafe(self._told(question), loop).result(TIMEOUT_S)
            for begin in range(0, max(1, len(told)), PIECE_BYTES):
                mark = MORE if begin + PIECE_BYTES < len(told) else LAST
                connection.send(mark + told[begin : begin + PIECE_BYTES], timeout_s=TIMEOUT_S)

    async def _told(self, question: bytes) -> bytes:
        """Return the answer as of the question, so that no scrape shows less than the one before."""
        name, _, asked = question.partition(b"\0")
        return self._subjects[name.decode()].tell(asked)


def _received(connection: Connection) -> Iterator[bytes]:
    """Yield the pieces of an answer."""
    while True:
        piece = connection.recv(TIMEOUT_S)
        yield piece[1:]
        if piece[:1] == LAST:
            return


def _is_ours(sock: socket.socket) -> bool:
    """Return whether the other end runs as this user or as root; other users are refused."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return uid in (0, os.geteuid())
