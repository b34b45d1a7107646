"""The faults of bench/soak.py: processes are killed, or stopped and continued, as a seed draws it.

One process of each kind lives as long as the load, so that its memory can be watched: faults stop it for a
short while and never end it.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from baton.bench.soak_world import World

STOPPED_S: Final = (1.0, 4.0, 12.0)
ENDED_BY_S: Final = 2.0  # a worker that is silent for 3 s is given up and replaced


class Kind(NamedTuple):
    """What is done to a process whose name begins so."""

    signal: signal.Signals
    prefix: str

    @property
    def name(self) -> str:
        return f"{self.signal.name} {self.prefix}"


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
FAULTS: Final[Sequence[Kind]] = (
    Kind(KILL, "prefill"),
    Kind(KILL, "decode"),
    Kind(KILL, "router"),
    Kind(KILL, "gateway"),
    Kind(KILL, "redis"),
    Kind(STOP, "prefill"),
    Kind(STOP, "decode"),
    Kind(STOP, "router"),
    Kind(STOP, "gateway"),
    Kind(STOP, "redis"),
)


class Faults:
    def __init__(self, world: World, rng: random.Random, lasting: Collection[int]) -> None:
        """lasting: ids of the processes that no fault may end."""
        self.done: list[dict[str, object]] = []
        self._world = world
        self._rng = rng
        self._lasting = frozenset(lasting)
        self._stopped: set[int] = set()
        self._begin_s = time.perf_counter()

    async def run(self, every_s: float, end_s: float) -> None:
        """One every so often; the last is early enough for what it stops to go on again."""
        continuing: list[asyncio.Task[None]] = []
        while time.perf_counter() + every_s + STOPPED_S[-1] < end_s:
            await asyncio.sleep(every_s)
            kind, choice, seconds = (
                self._rng.choice(FAULTS),
                self._rng.random(),
                self._rng.choice(STOPPED_S),
            )
            found = sorted((await self._world.pids()).items())
            is_ended = kind.signal is KILL or seconds > ENDED_BY_S
            victims = [
                (name, pid)
                for name, pid in found
                if name.startswith(kind.prefix) and not (is_ended and pid in self._lasting)
            ]
            if not victims:  # it is being started
                continue
            name, pid = victims[int(choice * len(victims))]
            self._strike(kind, name, pid, seconds)
            if kind.signal is STOP:
                continuing.append(asyncio.create_task(self._continue(pid, seconds)))
        await asyncio.gather(*continuing)

    def undo(self) -> None:
        """Let whatever is stopped go on."""
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _strike(self, kind: Kind, name: str, pid: int, seconds: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            if kind.signal is STOP:
                self._stopped.add(pid)
            os.kill(pid, kind.signal)
            at_s = round(time.perf_counter() - self._begin_s, 1)
            lasts_s = seconds if kind.signal is STOP else 0.0
            self.done.append({"at_s": at_s, "kind": kind.name, "process": name, "seconds": lasts_s})

    async def _continue(self, pid: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        self._stopped.discard(pid)
