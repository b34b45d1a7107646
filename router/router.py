"""The router as a node: it knows who is alive and loaded how much, and gives every attempt its workers.

It keeps nothing that can't be rebuilt. One that has just started learns the workers from their Hello and
Beat and the gateways' view of them from Reachable, within SETTLE_S; attempts that were under way go on
meanwhile, and those that no earlier router answered are submitted anew by their gateways.
"""

import logging
from collections import Counter
from typing import Final

from baton.clock import Clock
from baton.control import (
    Alive,
    Beat,
    Ended,
    Hello,
    Measured,
    Members,
    PageEvents,
    Pressure,
    Reachable,
    Started,
    Submit,
)
from baton.control_wire import AnyMessage
from baton.errors import ProtocolError
from baton.node import TICK_S, Peer
from baton.operating import (
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
from baton.pressure import Rung
from baton.router.books import Books
from baton.router.capacity import Capacity
from baton.router.dispatcher import Dispatcher, Gateway
from baton.router.fitted_status import fitted
from baton.router.knowledge import Knowledge
from baton.router.meeting import Meeting
from baton.router.membership import BEAT_TIMEOUT_S, Member, Membership, Removed
from baton.router.pairing import Pairing
from baton.router.prefix_index import MAX_PAGES
from baton.router.reception import Reception
from baton.router.redis_messages import AnyShared
from baton.router.standing import Standing, worker_statuses
from baton.router_config import RouterSettings
from baton.wire_types import Kind

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
        self.books = Books(clock)
        self.standing = Standing(id, self.counters, self.books)
        self.members = Membership(clock)
        self._meeting = Meeting(self.members)
        self.knowledge = Knowledge(config, clock, self.books, self.counters, max_index_pages)
        self._clock = clock
        self._pairing = Pairing(config, self.members, self.books, self.knowledge.chooser)
        self._gateways: dict[str, Gateway] = {}
        self._watchers: dict[Peer, float] = {}  # operators that start workers -> Ray's head is away to them
        capacity = Capacity(self.members, self.books, decoders_compute=config.policy == "cost")
        self.reception = Reception(clock, self.members, capacity, self.knowledge.model)
        self._dispatcher = Dispatcher(
            self._pairing, self.knowledge, self.reception, self._gateways, config.max_attempts
        )
        self._told = Rung.CALM
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
            self._gateways[hello.id] = Gateway(peer)
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
        self.knowledge.heard(message)
        if len(self.reception):
            self._dispatcher.find_room()

    def tick(self) -> None:
        for removed in self.members.remove_dead():
            self._remove(removed)
        gone = [worker_id for worker_id in self.books.workers() if self.members.get(worker_id) is None]
        if gone:
            self.books.forget(gone)
        self.knowledge.tick()
        self._dispatcher.tick()
        self._press()
        self._announce(is_tick=True)

    def status(self) -> Status:
        status = Status(
            workers=worker_statuses(self.members, self.books, self._clock.now_s()),
            num_gateways=len(self._gateways),
            gateways=tuple(each.status for each in self._gateways.values() if each.status is not None),
            num_met=self._meeting.num_met(tuple(each.reached for each in self._gateways.values())),
            num_attempts=self.books.num_own,
            num_watchers=len(self._watchers),
            head_away_s=max(self._watchers.values(), default=0.0),
            routers=(self.standing.status(self.reception.status()),),
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
                    self.standing.times.add(self._clock.now_s() - begun_s)
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
        peer.send(Decisions(decisions=tuple(self.knowledge.decisions.of(explain.request_id))))

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
        self.knowledge.joined(worker, peer)
        if self._told > Rung.CALM:
            peer.send(Pressure(rung=self._told))
        # The newcomer gets the list even where it is not news to the others.
        self._announced = None
        self._announce()

    def _from_worker(self, peer: Peer, message: AnyMessage) -> None:
        member = self.members.get(peer.hello.id)
        if member is None or member.peer is not peer:
            return  # it has been given up: this connection is being closed
        match message:
            case Beat():
                self.members.beat(member, message)
                self._dispatcher.ended(self.books.beat(member.worker, message))
            case Alive():
                self.members.hear(member, message)
            case Reachable():
                self.members.reach(member, message.workers)
                self._dispatcher.let_out()
            case PageEvents():
                self.knowledge.pages(peer, message)
            case Measured():
                self.knowledge.measured(member.id, message)
                self.reception.computed(message.prefills)
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
        self.knowledge.gone(member.id)
        level = logging.INFO if member.is_draining else logging.WARNING
        logger.log(level, "%s is gone: %s", member.worker.name, reason, extra={"worker": member.id})
        self._dispatcher.lost(member, reason)

    def _press(self) -> None:
        """Tell workers the rung, of those on which they have something to do."""
        rung = self.reception.overload.rung
        told = rung if rung >= Rung.SMALL_CHUNKS else Rung.CALM
        if told != self._told:
            self._told = told
            for member in self.members.all():
                member.peer.send(Pressure(rung=told))

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
