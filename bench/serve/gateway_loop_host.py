"""A process of a cluster of stubs, whose gateway records how long its loop was held: see gateway_loop.py.

A timer is due every TICK_S. A tick that is late by more than REPORTED_S becomes a line of the file that the
environment names: when the tick ran, how late it was, and how long the loop's thread waited meanwhile for a
core that other processes had. That wait is not a hold of the loop.
"""

import asyncio
import os
import sys
import threading
import time
from typing import Final, TextIO

import msgspec

from baton.bench.serve import stub
from baton.cluster import process
from baton.cluster.runtimes.base import Assignment, ProcessMessage, ProcessStarted
from baton.messages.bounds import Kind
from baton.rpc.auth import KeyRing

FILE_VARIABLE: Final = "BATON_BENCH_LOOP_FILE"
TICK_S: Final = 0.002
REPORTED_S: Final = 0.01


class Held(msgspec.Struct, frozen=True, array_like=True):
    """One late tick."""

    at_s: float  # of the monotonic clock, which all processes of a machine share
    late_s: float
    waited_s: float  # for a core since the tick before, as the kernel counts it for the loop's thread

    @property
    def held_s(self) -> float:
        return max(0.0, self.late_s - self.waited_s)


def record_late_ticks(file: TextIO) -> None:
    """Write the late ticks of the running loop into `file`, from now on."""
    loop = asyncio.get_running_loop()
    # proc(5): nanoseconds on a core, nanoseconds of waiting for one, times it ran
    schedule = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115

    def waited_s() -> float:
        return int(os.pread(schedule.fileno(), 100, 0).split()[1]) / 1e9

    def tick(due_s: float, before_s: float) -> None:
        now_s, after_s = time.monotonic(), waited_s()
        if now_s - due_s > REPORTED_S:
            held = Held(now_s, now_s - due_s, after_s - before_s)
            file.write(msgspec.json.encode(held).decode() + "\n")
            file.flush()
        loop.call_later(TICK_S, tick, time.monotonic() + TICK_S, waited_s())

    tick(time.monotonic(), waited_s())


def main() -> int:
    """Run the process of the assignment on stdin; a gateway's loop is watched from when it serves."""
    with open(os.environ[FILE_VARIABLE], "a", encoding="utf-8") as file:

        def run_watched(given: Assignment, ring: KeyRing, stop: threading.Event, tell: process.Tell) -> None:
            def tell_and_watch(message: ProcessMessage) -> None:
                if isinstance(message, ProcessStarted) and given.kind is Kind.GATEWAY:
                    record_late_ticks(file)
                tell(message)

            stub.run(given, ring, stop, tell_and_watch)

        return process.main(run_watched)


if __name__ == "__main__":
    sys.exit(main())
