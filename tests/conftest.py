"""Property tests run without a clock: on a loaded machine a slow example is no failure.

Ctrl-C also ends tests that a shell runs in the background: such a shell makes its children ignore SIGINT.

Mooncake and UCX, which NIXL uses, keep to loopback. UCX leaves its modules for RDMA alone: those of NIXL's
wheel end a process with a segmentation fault when the system has the same libraries.
"""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Final

import httpcore2
import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from baton.rpc import process
from baton.rpc.process import freeze_gc
from tests.groups import TRANSFORMERS, group_of

settings.register_profile("baton", deadline=None, derandomize=True)
settings.load_profile("baton")
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("UCX_TLS", "tcp")
os.environ.setdefault("UCX_NET_DEVICES", "lo")
os.environ.setdefault("UCX_MODULES", "tcp,sm,cma")
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
os.environ.setdefault("MC_FORCE_TCP", "1")
os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")

THREADS_END_S: Final = 5.0


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt what the imports make from garbage collection: it would be a third of the time to collect."""
    with process.frozen_imports():
        return (yield)


def pytest_unconfigure() -> None:
    """Give the imports back to the garbage collector: Triton's bindings report all that it leaves at exit."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the group that takes longest at the end of the list: GroupScheduling starts it first."""
    items.sort(key=lambda item: group_of(item.nodeid) == TRANSFORMERS)


@pytest.fixture
def real_freeze_gc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests of garbage collection. At first nothing is exempt from it."""
    monkeypatch.setattr(process, "freeze_gc", freeze_gc)
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _imports_stay_frozen() -> Iterator[None]:
    """Make `freeze_gc` do nothing in this process: at its end, collections would take in what pytest made.

    Each would take half a second. Processes that tests start have the real one.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(process, "freeze_gc", nullcontext)
        yield


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """Give all HTTP clients one TLS context: reading the certificates takes 50 ms of a core each time."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(httpcore2, "default_ssl_context", cache(httpcore2.default_ssl_context))
        yield


def _is_ours(thread: threading.Thread) -> bool:
    """Return whether Baton has started this thread, which runs; libraries keep pools of theirs."""
    target = getattr(thread, "_target", None)
    module = getattr(target, "__module__", None) or type(thread).__module__
    return thread.is_alive() and module.startswith("baton.")


@pytest.fixture(scope="module", autouse=True)
def _no_thread_outlives_its_file() -> Iterator[None]:
    """Fail the last test of a file whose threads run on: they would use what later tests patch."""
    before = set(threading.enumerate())
    yield
    deadline_s = time.monotonic() + THREADS_END_S
    while left := [each for each in threading.enumerate() if each not in before and _is_ours(each)]:
        if time.monotonic() > deadline_s:
            pytest.fail(f"threads outlive the tests of this file: {', '.join(each.name for each in left)}")
        time.sleep(0.005)


@pytest.fixture(scope="module", autouse=True)
def _torch_gets_no_threads() -> Iterator[None]:
    """Fail the last test of a file that gives torch threads: in later tests they would spin as they wait."""
    yield
    torch, most = sys.modules.get("torch"), os.environ.get("OMP_NUM_THREADS")
    if torch and most and torch.get_num_threads() > int(most):
        pytest.fail(f"torch has {torch.get_num_threads()} threads, OMP_NUM_THREADS allows {most}")


class GroupScheduling(LoadFileScheduling):  # type: ignore[misc]  # it has no annotations
    """`--dist loadfile`, with files that share clusters or models on one process.

    The third process takes files from the end of the list, where tests compute. The files of tests/e2e and
    tests/faults, at its start, mostly wait. So the cores have work at all times.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if self.nodes.index(node) % 3 == 2 or len(self.nodes) < 3:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling | None:
    """Return the scheduler of `--dist loadfile`; None leaves other modes alone."""
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadfile" else None
