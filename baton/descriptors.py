"""Limits of open descriptors for the processes of a cluster.

A process without a free descriptor takes no new connection, also of operators. Every process raises its soft
limit to the hard limit at its start; a gateway accepts no more connections than the limit allows.
"""

import os
import resource
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
