import asyncio
import os

import psutil
import pytest

from baton.bench.tenants.idle_load import busy_cores


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has such a class")
def test_it_takes_what_is_idle_on_every_core_and_ends() -> None:
    async def run() -> list[psutil.Process]:
        async with busy_cores():
            children = psutil.Process().children()
            found = [each for each in children if "baton.bench.tenants.idle_load" in each.cmdline()]
            assert [os.sched_getscheduler(each.pid) for each in found] == [os.SCHED_IDLE] * (
                os.cpu_count() or 1
            )
        return found

    assert not any(each.is_running() for each in asyncio.run(run()))
