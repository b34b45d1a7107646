"""How the memory of a cluster's processes grows: resident set sizes, process by process and life by life."""

import asyncio
import time
from collections import defaultdict
from typing import Final

from baton.bench.soak_world import World, resident_mib

SAMPLE_EVERY_S: Final = 5.0
WARM_UP_S: Final = 60.0  # of each life: caches and pools fill
MIN_SAMPLES: Final = 12  # of a name, in all its lives, for a slope to mean something


class Memory:
    def __init__(self) -> None:
        self._began_s: dict[tuple[str, int], float] = {}  # (name, pid) -> when it was first seen
        self._samples: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)  # (s, MiB)

    async def run(self, world: World) -> None:
        while True:
            await self.sample(world)
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def sample(self, world: World) -> None:
        """Note the size of each process that is known, if it is past its warm-up."""
        now_s = time.perf_counter()
        for name, pid in (await world.pids()).items():
            began_s = self._began_s.setdefault((name, pid), now_s)
            size_mib = resident_mib(pid)
            if size_mib is not None and now_s - began_s >= WARM_UP_S:
                self._samples[name, pid].append((now_s, size_mib))

    def slopes(self) -> dict[str, float]:
        """Name -> MiB a minute: least squares, each life with an offset of its own."""
        products, squares, numbers = (defaultdict[str, float](float) for _ in range(3))
        for (name, _), samples in self._samples.items():
            mean_s = sum(at_s for at_s, _ in samples) / len(samples)
            mean_mib = sum(mib for _, mib in samples) / len(samples)
            products[name] += sum((at_s - mean_s) * (mib - mean_mib) for at_s, mib in samples)
            squares[name] += sum((at_s - mean_s) ** 2 for at_s, _ in samples)
            numbers[name] += len(samples)
        return {
            name: 60 * products[name] / squares[name]
            for name in sorted(products)
            if numbers[name] >= MIN_SAMPLES and squares[name] > 0
        }

    def steepest(self) -> str:
        slopes = self.slopes()
        if not slopes:
            return "not known yet"
        name = max(slopes, key=lambda each: slopes[each])
        return f"{name} {slopes[name]:+.2f} MiB/min"
