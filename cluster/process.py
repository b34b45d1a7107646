"""One process of the cluster: `python -m baton.cluster.process`, which a runtime starts.

1. The parent writes one line to stdin, an Assignment, and keeps stdin open. Each later line is Generations:
   keys that replace those of the Assignment.
2. The process writes lines to stdout: Loading, any number of times, then a Report when it serves or has
   failed. A router or a gateway that serves writes LoopAlive every second, as long as its event loop runs.
3. After SIGTERM the process drains and ends with status 0; a second SIGTERM ends the process at once. Only a
   worker that `baton drain` has drained ends with DRAINED: a machine that shuts down also sends SIGTERM.
4. When stdin ends, the parent has died: the process ends at once, and its ranks with it.

A process imports the code of its own kind only: a router needs no torch.
"""

import asyncio
import contextlib
import gc
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, BinaryIO, Final, TypeAlias

import msgspec
import uvloop
from setproctitle import setproctitle

from baton.cluster.logs import set_up_logging
from baton.cluster.model_directory import resolve_model, served_name
from baton.cluster.runtimes.base import (
    ALIVE_EVERY_S,
    Assignment,
    Loading,
    LoopAlive,
    ProcessFailed,
    ProcessMessage,
    ProcessStarted,
    Progress,
)
from baton.config.cluster import WorkerConfig
from baton.errors import DRAINED, ORPHANED, STOPPED_TWICE, BatonError, status_of
from baton.messages.bounds import Kind
from baton.messages.workers import Address, HostPlace
from baton.rpc.auth import Generations, KeyRing
from baton.rpc.process import freeze_gc, frozen_imports, raise_descriptor_limit

# Runs on an asyncio loop until the event is set, and then to the end of what it has begun.
Serve: TypeAlias = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
Tell: TypeAlias = Callable[[ProcessMessage], None]
Run: TypeAlias = Callable[[Assignment, KeyRing, threading.Event, Tell], None]  # see `run`

LOADING_EVERY_S: Final = 0.5


def run(
    given: Assignment,
    ring: KeyRing,
    stop: threading.Event,
    tell: Tell,
    rank_hosts: Sequence[HostPlace] = (),
) -> None:
    """Serve on the calling thread until `stop` is set, or until an operator has drained the worker.

    ring: the process's keys; the caller may replace them. tell: called with ProcessStarted when the process
    serves, every LOADING_EVERY_S with Loading while a worker reads its weights, and every ALIVE_EVERY_S with
    LoopAlive while the event loop of a router or a gateway runs. rank_hosts: of a worker's ranks on other
    nodes (cluster/rank_host.py). Raises BatonError.
    """
    raise_descriptor_limit()
    match given.kind:
        case Kind.ROUTER:
            from baton.config.router import RouterConfig
            from baton.router.router import serve_router

            router = msgspec.json.decode(given.config, type=RouterConfig)
            starts = given.incarnation
            _run_loop(lambda end: serve_router(router, ring, _tells_alive(tell), end, starts), stop)
        case Kind.GATEWAY:
            from baton.config.gateway import GatewayConfig

            with frozen_imports():
                from baton.gateway.process import serve_gateway

            gateway = msgspec.json.decode(given.config, type=GatewayConfig)
            gateway = msgspec.structs.replace(
                gateway,
                model=str(resolve_model(gateway.model)),
                served_model_name=gateway.served_model_name or served_name(gateway.model),
                other_models={
                    name: msgspec.structs.replace(other, model=str(resolve_model(other.model)))
                    for name, other in gateway.other_models.items()
                },
            )
            _run_loop(lambda end: serve_gateway(gateway, ring, _tells_alive(tell), end), stop)
        case Kind.WORKER:
            with frozen_imports():
                from baton.cluster.worker_process import HostedWorker

            worker = msgspec.json.decode(given.config, type=WorkerConfig)
            hosted = HostedWorker(worker, ring, _tells_progress(tell), given.incarnation, rank_hosts)
            with contextlib.closing(hosted), freeze_gc():
                tell(ProcessStarted(hosted.address))
                hosted.serve(stop)
        case Kind.OPERATOR:
            raise AssertionError("an operator is no process of the cluster")


def _tells_alive(tell: Tell) -> Callable[[Address], None]:
    """Return a function that tells ProcessStarted, then LoopAlive every ALIVE_EVERY_S on the running loop."""

    def tell_alive() -> None:
        tell(LoopAlive())
        asyncio.get_running_loop().call_later(ALIVE_EVERY_S, tell_alive)

    def ready(address: Address) -> None:
        tell(ProcessStarted(address))
        tell_alive()

    return ready


def _tells_progress(tell: Tell) -> Progress:
    next_s = 0.0

    def progress(num_bytes: int, total_bytes: int) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + LOADING_EVERY_S
            tell(Loading(num_bytes, total_bytes))

    return progress


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


def main(run: Run = run) -> int:
    """Run the process that stdin describes, and return its exit status. run: replaces `run` above."""
    line = _stdin().readline()
    if not line:
        return ORPHANED
    given = msgspec.json.decode(line, type=Assignment)
    reports = _take_stdout()
    setproctitle(f"baton {given.name}")
    set_up_logging(given.name, format=given.log_format)
    stop = threading.Event()
    drain_on_signals(stop, signal.SIGTERM)
    ring = KeyRing(given.kind, given.generations)
    threading.Thread(target=hear_parent, args=(ring,), name="parent", daemon=True).start()

    def tell(message: ProcessMessage) -> None:
        reports.write(msgspec.json.encode(message) + b"\n")
        reports.flush()

    try:
        run(given, ring, stop, tell)
    except BatonError as error:
        tell(ProcessFailed.of(error))
        logging.getLogger(__name__).error("%s", error)
        return status_of(error)
    except BaseException as error:
        tell(ProcessFailed.of(error))
        raise
    finally:
        gc.unfreeze()  # frozen objects are never freed, and native libraries report them as leaks at exit
    return 0 if stop.is_set() else DRAINED


def _take_stdout() -> BinaryIO:
    """Return stdout for reports, and send all other output of the process to stderr from now on."""
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return reports


def drain_on_signals(
    stop: threading.Event, *numbers: signal.Signals, on_first: Callable[[], None] | None = None
) -> None:
    """Let the first of these signals call `on_first` and set `stop`. A second one ends the process."""

    def drain(number: int, frame: object) -> None:
        if stop.is_set():
            os._exit(STOPPED_TWICE)
        if on_first is not None:
            on_first()
        stop.set()

    for number in numbers:
        signal.signal(number, drain)


def _stdin() -> io.FileIO:
    """Return unbuffered stdin. With a buffer, the end of the process would wait for the buffer's lock."""
    return io.FileIO(0, closefd=False)


def hear_parent(ring: KeyRing) -> None:
    """Take new keys from stdin. At the end of stdin, end the process; never return."""
    for line in _stdin():
        ring.replace(msgspec.json.decode(line, type=Generations))
    os._exit(ORPHANED)


if __name__ == "__main__":
    sys.exit(main())
