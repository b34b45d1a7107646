"""Work that uses only what nobody else wants of the cores: others lose no time to it, but for what two busy
cores of one machine cost each other.

python -m baton.bench.idle_load    until its input ends
"""

import asyncio
import os
import select
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

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
    command = (sys.executable, "-m", "baton.bench.idle_load")
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
