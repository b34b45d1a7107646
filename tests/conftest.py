"""Property tests run without a clock: on a loaded machine a slow example is no failure.

And an interrupt is one in tests that a shell has started in the background too, where it has everybody ignore
them.

Mooncake and UCX, which NIXL uses, keep to loopback. UCX leaves its modules for RDMA alone: those of NIXL's
wheel end a process with a segmentation fault when the system has the same libraries.
"""

import os
import signal

from hypothesis import settings

settings.register_profile("baton", deadline=None, derandomize=True)
settings.load_profile("baton")
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("UCX_TLS", "tcp")
os.environ.setdefault("UCX_NET_DEVICES", "lo")
os.environ.setdefault("UCX_MODULES", "tcp,sm,cma")
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
os.environ.setdefault("MC_FORCE_TCP", "1")
os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")
