"""A real gateway process that writes down how long its event loop was held.

    python -m baton.bench.gateway_loop_host          started by bench/gateway_loop.py, reads its assignment
    python -m baton.bench.gateway_loop_host --idle   the same monitor on a loop that has nothing else to do

A timer is due every TICK_S. A tick that is late by more than REPORTED_S becomes a line of the file that the
environment names: when the tick ran, how late it was, and how much CPU time the process took meanwhile. What
the machine does to every process shows in the lines of the idle one, which runs beside it.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from typing import Final, TextIO

import msgspec

from baton.cluster.process import ring_of, run
from baton.cluster.process_spec import Assignment, Started
from baton.worker import Address

FILE_VARIABLE: Final = "BATON_BENCH_LOOP_FILE"
TICK_S: Final = 0.002
REPORTED_S: Final = 0.01


class Held(msgspec.Struct, frozen=True, array_like=True):
    """One late tick."""

    at_s: float  # of the monotonic clock, which all processes of a machine share
    late_s: float
    cpu_s: float  # of all threads of the process, since the tick before


class LoopMonitor:
    """To be started on the loop that it watches."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._due_s = time.monotonic()
        self._cpu_s = time.process_time()
        self._tick()

    def _tick(self) -> None:
        now_s, cpu_s = time.monotonic(), time.process_time()
        if now_s - self._due_s > REPORTED_S:
            held = Held(now_s, now_s - self._due_s, cpu_s - self._cpu_s)
            self._file.write(msgspec.json.encode(held).decode() + "\n")
            self._file.flush()
        self._due_s, self._cpu_s = time.monotonic() + TICK_S, time.process_time()
        self._loop.call_later(TICK_S, self._tick)


def main() -> None:
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    with open(os.environ[FILE_VARIABLE], "a", encoding="utf-8") as file:
        if "--idle" in sys.argv:
            asyncio.run(_idle(file))
            return
        given = msgspec.json.decode(sys.stdin.buffer.readline(), type=Assignment)
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda number, frame: stop.set())

        def ready(address: Address) -> None:
            LoopMonitor(file)
            sys.stdout.buffer.write(msgspec.json.encode(Started(address)) + b"\n")
            sys.stdout.buffer.flush()

        run(given, ring_of(given), ready, stop)


async def _idle(file: TextIO) -> None:
    """Until the standard input ends."""
    LoopMonitor(file)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    main()
