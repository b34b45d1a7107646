"""Work that uses only what nobody else wants of the cores: others lose no time to it, but for what two busy
cores of one machine cost each other.

python -m baton.bench.tenants.idle_load    until its input ends
"""

import asyncio
import os
import select
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

import torch

ROWS, WIDTH, OUTER = 256, 512, 2048  # as a step of a small model multiplies
STOP_S: Final = 5.0


@asynccontextmanager
async def busy_cores() -> AsyncIterator[None]:
    """As many of these as there are cores."""
    async with AsyncExitStack() as ends:
        for _ in range(os.cpu_count() or 1):
            await ends.enter_async_context(_one())
        yield


@asynccontextmanager
async def _one() -> AsyncIterator[None]:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "baton.bench.tenants.idle_load")
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    try:
        await process.stdout.readline()
        yield
    finally:
        try:
            async with asyncio.timeout(STOP_S):
                await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()


def main() -> None:
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)
    torch.set_num_threads(1)
    rows = torch.ones(ROWS, WIDTH, dtype=torch.bfloat16)
    weight = torch.ones(WIDTH, OUTER, dtype=torch.bfloat16)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], 0)[0]:
        rows @ weight


if __name__ == "__main__":
    main()

# How long a process and its descendants run, and wait for a core to run on, by the kernel's count (Linux).
#
# Where processes share few cores, all that one of them does takes that much longer when the others are busy,
# whatever comes first among what it has to do.


class CoreTimes(NamedTuple):
    """Seconds, of all threads that live, since each began."""

    ran_s: float
    waited_s: float

    def stretch_since(self, before: "CoreTimes") -> float:
        """How many times longer things took than they would have on a core of their own. 1.0: not known."""
        ran_s, waited_s = self.ran_s - before.ran_s, self.waited_s - before.waited_s
        return 1.0 + waited_s / ran_s if ran_s > 0.0 else 1.0


def core_times(pid: int) -> CoreTimes:
    """Nothing of a process that is gone, and elsewhere than on Linux."""
    ran_s = waited_s = 0.0
    pids = [pid]
    while pids:
        tasks = Path(f"/proc/{pids.pop()}/task")
        for task in tasks.iterdir() if tasks.exists() else ():
            try:
                ran_ns, waited_ns, _ = map(int, (task / "schedstat").read_text().split())
                pids += map(int, (task / "children").read_text().split())
            except (OSError, ValueError):  # it has just ended, or this kernel does not count
                continue
            ran_s += ran_ns / 1e9
            waited_s += waited_ns / 1e9
    return CoreTimes(ran_s, waited_s)
