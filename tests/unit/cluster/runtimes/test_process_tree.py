import signal
import subprocess
import sys
import threading

import psutil

from baton.cluster.runtimes.base import descendants, kill_tree, started_at, wait_for_end

# A child in a process group of its own, and its child, as a worker and its ranks.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
print(child.pid, flush=True)
child.wait()
"""


def test_kill_tree_ends_stopped_descendants_in_groups_of_their_own() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert descendants(parent.pid) == [child.pid]
        child.suspend()
        started = started_at(parent.pid)
        kill_tree(parent.pid, started - 1)  # an earlier process of its id
        assert parent.poll() is None
        parent.send_signal(signal.SIGSTOP)
        kill_tree(parent.pid, started)
        assert parent.wait(10) == -signal.SIGKILL
        _, alive = psutil.wait_procs([child], timeout=10)
        assert alive == [] or alive[0].status() == psutil.STATUS_ZOMBIE
    kill_tree(parent.pid, started)  # it has ended: no error


def test_wait_for_end_returns_when_that_process_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = started_at(process.pid)
        wait_for_end(process.pid, started - 1)  # an earlier process of its id: gone already
        waiting = threading.Thread(target=wait_for_end, args=(process.pid, started))
        waiting.start()
        assert waiting.is_alive()
        process.communicate(b"\n", timeout=30)
        waiting.join(10)
        assert not waiting.is_alive()
        assert started_at(process.pid) == 0
