"""Limits of open descriptors for the processes of a cluster.

A process without a free descriptor takes no new connection, also of operators. Every process raises its soft
limit to the hard limit at its start; a gateway accepts no more connections than the limit allows.
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
BACKLOG_SHARE: Final = 8  # of the limit: so many may be accepted before the first of them is looked at
WANTED: Final = 2**20  # more is not asked for: some systems call 2**63 their limit


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open descriptors to the hard one; returns what holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return WANTED if soft == resource.RLIM_INFINITY else soft


def backlog_within(limit: int) -> int:
    """Connections that the kernel may keep for a process with that limit until they are accepted."""
    return max(1, min(MAX_BACKLOG, limit // BACKLOG_SHARE))


def connections_within(limit: int) -> int:
    """Connections of clients that a process with that limit may have, beside what it has open already."""
    num_open = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else OWN_DESCRIPTORS
    return max(1, limit - num_open - OWN_DESCRIPTORS - backlog_within(limit))


# When Python looks for rings of garbage, in a process that serves.
#
# A full look walks over all that lives, and everybody waits meanwhile: 0.2 s in a gateway where a thousand
# requests wait. Nothing here makes rings on purpose, so full looks are rare; the young are looked at as often
# as ever, and most rings are found there. A ring that has become old waits for a million objects more.

LOOKS_PER_FULL: Final = 200  # at the middle generation; Python's own number is 10
_inside: list[tuple[int, int, int]] = []  # of each that is inside, the thresholds when the first came


@contextmanager
def freeze_gc() -> Iterator[None]:
    """To be entered when all is loaded: what is there by now stays, and is not looked at again.

    It is one for the process: of several that overlap the last to leave ends it.
    """
    _inside.append(_inside[0] if _inside else gc.get_threshold())
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_inside[0][:2], LOOKS_PER_FULL)
    try:
        yield
    finally:
        thresholds = _inside.pop()
        if not _inside:
            gc.set_threshold(*thresholds)
            gc.unfreeze()
