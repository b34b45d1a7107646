"""TCP proxies between the processes of a cluster, which swallow, delay or throttle connections.

A proxy that swallows holds bytes back, like a network that drops packets: the sender's kernel takes some
more, nothing arrives, no stream ends, and new connections get no answer. When the proxy passes bytes again,
the held bytes arrive, in order. A slow link delivers each byte after a delay, and a limited number of bytes
a second.

`python -m baton.bench.faults.link_proxy PORT` is a process of a cluster, like `baton.cluster.process`.
Before it connects to another process, it asks the switchboard at PORT for the address of a proxy. The
switchboard learns the name of the process that dials, so every link has a proxy of its own, and processes
announce their usual addresses.
"""

import asyncio
import contextlib
import json
import math
import socket
import sys
import threading
from collections.abc import Coroutine
from enum import Enum
from functools import cache
from typing import Any, Final, NamedTuple, Self, TypeVar

from baton.cluster import process
from baton.cluster.runtimes.base import Assignment
from baton.messages.bounds import Kind
from baton.messages.workers import Address
from baton.rpc.auth import KeyRing
from baton.rpc.server import RpcServer

CHUNK_BYTES: Final = 1 << 16
MAX_UNDER_WAY: Final = 16  # chunks of one direction
HOST: Final = "127.0.0.1"
ANSWER_TIMEOUT_S: Final = 5.0
ResultT = TypeVar("ResultT")


class Direction(Enum):
    """A direction of a connection."""

    FORTH = "forth"  # from the end that connects to the end that listens
    BACK = "back"


class LinkProxy:
    """Forwards connections from `address` to `target`, on a thread of its own, until `close`."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link-proxy", daemon=True)
        self._thread.start()
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_connections = 0
        self._delay_s, self._bytes_per_s = 0.0, math.inf
        self.address = self._run(self._listen())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def swallow(self, *directions: Direction) -> None:
        """Let nothing through in these directions, both if none is named, until `restore`."""

        async def hold() -> None:
            for direction in directions or Direction:
                self._gates[direction].clear()

        self._run(hold())

    def slow(self, *, delay_s: float = 0.0, bytes_per_s: float = math.inf) -> None:
        """Delay bytes from now on, and limit the rate of each connection, both ways."""

        async def change() -> None:
            self._delay_s, self._bytes_per_s = delay_s, bytes_per_s

        self._run(change())

    def restore(self) -> None:
        """Let everything through again at full speed, held bytes first."""

        async def release() -> None:
            for gate in self._gates.values():
                gate.set()

        self.slow()
        self._run(release())

    def close(self) -> None:
        """End the proxy and its connections."""

        async def end() -> None:
            self._server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> tuple[str, int]:
        self._gates = {direction: asyncio.Event() for direction in Direction}
        for gate in self._gates.values():
            gate.set()
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = self._loop.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            await self._gates[Direction.FORTH].wait()
            other_reader, other_writer = await asyncio.open_connection(*self.target)
            writers.append(other_writer)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._carry(reader, other_writer, self._gates[Direction.FORTH]))
                ways.create_task(self._carry(other_reader, writer, self._gates[Direction.BACK]))
        except* OSError:
            pass  # one end is gone, so the other end is closed
        finally:
            for each in writers:
                each.transport.abort()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event
    ) -> None:
        """Read on while bytes are under way, as a delay alone takes no bandwidth. b"" is the end."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_UNDER_WAY)

        async def deliver() -> None:
            data = b" "
            while data:
                due_s, data = await under_way.get()
                await asyncio.sleep(max(0.0, due_s - self._loop.time()))
                await gate.wait()
                if data:
                    writer.write(data)
                    await writer.drain()
                    await asyncio.sleep(len(data) / self._bytes_per_s)
            with contextlib.suppress(OSError):
                writer.write_eof()

        async with asyncio.TaskGroup() as group:
            group.create_task(deliver())
            data = b" "
            while data:
                data = await reader.read(self._chunk_bytes())
                await under_way.put((self._loop.time() + self._delay_s, data))

    def _chunk_bytes(self) -> int:
        """Return how many bytes are read at once: of a slow link, what passes in a tenth of a second."""
        return int(min(CHUNK_BYTES, max(1.0, self._bytes_per_s / 10)))

    def _run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine on the proxy's thread; return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class Link(NamedTuple):
    """The connections of one kind from one process to one address."""

    dialer: str  # the name of a process
    kind: str  # "control", "page control" or "page data"
    target: tuple[str, int]


class Switchboard:
    """Answers processes at `port`; `links` has a proxy for every link that was asked for, oldest first."""

    def __init__(self) -> None:
        self.links: dict[Link, LinkProxy] = {}

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._answer, HOST, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for proxy in self.links.values():
            proxy.close()

    @property
    def port(self) -> int:
        return int(self._server.sockets[0].getsockname()[1])

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialer, kind, host, port = json.loads(await reader.readline())
        link = Link(dialer, kind, (host, port))
        if link not in self.links:
            self.links[link] = LinkProxy(link.target)
        writer.write(json.dumps(self.links[link].address).encode() + b"\n")
        writer.close()


def _lead_through_proxies(dialer: str, port: int, kind: Kind) -> None:
    """Lead control connections of this process through proxies, and page connections of a worker.

    dialer: the name of this process. port: of the switchboard, which is asked once for each address.
    """
    lock = threading.Lock()

    @cache
    def ask(host: str, target: int, what: str) -> tuple[str, int]:
        with socket.create_connection((HOST, port), ANSWER_TIMEOUT_S) as sock:
            sock.sendall(json.dumps([dialer, what, host, target]).encode() + b"\n")
            found, proxy = json.loads(sock.makefile().readline())
        return found, proxy

    def through(address: tuple[str, int], what: str) -> tuple[str, int]:
        with lock:
            return ask(*address, what)

    dial = RpcServer.dial

    def dial_through(self: RpcServer, address: Address) -> None:
        dial(self, Address(*through((address.host, address.port), "control")))

    RpcServer.dial = dial_through  # type: ignore[method-assign]
    if kind is not Kind.WORKER:  # a router and a gateway need no torch
        return
    from baton.kvtransfer.endpoint import KvEndpoint
    from baton.kvtransfer.links import Link
    from baton.kvtransfer.transports.base import LocalRank
    from baton.kvtransfer.transports.tcp import TcpSender

    link, make = KvEndpoint.link, TcpSender.__init__

    def link_through(self: KvEndpoint, address: tuple[str, int]) -> Link:
        return link(self, through(address, "page control"))

    def make_through(self: TcpSender, rank: LocalRank, address: tuple[str, int]) -> None:
        make(self, rank, through(address, "page data"))

    KvEndpoint.link = link_through  # type: ignore[method-assign]
    TcpSender.__init__ = make_through  # type: ignore[method-assign,assignment]


def main() -> int:
    """Run a process of the cluster behind proxies; the argument is the switchboard's port."""
    port = int(sys.argv[1])

    def run_behind_proxies(
        given: Assignment, ring: KeyRing, stop: threading.Event, tell: process.Tell
    ) -> None:
        _lead_through_proxies(given.name, port, given.kind)
        process.run(given, ring, stop, tell)

    return process.main(run_behind_proxies)


if __name__ == "__main__":
    sys.exit(main())
