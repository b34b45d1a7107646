"""One process of the cluster as a Ray actor; imported by Ray's workers, on any node.

Ray places it, starts it and notices its death. What it serves and to whom it talks is not Ray's: requests,
tokens and pages go over Baton's own connections.
"""

import os
import socket
import threading
import time

import msgspec
import ray

from baton.cluster.logs import set_up_logging
from baton.cluster.process import ORPHANED, ring_of, run
from baton.cluster.process_spec import Assignment, Loading, ProcessFailed, ProcessStarted, Report
from baton.cluster.runtimes.base import started_at, wait_for_end
from baton.config.environment import set_node_name
from baton.errors import BatonError
from baton.rpc.auth import Generations

# `serve` waits for the end in one thread, `report` for the start in another; the rest is heard meanwhile.
NUM_THREADS = 4


class RayProcess:
    """`serve` is called once, first."""

    def __init__(self, assignment: bytes, *, is_alone: bool, parent: tuple[int, int] | None) -> None:
        """is_alone: the whole cluster is on this machine, so nothing listens on other than loopback.

        parent: process of this machine that this one ends with, and its start (`started_at`). Without Ray's
        head nobody else would end what a killed `serve` has left, which would keep its port.
        """
        given = msgspec.json.decode(assignment, type=Assignment)
        self._given = given if is_alone else _on_this_node(given)
        self._ring = ring_of(given)
        self._stop = threading.Event()
        self._has_reported = threading.Event()
        self._report: Report | None = None
        self._loading: Loading | None = None
        set_node_name(f"{socket.gethostname()}/{_node_id()}")
        self._alive_s: float | None = None
        if parent is not None and started_at(parent[0]) == parent[1]:  # else it is not to be seen from here
            threading.Thread(target=_end_with, args=parent, name="parent", daemon=True).start()
        set_up_logging(given.name, format=given.log_format, force=True)

    def serve(self) -> None:
        """Returns when it was asked to stop, and has. Raises nothing but for our bugs."""
        try:
            run(
                self._given,
                self._ring,
                ready=lambda address: self._tell(ProcessStarted(address)),
                stop=self._stop,
                progress=self._keep_loading,
                alive=self._keep_alive,
            )
        except BatonError as error:
            if self._report is not None:
                raise
            self._tell(ProcessFailed.of(error))
        except BaseException as error:
            self._tell(ProcessFailed.of(error))
            raise

    def report(self) -> bytes:
        """Waits until the process serves, or has failed to: a Report."""
        self._has_reported.wait()
        return msgspec.json.encode(self._report)

    def loading(self) -> bytes:
        """What has been read so far: Loading | None."""
        return msgspec.json.encode(self._loading)

    def place(self) -> tuple[int, str]:
        """This process's id, and that of its node."""
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def silent_s(self) -> float:
        """Seconds since the event loop ran; 0 before it serves."""
        return 0.0 if self._alive_s is None else time.monotonic() - self._alive_s

    def use_keys(self, generations: bytes) -> None:
        """Replace the keys: Generations."""
        self._ring.replace(msgspec.json.decode(generations, type=Generations))

    def stop(self) -> None:
        self._stop.set()

    def _keep_loading(self, num_bytes: int, total_bytes: int) -> None:
        self._loading = Loading(num_bytes, total_bytes)

    def _keep_alive(self) -> None:
        self._alive_s = time.monotonic()

    def _tell(self, report: Report) -> None:
        if self._report is None:
            self._report = report
            self._has_reported.set()


def _node_id() -> str:
    """Return the first characters of Ray's id of this node: several nodes may share a machine."""
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id[:8]


def _end_with(pid: int, started: int) -> None:
    wait_for_end(pid, started)
    os._exit(ORPHANED)


def _on_this_node(given: Assignment) -> Assignment:
    """Told to listen on "", it listens on the address by which Ray's other nodes know this one."""
    config = msgspec.json.decode(given.config)
    if config.get("host") != "":
        return given
    config["host"] = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return msgspec.structs.replace(given, config=msgspec.Raw(msgspec.json.encode(config)))
