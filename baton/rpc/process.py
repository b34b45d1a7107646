"""Limits of open descriptors and of garbage collection in the processes of a cluster.

A process without a free descriptor accepts no new connection, also of operators. Every process raises its
soft limit to the hard limit at its start; a gateway accepts no more connections than the limit allows.
"""

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

OWN_DESCRIPTORS: Final = 64  # for links to routers and workers, helper processes, files
MAX_BACKLOG: Final = 1024
BACKLOG_SHARE: Final = 8  # one in so many descriptors may be a connection that is not accepted yet
WANTED: Final = 2**20  # no more is requested: some systems call 2**63 their limit
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


_thresholds_before: list[tuple[int, int, int]] = []  # one entry for each `freeze_gc` that is active


@contextmanager
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
