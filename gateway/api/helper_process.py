"""The common part of a gateway's helper processes: frames on their pipes, and a low priority.

A frame is a length of four bytes, big endian, and a message in msgpack.
"""

import contextlib
import os
import sys
from typing import Final

import msgspec

LENGTH_BYTES: Final = 4
NICENESS: Final = 10  # of a helper


def frame(message: msgspec.Struct) -> bytes:
    """Return the message as a frame."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def lower_priority() -> None:
    """Give the gateway precedence. On Linux, SCHED_BATCH also keeps a waking helper from preempting it."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
