"""What a worker of either role is to the cluster: whom it knows, what it tells, and what it is told."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Protocol

from baton.clock import Clock
from baton.messages.codec import AnyMessage
from baton.messages.control import KvEventsWanted, Members, Pressure
from baton.messages.kv_events import Knowing, KvEventPublisher
from baton.messages.measurements import Measurements, Stepper
from baton.messages.operations import Drain
from baton.messages.status import OverloadLevel
from baton.messages.workers import Load, Worker
from baton.rpc.heartbeat import HeartbeatSender
from baton.rpc.peers import Peer, PeerRegistry

# What a router is told of a worker beside its beats: the pages it knows, and what its work took.


class Reported(Knowing, Stepper, Protocol):
    """An engine."""


class WorkerReports:
    """What both roles tell; each has its own account of what a prompt took."""

    def __init__(self, peer_registry: PeerRegistry, clock: Clock) -> None:
        self.clock = clock
        self.step_began_s = 0.0
        self._publisher = KvEventPublisher(peer_registry, clock)
        self.measurements = Measurements(self._publisher, clock)

    def want(self, router: Peer) -> None:
        self._publisher.want(router)

    def tell(self, engine: Reported) -> None:
        """What is due; to be called after each step."""
        self._publisher.tell(engine)
        self.measurements.tell()

    def step_begins(self) -> None:
        self.step_began_s = self.clock.now_s()

    def step_ended(self, engine: Reported) -> None:
        self.measurements.stepped(engine)


class Links(Protocol):
    """That pages are moved over."""

    def keep_up(self, workers: Collection[Worker]) -> None:
        """Have one to each of these."""


class WorkerNode(ABC):
    """A Node. All calls come from one thread."""

    def __init__(
        self, peer_registry: PeerRegistry, links: Links, beats: HeartbeatSender, reports: WorkerReports
    ) -> None:
        self.hello = peer_registry.hello
        self.is_draining = False
        self._peer_registry = peer_registry
        self._page_links = links
        self._beats = beats
        self._telling = reports
        self._levels: dict[str, OverloadLevel] = {}  # of routers, by id

    @property
    @abstractmethod
    def attempts(self) -> tuple[tuple[str, int], ...]:
        """What it works on: (request_id, attempt) each."""

    @abstractmethod
    def load(self) -> Load: ...

    def drain(self) -> None:
        """Take nothing new, finish what goes on."""
        self.is_draining = True
        self._beats.give(self, at_once=True)

    def joined(self, peer: Peer) -> None:
        self._peer_registry.joined(peer)
        self._peer_registry.report(self._reachable())

    def left(self, peer: Peer) -> None:
        if self._peer_registry.left(peer):
            if self._levels.pop(peer.hello.id, None) is not None:
                self._pressed(self.level)
            self._lost(peer)
            self._lost_workers(self._peer_registry.recount())
            self._peer_registry.report(self._reachable())

    def tick(self) -> None:
        self._peer_registry.tick()
        self._keep_up()

    def received(self, peer: Peer, message: AnyMessage) -> None:
        match message:
            case Members() if self._peer_registry.is_router(peer):
                self._lost_workers(self._peer_registry.changed(peer, message))
                self._peer_registry.keep_up()
                self._keep_up()
            case Drain() if self._peer_registry.is_router(peer):
                self.drain()
            case Pressure() if self._peer_registry.is_router(peer):
                self._levels[peer.hello.id] = message.level
                self._pressed(self.level)
            case KvEventsWanted() if self._peer_registry.is_router(peer):
                self._telling.want(peer)
            case _:
                self._heard(peer, message)

    def _keep_up(self) -> None:
        self._page_links.keep_up(self._peer_registry.with_pages())
        self._peer_registry.report(self._reachable())
        self._beats.give(self)

    @property
    def level(self) -> OverloadLevel:
        """The highest that any router is on."""
        return max(self._levels.values(), default=OverloadLevel.CALM)

    def _pressed(self, level: OverloadLevel) -> None:  # noqa: B027  (a role may have nothing to do)
        """The cluster is on this rung now."""

    @abstractmethod
    def _reachable(self) -> list[str]:
        """The workers that it could work with now."""

    @abstractmethod
    def _lost(self, peer: Peer) -> None:
        """Nothing reaches that process any more."""

    @abstractmethod
    def _lost_workers(self, ids: list[str]) -> None:
        """No router lists these any more. There may be none of them."""

    @abstractmethod
    def _heard(self, peer: Peer, message: AnyMessage) -> None:
        """What is for one role alone; ProtocolError for anything else."""
