"""Descriptors and garbage collection of processes; pipes and priority of their helpers.

A process without a free descriptor accepts no new connection, also of operators. Every process raises its
soft limit to the hard limit at its start; a gateway accepts no more connections than the limit allows.

A frame on a helper's pipe is a length of four bytes, big endian, and a message in msgpack.
"""

import contextlib
import gc
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

OWN_DESCRIPTORS: Final = 64  # for links to routers and workers, helper processes, files
MAX_BACKLOG: Final = 1024
BACKLOG_SHARE: Final = 8  # one in so many descriptors may be a connection that is not accepted yet
WANTED: Final = 2**20  # no more is requested: some systems call 2**63 their limit
LENGTH_BYTES: Final = 4  # of a frame's length
NICENESS: Final = 10  # of a helper
LOOKS_PER_FULL: Final = 200  # collections of the middle generation before a full one; Python's default is 10


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open descriptors to the hard one; returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return WANTED if soft == resource.RLIM_INFINITY else soft


def backlog_within(limit: int) -> int:
    """Return how many connections the kernel may keep until a process with that limit accepts them."""
    return max(1, min(MAX_BACKLOG, limit // BACKLOG_SHARE))


def connections_within(limit: int) -> int:
    """Return how many client connections a process with that limit may have beside its open descriptors."""
    num_open = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else OWN_DESCRIPTORS
    return max(1, limit - num_open - OWN_DESCRIPTORS - backlog_within(limit))


def frame(message: msgspec.Struct) -> bytes:
    """Return the message as a frame."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def lower_priority() -> None:
    """Give the parent precedence. On Linux, SCHED_BATCH also keeps a waking helper from preempting it."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextlib.contextmanager
def frozen_imports() -> Iterator[None]:
    """Pause garbage collection during imports, then exempt the many lasting objects that they made."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


_thresholds_before: list[tuple[int, int, int]] = []  # one entry for each `freeze_gc` that is active


@contextlib.contextmanager
def freeze_gc() -> Iterator[None]:
    """Exempt the present objects from garbage collection, and make full collections rare.

    Enter it when everything is loaded. A full collection walks over all living objects while every request
    waits: 0.2 s in a gateway with a thousand waiting requests. Young objects are collected as often as ever.
    The setting is one for the process: of several overlapping uses the last to leave ends it.
    """
    _thresholds_before.append(_thresholds_before[0] if _thresholds_before else gc.get_threshold())
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_thresholds_before[0][:2], LOOKS_PER_FULL)
    try:
        yield
    finally:
        thresholds = _thresholds_before.pop()
        if not _thresholds_before:
            gc.set_threshold(*thresholds)
            gc.unfreeze()
