import signal
import subprocess
import sys

import psutil

from baton.cluster.process_tree import descendants, kill_tree

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
        parent.send_signal(signal.SIGSTOP)
        kill_tree(parent.pid)
        assert parent.wait(10) == -signal.SIGKILL
        _, alive = psutil.wait_procs([child], timeout=10)
        assert alive == [] or alive[0].status() == psutil.STATUS_ZOMBIE
    kill_tree(parent.pid)  # it has ended: no error
