"""The router as a node: it knows who is alive and loaded how much, and gives every attempt its workers.

It keeps nothing that can't be rebuilt. One that has just started learns the workers from their Hello and
Beat and the gateways' view of them from Reachable, within SETTLE_S; attempts that were under way go on
meanwhile, and those that no earlier router answered are submitted anew by their gateways.
"""

import logging
from collections import Counter
from typing import Final

from baton.clock import Clock
from baton.config.router import RouterSettings
from baton.errors import ProtocolError
from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import (
    Alive,
    Ended,
    Heartbeat,
    Hello,
    KvEventBatch,
    Measured,
    Members,
    Pressure,
    Reachable,
    Started,
    Submit,
)
from baton.messages.operations import (
    Decisions,
    Drain,
    Explain,
    GatewayReport,
    HeadAway,
    RestartWorker,
    Status,
    StatusQuery,
    Undrain,
    WatchWorkers,
    WorkerRemoved,
)
from baton.messages.status import OverloadLevel
from baton.router.capacity import Capacity
from baton.router.cluster_state import ClusterState
from baton.router.dispatcher import Dispatcher, GatewayPeer
from baton.router.in_flight import InFlight
from baton.router.index.prefix_index import MAX_PAGES
from baton.router.membership import BEAT_TIMEOUT_S, Member, Membership, Readiness, Removed
from baton.router.policies.pairing import Pairing
from baton.router.queue.admission import AdmissionQueue
from baton.router.redis.messages import AnyShared
from baton.router.status import StatusReporter, fitted, worker_statuses
from baton.rpc.peers import TICK_S, Peer

SETTLE_S: Final = BEAT_TIMEOUT_S  # by then every worker that lives has found a new router

logger = logging.getLogger(__name__)


class Router:
    """See node.Node."""

    def __init__(
        self, config: RouterSettings, clock: Clock, id: str, *, max_index_pages: int = MAX_PAGES
    ) -> None:
        """id: of this life of the process, 32 hex digits. max_index_pages: the prefix index knows at most."""
        self.hello = Hello(process=Kind.ROUTER, id=id)
        self.counters: Counter[str] = Counter()
        self.in_flight = InFlight(clock)
        self.status_reporter = StatusReporter(id, self.counters, self.in_flight)
        self.members = Membership(clock)
        self._readiness = Readiness(self.members)
        self.cluster_state = ClusterState(config, clock, self.in_flight, self.counters, max_index_pages)
        self._clock = clock
        self._pairing = Pairing(config, self.members, self.cluster_state.policy, self.cluster_state.by_load)
        self._gateways: dict[str, GatewayPeer] = {}
        self._watchers: dict[Peer, float] = {}  # operators that start workers -> Ray's head is away to them
        capacity = Capacity(
            self.members, self.in_flight, decoders_compute=self.cluster_state.policy.weighs_local_prefill
        )
        self.admission_queue = AdmissionQueue(clock, self.members, capacity, self.cluster_state.model)
        self._dispatcher = Dispatcher(
            self._pairing, self.cluster_state, self.admission_queue, self._gateways, config.max_attempts
        )
        self._told = OverloadLevel.CALM
        self._start_s = clock.now_s()
        self._announced_s = self._start_s - TICK_S
        self._announced: Members | None = None

    # What its host calls.

    def joined(self, peer: Peer) -> None:
        hello = peer.hello
        if hello.process is Kind.WORKER:
            self._worker_joined(peer)
        elif hello.process is Kind.GATEWAY:
            former = self._gateways.get(hello.id)
            self._gateways[hello.id] = GatewayPeer(peer)
            if former is not None:
                self._dispatcher.gateway_left(hello.id)
                former.peer.close()
            peer.send(self._list_members())
        elif hello.process is Kind.ROUTER:
            raise ProtocolError("a router has no business with another")

    def left(self, peer: Peer) -> None:
        self._watchers.pop(peer, None)
        gateway = self._gateways.get(peer.hello.id)
        if gateway is not None and gateway.peer is peer:
            del self._gateways[peer.hello.id]
            self._dispatcher.gateway_left(peer.hello.id)
        member = self.members.get(peer.hello.id)
        if member is not None and member.peer is peer:
            self.members.remove(member)
            self._gone(member, "its connection ended")
            self._announce()

    def received(self, peer: Peer, message: AnyMessage) -> None:
        process = peer.hello.process
        if process is Kind.GATEWAY:
            self._from_gateway(peer, message)
        elif process is Kind.WORKER:
            self._from_worker(peer, message)
        elif isinstance(message, StatusQuery):
            peer.send(self.status())
        elif isinstance(message, Drain):
            self._drain(message)
            peer.send(self.status())
        elif isinstance(message, Explain):
            self._explain(peer, message)
        elif isinstance(message, WatchWorkers):
            self._watchers[peer] = 0.0
            peer.send(self._list_members())
        elif isinstance(message, HeadAway) and peer in self._watchers:
            self._watchers[peer] = message.seconds
        elif isinstance(message, Undrain | RestartWorker):
            for watcher in self._watchers:
                watcher.send(message)
            peer.send(self.status())
        else:
            raise ProtocolError(f"a {type(message).__name__} from a {process}")

    def heard(self, message: AnyShared) -> None:
        """What another router tells: it may have left room."""
        self.cluster_state.heard(message)
        if len(self.admission_queue):
            self._dispatcher.find_room()

    def tick(self) -> None:
        for removed in self.members.remove_dead():
            self._remove(removed)
        gone = [worker_id for worker_id in self.in_flight.workers() if self.members.get(worker_id) is None]
        if gone:
            self.in_flight.forget(gone)
        self.cluster_state.tick()
        self._dispatcher.tick()
        self._press()
        self._announce(is_tick=True)

    def status(self) -> Status:
        status = Status(
            workers=worker_statuses(self.members, self.in_flight, self._clock.now_s()),
            num_gateways=len(self._gateways),
            gateways=tuple(each.status for each in self._gateways.values() if each.status is not None),
            num_met=self._readiness.num_met(tuple(each.reached for each in self._gateways.values())),
            num_attempts=self.in_flight.num_own,
            num_watchers=len(self._watchers),
            head_away_s=max(self._watchers.values(), default=0.0),
            routers=(self.status_reporter.status(self.admission_queue.status()),),
        )
        return fitted(status)

    # Gateways.

    def _from_gateway(self, peer: Peer, message: AnyMessage) -> None:
        gateway = self._gateways.get(peer.hello.id)
        if gateway is None or gateway.peer is not peer:
            return  # it has connected again: this connection is being closed
        match message:
            case Submit():
                begun_s = self._clock.now_s()
                if self._dispatcher.submit(gateway, message):
                    self.status_reporter.times.add(self._clock.now_s() - begun_s)
            case Started():
                self._dispatcher.started(message.attempts)
            case Ended():
                self._dispatcher.ended(message.attempts, message.num_tokens)
            case Reachable():
                gateway.reached = frozenset(message.workers)
                self._pairing.forget()
                self._dispatcher.let_out()
            case StatusQuery():
                peer.send(self.status())
            case Explain():
                self._explain(peer, message)
            case GatewayReport():
                gateway.status = message.status
            case _:
                raise ProtocolError(f"a {type(message).__name__} from a gateway")

    def _explain(self, peer: Peer, explain: Explain) -> None:
        peer.send(Decisions(decisions=tuple(self.cluster_state.decisions.of(explain.request_id))))

    # Workers.

    def _worker_joined(self, peer: Peer) -> None:
        worker = peer.hello.worker
        if worker is None or worker.id != peer.hello.id:
            raise ProtocolError("a worker's Hello must describe it")
        former = self.members.join(worker, peer)
        logger.info("%s joined", worker.name, extra={"worker": worker.id, "role": worker.role})
        if former is not None:
            self._gone(former, f"{worker.id} has taken its place")
            former.peer.close()
        self.cluster_state.joined(worker, peer)
        if self._told > OverloadLevel.CALM:
            peer.send(Pressure(level=self._told))
        # The newcomer gets the list even where it is not news to the others.
        self._announced = None
        self._announce()

    def _from_worker(self, peer: Peer, message: AnyMessage) -> None:
        member = self.members.get(peer.hello.id)
        if member is None or member.peer is not peer:
            return  # it has been given up: this connection is being closed
        match message:
            case Heartbeat():
                self.members.beat(member, message)
                self._dispatcher.ended(self.in_flight.beat(member.worker, message))
            case Alive():
                self.members.hear(member, message)
            case Reachable():
                self.members.reach(member, message.workers)
                self._dispatcher.let_out()
            case KvEventBatch():
                self.cluster_state.pages(peer, message)
            case Measured():
                self.cluster_state.measured(member.id, message)
                self.admission_queue.computed(message.prefills)
            case _:
                raise ProtocolError(f"a {type(message).__name__} from a worker")

    def _remove(self, removed: Removed) -> None:
        """Give up a worker that has left `members` for its silence or its step; report it to operators."""
        member, reason, is_hung = removed
        self._gone(member, reason)
        member.peer.close()
        report = WorkerRemoved(worker=member.id, name=member.worker.name, reason=reason, is_hung=is_hung)
        for watcher in self._watchers:
            watcher.send(report)

    def _gone(self, member: Member, reason: str) -> None:
        self.counters["workers_gone"] += 1
        self.cluster_state.gone(member.id)
        level = logging.INFO if member.is_draining else logging.WARNING
        logger.log(level, "%s is gone: %s", member.worker.name, reason, extra={"worker": member.id})
        self._dispatcher.lost(member, reason)

    def _press(self) -> None:
        """Tell workers the rung, of those on which they have something to do."""
        level = self.admission_queue.overload.level
        told = level if level >= OverloadLevel.SMALL_CHUNKS else OverloadLevel.CALM
        if told != self._told:
            self._told = told
            for member in self.members.all():
                member.peer.send(Pressure(level=told))

    def _drain(self, drain: Drain) -> None:
        """Who asked reads in the status whether it was found."""
        member = self.members.find(drain.worker)
        if member is not None:
            self.members.drain(member)
            member.peer.send(Drain(worker=member.id))

    # Members.

    def _list_members(self) -> Members:
        is_complete = self._clock.now_s() - self._start_s >= SETTLE_S
        workers = tuple(member.worker for member in self.members.all())
        draining = tuple(member.id for member in self.members.all() if member.is_draining)
        return Members(workers=workers, is_complete=is_complete, draining=draining)

    def _announce(self, is_tick: bool = False) -> None:
        """Tell all when the list has changed: at once, or in the next tick if it has just been told."""
        now_s = self._clock.now_s()
        if now_s - self._announced_s < TICK_S and not is_tick:
            return
        members = self._list_members()
        if members == self._announced:
            return
        self._announced, self._announced_s = members, now_s
        for gateway in self._gateways.values():
            gateway.peer.send(members)
        for member in self.members.all():
            member.peer.send(members)
        for watcher in self._watchers:
            watcher.send(members)
