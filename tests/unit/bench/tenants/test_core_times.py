"""What the kernel says of processes that share a core."""

import os
import subprocess
import sys
import time

import pytest

from baton.bench.tenants.idle_load import CoreTimes, core_times

BUSY = "while True: pass"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"


def test_things_take_longer_by_what_they_waited() -> None:
    assert CoreTimes(5.0, 1.0).stretch_since(CoreTimes(3.0, 0.5)) == 1.25
    assert CoreTimes(0.0, 0.0).stretch_since(CoreTimes(0.0, 0.0)) == 1.0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinities here")
def test_two_that_share_a_core_take_twice_as_long_descendants_included() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        processes = [subprocess.Popen([sys.executable, "-c", code]) for code in (BUSY, PARENT)]
    finally:
        os.sched_setaffinity(0, cores)
    try:
        deadline = time.monotonic() + 30.0
        while core_times(processes[1].pid).ran_s < 0.5:
            assert time.monotonic() < deadline, "the child of a child is not seen"
            time.sleep(0.1)
        before = [core_times(each.pid) for each in processes]
        time.sleep(1.5)
        after = [core_times(each.pid) for each in processes]
    finally:
        for pid in [int(pid) for pid in children_of(processes[1].pid)]:
            os.kill(pid, 9)
        for each in processes:
            each.kill()
            each.wait()
    assert all(now.stretch_since(then) > 1.5 for now, then in zip(after, before, strict=True))
    assert core_times(processes[0].pid) == CoreTimes(0.0, 0.0)


def children_of(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()
