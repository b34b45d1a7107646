"""Property tests run without a clock: on a loaded machine a slow example is no failure.

And an interrupt is one in tests that a shell has started in the background too, where it has everybody ignore
them.

Mooncake and UCX, which NIXL uses, keep to loopback. UCX leaves its modules for RDMA alone: those of NIXL's
wheel end a process with a segmentation fault when the system has the same libraries.
"""

import os
import signal

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.shared_clusters import group_of

settings.register_profile("baton", deadline=None, derandomize=True)
settings.load_profile("baton")
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("UCX_TLS", "tcp")
os.environ.setdefault("UCX_NET_DEVICES", "lo")
os.environ.setdefault("UCX_MODULES", "tcp,sm,cma")
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
os.environ.setdefault("MC_FORCE_TCP", "1")
os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")


class GroupScheduling(LoadFileScheduling):  # type: ignore[misc]  # it has no annotations
    """`--dist loadfile`, with files that share a cluster on one process."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling | None:
    """Return the scheduler of `--dist loadfile`; None leaves other modes alone."""
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadfile" else None
