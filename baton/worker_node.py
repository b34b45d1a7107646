"""What a worker of either role is to the cluster: whom it knows, what it tells, and what it is told."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Protocol

from baton.beats import Beats
from baton.colleagues import Colleagues
from baton.control import Members, PagesWanted, Pressure
from baton.control_wire import AnyMessage
from baton.node import Peer
from baton.operating import Drain
from baton.pressure import Rung
from baton.reports import WorkerReports
from baton.worker import Load, Worker


class Links(Protocol):
    """That pages are moved over."""

    def keep_up(self, workers: Collection[Worker]) -> None:
        """Have one to each of these."""


class WorkerNode(ABC):
    """A Node. All calls come from one thread."""

    def __init__(self, colleagues: Colleagues, links: Links, beats: Beats, reports: WorkerReports) -> None:
        self.hello = colleagues.hello
        self.is_draining = False
        self._colleagues = colleagues
        self._page_links = links
        self._beats = beats
        self._telling = reports
        self._rungs: dict[str, Rung] = {}  # of routers, by id

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
        self._colleagues.joined(peer)
        self._colleagues.report(self._reachable())

    def left(self, peer: Peer) -> None:
        if self._colleagues.left(peer):
            if self._rungs.pop(peer.hello.id, None) is not None:
                self._pressed(self.rung)
            self._lost(peer)
            self._lost_workers(self._colleagues.recount())
            self._colleagues.report(self._reachable())

    def tick(self) -> None:
        self._colleagues.tick()
        self._keep_up()

    def received(self, peer: Peer, message: AnyMessage) -> None:
        match message:
            case Members() if self._colleagues.is_router(peer):
                self._lost_workers(self._colleagues.changed(peer, message))
                self._colleagues.keep_up()
                self._keep_up()
            case Drain() if self._colleagues.is_router(peer):
                self.drain()
            case Pressure() if self._colleagues.is_router(peer):
                self._rungs[peer.hello.id] = message.rung
                self._pressed(self.rung)
            case PagesWanted() if self._colleagues.is_router(peer):
                self._telling.want(peer)
            case _:
                self._heard(peer, message)

    def _keep_up(self) -> None:
        self._page_links.keep_up(self._colleagues.with_pages())
        self._colleagues.report(self._reachable())
        self._beats.give(self)

    @property
    def rung(self) -> Rung:
        """The highest that any router is on."""
        return max(self._rungs.values(), default=Rung.CALM)

    def _pressed(self, rung: Rung) -> None:  # noqa: B027  (a role may have nothing to do)
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
