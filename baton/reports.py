"""What a router is told of a worker beside its beats: the pages it knows, and what its work took."""

from typing import Protocol

from baton.clock import Clock
from baton.colleagues import Colleagues
from baton.measurements import Measurements, Stepper
from baton.node import Peer
from baton.page_news import Knowing, PageNews


class Reported(Knowing, Stepper, Protocol):
    """An engine."""


class WorkerReports:
    """What both roles tell; each has its own account of what a prompt took."""

    def __init__(self, colleagues: Colleagues, clock: Clock) -> None:
        self.clock = clock
        self.step_began_s = 0.0
        self._news = PageNews(colleagues, clock)
        self.measurements = Measurements(self._news, clock)

    def want(self, router: Peer) -> None:
        self._news.want(router)

    def tell(self, engine: Reported) -> None:
        """What is due; to be called after each step."""
        self._news.tell(engine)
        self.measurements.tell()

    def step_begins(self) -> None:
        self.step_began_s = self.clock.now_s()

    def step_ended(self, engine: Reported) -> None:
        self.measurements.stepped(engine)
