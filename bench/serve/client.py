"""HTTP/1.1 for load: one request at a time on a connection, every piece of an answer with its moment.

The client does not parse an answer while the answer comes: parsing would be part of the figures and delay
other answers. Connections are kept and used again, the latest free one first.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Self, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit

import httptools

from baton.errors import ConfigError, PeerGone

Done: TypeAlias = Callable[["Answer | PeerGone"], None]
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class Answer:
    """An answer as far as it has come; moments are of `time.perf_counter`."""

    sent_s: float = 0.0
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # of the body
    ended_s: float = 0.0
    retry_after: str = ""  # the header
    should_retry: str = ""

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    @property
    def is_refusal(self) -> bool:
        return self.status in (429, 503)

    @property
    def retry_after_s(self) -> float:
        """The seconds that a refusal names; 0.0: none."""
        return float(self.retry_after) if self.retry_after.isdecimal() else 0.0


async def sleep_until(due_s: float) -> None:
    """Sleep until that moment of `time.perf_counter`, never less; a loop's own timers may fire early."""
    while (left_s := due_s - time.perf_counter()) > 0:
        await asyncio.sleep(left_s)


async def at_once(
    number: int, items: Iterable[ItemT], act: Callable[[ItemT], Awaitable[ResultT]]
) -> list[ResultT]:
    """Act on every item, `number` of them at a time; return the results in the items' order."""
    waiting, found = enumerate(items), dict[int, ResultT]()

    async def work() -> None:
        for place, item in waiting:
            found[place] = await act(item)

    await asyncio.gather(*(work() for _ in range(number)))
    return [found[place] for place in sorted(found)]


class Address:
    """The address of a server, and the first lines of every request to it. ConfigError: no http URL."""

    def __init__(self, url: str, api_key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"target: expected http://HOST:PORT, got {url!r}")
        self.url = url.rstrip("/")
        self.host = parts.hostname
        self.port = parts.port or 80
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = f"host: {parts.netloc}\r\n"
        if api_key:
            self._headers += f"authorization: Bearer {api_key}\r\n"

    def get(self, path: str) -> bytes:
        return f"GET {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n".encode()

    def post(self, path: str, body: bytes, headers: str = "") -> bytes:
        """headers: whole lines, beside those of every request."""
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}{headers}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Connection(asyncio.Protocol):
    """One connection to a server."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._done: Done | None = None
        self._now_s = 0.0

    @classmethod
    async def open(cls, address: Address) -> Self:
        """Connect; OSError when nothing listens there."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, address.host, address.port)
        return connection

    def send(self, request: bytes, done: Done) -> Answer:
        """Return the answer, which fills while it comes.

        `done` is called with the whole answer, or with the error that ended the connection.
        """
        assert self._answer is None and self._transport is not None, "one request at a time"
        self._done, self._answer = done, Answer(time.perf_counter())
        self._transport.write(request)
        return self._answer

    async def exchange(self, request: bytes) -> tuple[Answer, PeerGone | None]:
        """Return the answer as far as it came, and the error if the connection broke before its end."""
        future: asyncio.Future[Answer | PeerGone] = asyncio.get_running_loop().create_future()
        answer = self.send(request, lambda end: None if future.done() else future.set_result(end))
        end = await future
        return answer, end if isinstance(end, PeerGone) else None

    def close(self) -> None:
        """Close the connection; an answer that is still coming ends."""
        if self._transport is not None:
            self._transport.close()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is of another class
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(PeerGone(f"the server speaks no HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._end(PeerGone(f"the server closed the connection in the middle of an answer: {error}"))

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is None or len(name) not in (11, 14):
            return
        if name.lower() == b"retry-after":
            self._answer.retry_after = value.decode("latin-1")
        elif name.lower() == b"x-should-retry":
            self._answer.should_retry = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._answer is not None:
            self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._answer.pieces.append((self._now_s, body))

    def on_message_complete(self) -> None:
        answer, parser = self._answer, self._parser
        if answer is None:
            return
        answer.status, answer.ended_s = parser.get_status_code(), self._now_s
        if not parser.should_keep_alive():
            self.is_open = False
            self.close()
        else:
            self._parser = httptools.HttpResponseParser(self)
        self._end(answer)

    def _end(self, answer: Answer | PeerGone) -> None:
        done, self._done, self._answer = self._done, None, None
        if done is not None:
            done(answer)


class Client:
    """Connections to one server, as many as requests under way."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._free: list[Connection] = []

    async def get(self, path: str) -> Answer:
        return await self.ask(self.address.get(path))

    async def post(self, path: str, body: bytes) -> Answer:
        return await self.ask(self.address.post(path, body))

    async def ask(self, request: bytes) -> Answer:
        """Return the whole answer. PeerGone: the server ended the connection; OSError: there is none."""
        while self._free:
            connection = self._free.pop()
            if connection.is_open:
                break
        else:
            connection = await Connection.open(self.address)
        try:
            answer, error = await connection.exchange(request)
        except asyncio.CancelledError:
            connection.close()
            raise
        if error is not None:
            raise error
        self._free.append(connection)
        return answer

    def close(self) -> None:
        for connection in self._free:
            connection.close()
