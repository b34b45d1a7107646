"""How a router and its workers stand, for whoever asks: see StatusQuery."""

import os
from collections import Counter
from typing import Protocol

from baton.config import node_name
from baton.pressure import QueueStatus
from baton.router.books import Books
from baton.router.membership import Membership
from baton.router_status import RouterStatus, RoutingTimes
from baton.worker import WorkerStatus


class Shared(Protocol):
    """A link to what routers share, as far as it is shown."""

    is_up: bool
    counters: Counter[str]


class Standing:
    """A router's own."""

    def __init__(self, id: str, counters: Counter[str], books: Books) -> None:
        self.redis: Shared | None = None
        self.times = RoutingTimes()
        self._id = id
        self._counters = counters
        self._books = books

    def status(self, queue: QueueStatus) -> RouterStatus:
        redis = self.redis
        shared = {} if redis is None else redis.counters
        return RouterStatus(
            id=self._id,
            node=node_name(),
            pid=os.getpid(),
            num_attempts=self._books.num_own,
            redis="none" if redis is None else "up" if redis.is_up else "down",
            routing_counts=tuple(self.times.counts),
            routing_s=self.times.total_s,
            counters={**self._counters, **shared},
            queue=queue,
        )


def worker_statuses(members: Membership, books: Books, now_s: float) -> tuple[WorkerStatus, ...]:
    return tuple(
        WorkerStatus(
            worker=member.worker,
            load=member.load,
            num_attempts=books.account(member.id).num_attempts,
            beat_age_s=max(0.0, now_s - member.beat_s),  # a clock may jump
            is_draining=member.is_draining,
        )
        for member in members.all()
    )
