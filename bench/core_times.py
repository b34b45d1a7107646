"""How long a process and its descendants run, and wait for a core to run on, by the kernel's count (Linux).

Where processes share few cores, all that one of them does takes that much longer when the others are busy,
whatever comes first among what it has to do.
"""

from pathlib import Path
from typing import NamedTuple


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
