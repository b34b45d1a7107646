"""One process of the cluster: `python -m baton.cluster.process`, started by a runtime and by nobody else.

1. Its parent writes one line to its stdin, an Assignment, and keeps that open. Each line that follows is
   Generations: keys that replace those of the Assignment.
2. It writes lines to its stdout: Loading, any number of times, then a Report when it serves or has failed.
   A router or a gateway that serves writes LoopAlive every second, as long as its event loop runs.
3. SIGTERM lets it drain, and end with status 0; a second one ends it at once. Only what `baton drain` has
   drained ends with DRAINED: whatever a machine's SIGTERM means, it is not "stay away".
4. When its stdin ends its parent has died: it dies at once, and its ranks with it.

What the processes do is imported here when it is known which one this is: a router needs no torch.
"""

import asyncio
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, BinaryIO, Final, TypeAlias, TypeVar

import msgspec
import uvloop
from setproctitle import setproctitle

from baton.cluster.logs import set_up_logging
from baton.cluster.model_directory import resolve_model
from baton.cluster.process_spec import (
    ALIVE_EVERY_S,
    DRAINED,
    USER_ERROR,
    Assignment,
    Loading,
    LoopAlive,
    ProcessFailed,
    ProcessStarted,
    Progress,
    Report,
)
from baton.config.cluster import Ready, WorkerConfig
from baton.errors import BatonError
from baton.messages.bounds import Kind
from baton.messages.workers import Address
from baton.rpc.auth import Generations, KeyRing
from baton.rpc.process import raise_descriptor_limit

StructT = TypeVar("StructT", bound=msgspec.Struct)
# Runs on an asyncio loop until the event is set, and then to the end of what it has begun.
Serve: TypeAlias = Callable[[asyncio.Event], Coroutine[Any, Any, None]]

LOADING_EVERY_S: Final = 0.5
ORPHANED: Final = 3  # exit status
STOPPED_TWICE: Final = 143  # as of a process that SIGTERM ends


def run(
    given: Assignment,
    ring: KeyRing,
    ready: Ready,
    stop: threading.Event,
    progress: Progress | None = None,
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Serve until `stop` is set, or a worker is drained, which leaves it unset; on any thread.

    ring: of the process's keys, at first those of the assignment; the caller may replace them.
    `progress` hears of a worker's weights; `alive` is called every ALIVE_EVERY_S on the event loop of a
    router or a gateway, once it serves. Raises BatonError.
    """
    raise_descriptor_limit()
    match given.kind:
        case "router":
            _run_router(given, ring, _then(ready, alive), stop)
        case "gateway":
            _run_gateway(given, ring, _then(ready, alive), stop)
        case "worker":
            _run_worker(given, ring, ready, stop, progress)


def _then(ready: Ready, alive: Callable[[], None]) -> Ready:
    """`ready`, after which `alive` is called every ALIVE_EVERY_S on the running event loop."""

    def say_alive() -> None:
        alive()
        asyncio.get_running_loop().call_later(ALIVE_EVERY_S, say_alive)

    def say(address: Address) -> None:
        ready(address)
        say_alive()

    return say


def _run_router(given: Assignment, ring: KeyRing, ready: Ready, stop: threading.Event) -> None:
    from baton.config.router import RouterConfig
    from baton.router.process import serve_router

    config = _config(given, RouterConfig)
    _run_loop(lambda stopping: serve_router(config, ring, ready, stopping, given.incarnation), stop)


def _run_gateway(given: Assignment, ring: KeyRing, ready: Ready, stop: threading.Event) -> None:
    from baton.config.gateway import GatewayConfig
    from baton.gateway.process import serve_gateway

    config = _config(given, GatewayConfig)
    config = msgspec.structs.replace(config, model=str(resolve_model(config.model)))
    _run_loop(lambda stopping: serve_gateway(config, ring, ready, stopping), stop)


def _run_worker(
    given: Assignment, ring: KeyRing, ready: Ready, stop: threading.Event, progress: Progress | None
) -> None:
    from baton.cluster.worker_process import run_worker

    run_worker(_config(given, WorkerConfig), ring, ready, stop, progress, given.incarnation)


def ring_of(given: Assignment) -> KeyRing:
    """Make the ring of the process's keys."""
    return KeyRing(Kind(given.kind), given.generations)


def _config(given: Assignment, kind: type[StructT]) -> StructT:
    return msgspec.json.decode(given.config, type=kind)


def _run_loop(serve: Serve, stop: threading.Event) -> None:
    async def until_stopped() -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()

        def tell() -> None:
            stop.wait()
            if not loop.is_closed():
                loop.call_soon_threadsafe(stopping.set)

        threading.Thread(target=tell, name="stop", daemon=True).start()
        await serve(stopping)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(until_stopped())
    finally:
        stop.set()  # lets the thread go


def main() -> int:
    given = msgspec.json.decode(_stdin().readline(), type=Assignment)
    reports = _take_stdout()
    setproctitle(f"baton {given.name}")
    set_up_logging(given.name, format=given.log_format)
    stop = threading.Event()
    _drain_on_sigterm(stop)
    ring = ring_of(given)
    threading.Thread(target=hear_parent, args=(ring,), name="parent", daemon=True).start()
    try:
        progress = _Throttled(lambda loading: _report(reports, loading))
        run(
            given,
            ring,
            ready=lambda address: _report(reports, ProcessStarted(address)),
            stop=stop,
            progress=progress,
            alive=lambda: _report(reports, LoopAlive()),
        )
    except BatonError as error:
        _report(reports, ProcessFailed.of(error))
        logging.getLogger(__name__).error("%s", error)
        return USER_ERROR if isinstance(error, ValueError) else 1
    except BaseException as error:
        _report(reports, ProcessFailed.of(error))
        raise
    return 0 if stop.is_set() else DRAINED


class _Throttled:
    """Says how far loading is, once a while."""

    def __init__(self, say: Callable[[Loading], None]) -> None:
        self._say = say
        self._next_s = 0.0

    def __call__(self, num_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + LOADING_EVERY_S
            self._say(Loading(num_bytes, total_bytes))


def _take_stdout() -> BinaryIO:
    """The reports' own way out: whatever else is printed goes to stderr from here on."""
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return reports


def _report(reports: BinaryIO, report: Report | Loading | LoopAlive) -> None:
    reports.write(msgspec.json.encode(report) + b"\n")
    reports.flush()


def _drain_on_sigterm(stop: threading.Event) -> None:
    def drain(number: int, frame: object) -> None:
        if stop.is_set():
            os._exit(STOPPED_TWICE)
        stop.set()

    signal.signal(signal.SIGTERM, drain)


def _stdin() -> io.FileIO:
    """Return stdin without a buffer, on whose lock a process that ends would wait for `hear_parent`."""
    return io.FileIO(0, closefd=False)


def hear_parent(ring: KeyRing) -> None:
    """Take new keys; never return: the parent is gone when stdin ends."""
    for line in _stdin():
        ring.replace(msgspec.json.decode(line, type=Generations))
    os._exit(ORPHANED)


if __name__ == "__main__":
    sys.exit(main())
