"""One process of the cluster as a Ray actor. Ray's workers import this module on every node.

Ray places the actor, starts it and notices its death. Requests, tokens and pages use Baton's own connections.
"""

import os
import socket
import threading
import time

import msgspec
import ray

from baton.cluster.logs import set_up_logging
from baton.cluster.process import run
from baton.cluster.rank_host import RankHost
from baton.cluster.runtimes.base import (
    ActorPlace,
    Assignment,
    Loading,
    LoopAlive,
    ProcessFailed,
    ProcessMessage,
    Report,
    started_at,
    wait_for_end,
)
from baton.config.cluster import WorkerConfig
from baton.config.environment import set_node_name
from baton.errors import ORPHANED, BatonError
from baton.messages.workers import HostPlace
from baton.rpc.auth import Generations, KeyRing

# `serve` blocks one thread, `report` another; the other calls run meanwhile.
NUM_THREADS = 4


class NodeActor:
    """An actor with the keys of a process of the cluster, on one node of Ray."""

    def __init__(self, given: Assignment) -> None:
        self._given = given
        self._ring = KeyRing(given.kind, given.generations)
        node_id: str = ray.get_runtime_context().get_node_id()  # several nodes may share a machine
        set_node_name(f"{socket.gethostname()}/{node_id[:8]}")

    def place(self) -> ActorPlace:
        """Return the process and its node."""
        pid = os.getpid()
        return ActorPlace(pid, started_at(pid), ray.get_runtime_context().get_node_id())

    def use_keys(self, generations: bytes) -> None:
        """Replace the process's keys. generations: Generations, as JSON."""
        self._ring.replace(msgspec.json.decode(generations, type=Generations))


class ProcessActor(NodeActor):
    """A Ray actor that runs one process of the cluster. Call `serve` once, first."""

    def __init__(self, assignment: bytes, *, is_alone: bool, parent: tuple[int, int] | None) -> None:
        """is_alone: the whole cluster is on this machine, and processes listen on loopback only.

        parent: the id and the start (`started_at`) of a process of this machine. The actor ends when the
        parent ends: while Ray's head is away, no other process ends the actors of a killed `baton serve`.
        """
        given = msgspec.json.decode(assignment, type=Assignment)
        super().__init__(given if is_alone else _on_this_node(given))
        self._stop = threading.Event()
        self._has_reported = threading.Event()
        self._report: Report | None = None
        self._loading: Loading | None = None
        self._alive_s: float | None = None
        if parent is not None and started_at(parent[0]) == parent[1]:  # or the parent is on another machine
            threading.Thread(target=_end_with, args=parent, name="parent", daemon=True).start()
        set_up_logging(given.name, format=given.log_format, force=True)

    def serve(self, *rank_hosts: HostPlace) -> None:
        """Serve until `stop` is called. Raises BatonError only after the process has served.

        rank_hosts: the places of a worker's RankHostActors, in the order of its nodes.
        """
        try:
            run(self._given, self._ring, self._stop, self._tell, rank_hosts)
        except BatonError as error:
            if self._report is not None:
                raise
            self._tell(ProcessFailed.of(error))
        except BaseException as error:
            self._tell(ProcessFailed.of(error))
            raise

    def report(self) -> Report:
        """Wait until the process serves or has failed."""
        self._has_reported.wait()
        assert self._report is not None
        return self._report

    def loading(self) -> Loading | None:
        """Return the progress of loading weights; None: unknown."""
        return self._loading

    def silent_s(self) -> float:
        """Return the seconds since the event loop last ran; 0 before the process serves."""
        return 0.0 if self._alive_s is None else time.monotonic() - self._alive_s

    def stop(self) -> None:
        """Let the process drain and end."""
        self._stop.set()

    def _tell(self, message: ProcessMessage) -> None:
        match message:
            case Loading():
                self._loading = message
            case LoopAlive():
                self._alive_s = time.monotonic()
            case _ if self._report is None:
                self._report = message
                self._has_reported.set()


class RankHostActor(NodeActor):
    """A Ray actor that starts the ranks of a worker on one of its nodes other than rank 0's."""

    def __init__(self, assignment: bytes, node: int) -> None:
        """assignment: of the worker. node: of the worker's nodes, counted from 1."""
        super().__init__(_on_this_node(msgspec.json.decode(assignment, type=Assignment)))
        name = f"{self._given.name}-node-{node}"
        set_up_logging(name, format=self._given.log_format, force=True)
        config = msgspec.json.decode(self._given.config, type=WorkerConfig)
        self._host = RankHost(config, node, self._ring)

    def host_place(self) -> HostPlace:
        """Return where the host listens."""
        return self._host.place

    def serve(self) -> None:
        """Serve until the actor is killed. Raises WorkerLost when a rank ends with an error."""
        self._host.serve()


def _end_with(pid: int, started: int) -> None:
    wait_for_end(pid, started)
    os._exit(ORPHANED)


def _on_this_node(given: Assignment) -> Assignment:
    """Replace the host "" by the address at which Ray's other nodes reach this node."""
    config = msgspec.json.decode(given.config)
    if config.get("host") != "":
        return given
    config["host"] = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return msgspec.structs.replace(given, config=msgspec.Raw(msgspec.json.encode(config)))
