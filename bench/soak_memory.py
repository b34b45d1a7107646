"""The growth of a cluster's processes: resident set sizes by process id, judged once a process is warm."""

import asyncio
import math
import statistics
import time
from collections import defaultdict
from typing import Final

from baton.bench.soak_world import World, resident_mib

SAMPLE_EVERY_S: Final = 5.0
WARM_UP_S: Final = 300.0  # of each process: caches and pools fill
MIN_SAMPLES: Final = 36  # of a process, past its warm-up, for a slope to mean something: three minutes


class Memory:
    """Samples of each process, and the slope of those that lived long enough."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # process id -> the name under which it was first seen
        self._samples: dict[int, list[tuple[float, float]]] = defaultdict(list)  # (s since the first, MiB)
        self._begin_s = time.perf_counter()

    async def run(self, world: World) -> None:
        """Sample until cancelled."""
        while True:
            await self.sample(world)
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def sample(self, world: World) -> None:
        """Note the size of each process that is known."""
        now_s = time.perf_counter() - self._begin_s
        for name, pid in (await world.pids()).items():
            size_mib = resident_mib(pid)
            if size_mib is not None:
                self._names.setdefault(pid, name)
                self._samples[pid].append((round(now_s, 1), round(size_mib, 2)))

    def slopes(self) -> dict[str, float]:
        """Name -> MiB a minute, by least squares; the steepest, where several processes had the name."""
        slopes: dict[str, float] = {}
        for pid, samples in self._samples.items():
            warm = [(at_s, mib) for at_s, mib in samples if at_s - samples[0][0] >= WARM_UP_S]
            if len(warm) >= MIN_SAMPLES:
                slope, _ = statistics.linear_regression(*zip(*warm, strict=True))
                name = self._names[pid]
                slopes[name] = max(60 * slope, slopes.get(name, -math.inf))
        return dict(sorted(slopes.items()))

    def curves(self) -> list[dict[str, object]]:
        """Each process with a sample a minute: seconds since the load began, and MiB."""
        every = round(60 / SAMPLE_EVERY_S)
        return [
            {"process": name, "rss_mib": self._samples[pid][::every]} for pid, name in self._names.items()
        ]

    def steepest(self) -> str:
        """The process that grows fastest, in words."""
        slopes = self.slopes()
        if not slopes:
            return "not known yet"
        name = max(slopes, key=lambda each: slopes[each])
        return f"{name} {slopes[name]:+.2f} MiB/min"
