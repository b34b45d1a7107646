"""Cores that processes share: the kernel's count of waiting, and work of the idle class."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from baton.bench.tenants.real import CoreTimes, busy_cores

BUSY = "while True: pass"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"


def test_stretch_is_the_time_waited_beside_the_time_run() -> None:
    assert CoreTimes(5.0, 1.0).stretch_since(CoreTimes(3.0, 0.5)) == 1.25
    assert CoreTimes(0.0, 0.0).stretch_since(CoreTimes(0.0, 0.0)) == 1.0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinities here")
def test_two_processes_on_one_core_take_twice_as_long_descendants_included() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        processes = [subprocess.Popen([sys.executable, "-c", code]) for code in (BUSY, PARENT)]
    finally:
        os.sched_setaffinity(0, cores)
    try:
        deadline = time.monotonic() + 30.0
        while CoreTimes.of(processes[1].pid).ran_s < 0.5:
            assert time.monotonic() < deadline, "the child of a child is not seen"
            time.sleep(0.1)
        before = [CoreTimes.of(each.pid) for each in processes]
        time.sleep(1.5)
        after = [CoreTimes.of(each.pid) for each in processes]
    finally:
        for each in processes:
            for child in psutil.Process(each.pid).children():
                child.kill()
            each.kill()
            each.wait()
    assert all(now.stretch_since(then) > 1.5 for now, then in zip(after, before, strict=True))
    assert CoreTimes.of(processes[0].pid) == CoreTimes(0.0, 0.0)


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has the idle class")
def test_busy_cores_run_in_the_idle_class_and_end() -> None:
    with busy_cores() as pids:
        assert [os.sched_getscheduler(pid) for pid in pids] == [os.SCHED_IDLE] * (os.cpu_count() or 1)
    assert not any(map(psutil.pid_exists, pids))
