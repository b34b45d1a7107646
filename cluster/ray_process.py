"""One process of the cluster as a Ray actor; imported by Ray's workers, on any node.

Ray places it, starts it and notices its death. What it serves and to whom it talks is not Ray's: requests,
tokens and pages go over Baton's own connections.
"""

import logging
import socket
import threading

import msgspec
import ray

from baton.cluster.process import LOG_FORMAT, run
from baton.cluster.process_spec import Assignment, Failed, Loading, Report, Started
from baton.config import log_level, set_node_name
from baton.errors import BatonError

# `serve` waits for the end in one thread, `report` for the start in another; the rest is heard meanwhile.
NUM_THREADS = 4


class RayProcess:
    """`serve` is called once, first."""

    def __init__(self, assignment: bytes, *, is_alone: bool) -> None:
        """is_alone: the whole cluster is on this machine, so nothing listens on other than loopback."""
        given = msgspec.json.decode(assignment, type=Assignment)
        self._given = given if is_alone else _on_this_node(given)
        self._stop = threading.Event()
        self._has_reported = threading.Event()
        self._report: Report | None = None
        self._loading: Loading | None = None
        set_node_name(f"{socket.gethostname()}/{_node_id()}")
        logging.basicConfig(level=log_level(), format=f"{given.name} | {LOG_FORMAT}", force=True)

    def serve(self) -> None:
        """Returns when it was asked to stop, and has. Raises nothing but for our bugs."""
        try:
            run(self._given, lambda address: self._tell(Started(address)), self._stop, self._keep_loading)
        except BatonError as error:
            if self._report is not None:
                raise
            self._tell(Failed(str(error), is_users_error=isinstance(error, ValueError)))
        except BaseException as error:
            self._tell(Failed(f"{type(error).__name__}: {error}", is_users_error=False))
            raise

    def report(self) -> bytes:
        """Waits until the process serves, or has failed to: a Report."""
        self._has_reported.wait()
        return msgspec.json.encode(self._report)

    def loading(self) -> bytes:
        """What has been read so far: Loading | None."""
        return msgspec.json.encode(self._loading)

    def stop(self) -> None:
        self._stop.set()

    def _keep_loading(self, num_bytes: int, total_bytes: int) -> None:
        self._loading = Loading(num_bytes, total_bytes)

    def _tell(self, report: Report) -> None:
        if self._report is None:
            self._report = report
            self._has_reported.set()


def _node_id() -> str:
    """Return the first characters of Ray's id of this node: several nodes may share a machine."""
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id[:8]


def _on_this_node(given: Assignment) -> Assignment:
    """Told to listen on "", it listens on the address by which Ray's other nodes know this one."""
    config = msgspec.json.decode(given.config)
    if config.get("host") != "":
        return given
    config["host"] = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return msgspec.structs.replace(given, config=msgspec.Raw(msgspec.json.encode(config)))
