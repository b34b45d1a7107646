"""Run a program that ends when whoever started it does, however that ends: Linux alone.

    python end_with_parent.py PID PROGRAM ARGUMENT ...

PID: of the parent. The program takes this process's place, with its id. It imports nothing of Baton, so that
it takes a few milliseconds.
"""

import ctypes
import os
import signal
import sys

SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, which outlasts exec


def main() -> None:
    parent, program, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it has died before it was asked for its signal
        sys.exit(1)
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main()
