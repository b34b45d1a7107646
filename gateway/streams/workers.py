"""A gateway's connections to workers, and a record of the connections that have ended."""

import math
from typing import Final, NamedTuple

from baton.clock import Clock
from baton.rpc.peers import Peer, PeerRegistry

MAX_REMEMBERED: Final = 4096  # workers that are gone
SILENT_BEFORE_S: Final = 1.0  # of silence; more than between two pings


class _LostWorker(NamedTuple):
    node: str
    left_s: float  # when its connection ended
    heard_s: float  # when bytes last came, a ping or more


class WorkerConnections:
    """The gateway's connections to workers, and those that have ended."""

    def __init__(self, peer_registry: PeerRegistry, clock: Clock) -> None:
        self._peer_registry = peer_registry
        self._clock = clock
        self._lost: dict[str, _LostWorker] = {}  # by id, the earliest first

    def has(self, worker: str) -> bool:
        """Return whether the worker is connected."""
        return self._peer_registry.peer(worker) is not None

    def lose(self, peer: Peer) -> None:
        """Record the end of a worker's connection."""
        now_s, worker = self._clock.now_s(), peer.hello.worker
        self._lost.pop(peer.hello.id, None)
        self._lost[peer.hello.id] = _LostWorker(
            worker.node if worker is not None else "", now_s, heard_s=now_s - peer.quiet_s
        )
        if len(self._lost) > MAX_REMEMBERED:
            del self._lost[next(iter(self._lost))]

    def left_s(self, worker: str) -> float:
        """Return when the worker's connection last ended; -inf when it never did."""
        lost = self._lost.get(worker)
        return -math.inf if lost is None else lost.left_s

    def was_silent(self, worker: str, assigned_s: float) -> bool:
        """Return whether the worker stood still before it was given an attempt.

        assigned_s: when this gateway heard of that; a worker that is gone had the attempt before it left.
        """
        if not self.has(worker) and worker in self._lost:
            assigned_s = min(assigned_s, self._lost[worker].left_s)
        return self._heard_s(worker) < assigned_s - SILENT_BEFORE_S

    def _heard_s(self, worker: str) -> float:
        now_s, peer, lost = self._clock.now_s(), self._peer_registry.peer(worker), self._lost.get(worker)
        if peer is not None:
            return now_s - peer.quiet_s
        return now_s if lost is None else lost.heard_s

    def lost_node(self, worker: str) -> str:
        """Return the node of a lost worker when all workers there are gone and others are not; else ""."""
        lost = self._lost.get(worker)
        if lost is None or not lost.node or self.has(worker):
            return ""
        workers = self._peer_registry.members
        live_nodes = {workers[id_].node for id_ in self._peer_registry.connected()}
        return lost.node if live_nodes and lost.node not in live_nodes else ""
