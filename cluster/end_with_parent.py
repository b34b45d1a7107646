"""Run a program that the kernel kills when its parent ends; Linux only.

    python end_with_parent.py PID PROGRAM ARGUMENT ...

PID: of the parent. The program replaces this process and keeps its id. The script imports nothing of Baton,
so it starts within a few milliseconds. The kernel takes the end of the thread that starts the script for the
parent's end.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, which outlasts exec


def ending_with_this_process(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command that runs this one and ends with the present process. command: begins with a path."""
    return sys.executable, "-I", "-S", __file__, str(os.getpid()), *command


def main() -> None:
    """Request the signal at the parent's end, then become the program."""
    parent, program, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # the parent died before the signal was requested
        sys.exit(1)
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main()
