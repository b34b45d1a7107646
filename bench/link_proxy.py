"""A TCP proxy between two processes of a cluster, which can swallow a direction or cut all its connections.

Swallowing holds bytes back, as a network does that drops packets: the sender's kernel takes some more,
nothing arrives, no end of the stream is heard of, and new connections get no answer. Once it passes again,
what was held arrives, in order.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import Final, Self

CHUNK_BYTES: Final = 1 << 16


class Direction(Enum):
    FORTH = "forth"  # from the end that connects to the end that listens
    BACK = "back"


BOTH: Final = (Direction.FORTH, Direction.BACK)


class LinkProxy:
    """Listens at `address` and connects what comes to `target`, on a thread of its own; closed by `close`."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link-proxy", daemon=True)
        self._thread.start()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.num_connections = 0
        future = asyncio.run_coroutine_threadsafe(self._listen(), self._loop)
        self.address: tuple[str, int] = future.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def swallow(self, *directions: Direction) -> None:
        """Let nothing through in these directions, both if none is named, until `restore`."""
        self._set(directions or BOTH, passes=False)

    def restore(self) -> None:
        """Let everything through again, what was held first."""
        self._set(BOTH, passes=True)

    def cut(self) -> None:
        """Reset every connection that there is; new ones are served."""
        self._call(self._abort_all)

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            self._abort_all()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
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
        self._writers.add(writer)
        try:
            await self._gates[Direction.FORTH].wait()
            other_reader, other_writer = await asyncio.open_connection(*self.target)
            writers.append(other_writer)
            self._writers.add(other_writer)
            await asyncio.gather(
                self._carry(reader, other_writer, self._gates[Direction.FORTH]),
                self._carry(other_reader, writer, self._gates[Direction.BACK]),
            )
        except OSError:
            pass  # one of the ends is gone, and so is the other now
        finally:
            for each in writers:
                self._writers.discard(each)
                each.transport.abort()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event
    ) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await gate.wait()
            writer.write(data)
            await writer.drain()
        await gate.wait()
        with contextlib.suppress(OSError):
            writer.write_eof()

    def _set(self, directions: tuple[Direction, ...], *, passes: bool) -> None:
        def change() -> None:
            for direction in directions:
                gate = self._gates[direction]
                if passes:
                    gate.set()
                else:
                    gate.clear()

        self._call(change)

    def _abort_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    def _call(self, change: Callable[[], None]) -> None:
        done = threading.Event()

        def make() -> None:
            change()
            done.set()

        self._loop.call_soon_threadsafe(make)
        done.wait()
