"""How a router and its workers stand, for whoever asks: see StatusQuery."""

import os
from collections import Counter
from collections.abc import Iterable
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from baton.config.environment import node_name
from baton.messages.bounds import MAX_BODY_BYTES
from baton.messages.operations import Status
from baton.messages.status import QueueStatus, RouterStatus, RoutingTimes
from baton.messages.workers import WorkerStatus
from baton.router.in_flight import InFlight
from baton.router.membership import Membership


class SharingStatus(Protocol):
    """A link to what routers share, as far as it is shown."""

    is_up: bool
    counters: Counter[str]


class StatusReporter:
    """A router's own."""

    def __init__(self, id: str, counters: Counter[str], in_flight: InFlight) -> None:
        self.redis: SharingStatus | None = None
        self.times = RoutingTimes()
        self._id = id
        self._counters = counters
        self._in_flight = in_flight

    def status(self, queue: QueueStatus) -> RouterStatus:
        redis = self.redis
        shared = {} if redis is None else redis.counters
        return RouterStatus(
            id=self._id,
            node=node_name(),
            pid=os.getpid(),
            num_attempts=self._in_flight.num_own,
            redis="none" if redis is None else "up" if redis.is_up else "down",
            routing_counts=tuple(self.times.counts),
            routing_s=self.times.total_s,
            counters={**self._counters, **shared},
            queue=queue,
        )


def worker_statuses(members: Membership, in_flight: InFlight, now_s: float) -> tuple[WorkerStatus, ...]:
    return tuple(
        WorkerStatus(
            worker=member.worker,
            load=member.load,
            num_attempts=in_flight.account(member.id).num_attempts,
            beat_age_s=max(0.0, now_s - member.beat_s),  # a clock may jump
            is_draining=member.is_draining,
        )
        for member in members.all()
    )


# A router's own status, cut down to what one message carries.
#
# A worker that counts a lot takes 1.1 KB, 0.6 KB of them its counters; a tenant of whom something was refused
# 0.3 KB. Of 1024 each that is 1.4 MiB: all the tenants go, and the counters of an eighth of the workers. What
# gateways refused of each tenant goes before all of that; their sums stay.

SLACK_BYTES: Final = 128  # more than it takes to say what was left out
_ENCODER: Final = msgspec.msgpack.Encoder()


def fitted(status: Status, most_bytes: int = MAX_BODY_BYTES) -> Status:
    """What is left out, and counted, until it fits: the last tenants, who are the least busy; then what the
    least busy workers count; then those workers.
    """
    if _size(status) <= most_bytes:
        return status
    status = replace(status, gateways=tuple(replace(gateway, refused={}) for gateway in status.gateways))
    over_bytes = _size(status) - most_bytes
    if over_bytes <= 0:
        return status
    (router,) = status.routers
    tenants, workers = router.queue.tenants, sorted(status.workers, key=_busyness)
    over_bytes += SLACK_BYTES
    num_tenants, over_bytes = _cut(map(_size, reversed(tenants)), over_bytes)
    num_counters, over_bytes = _cut((_size(each.load.counters) - 1 for each in workers), over_bytes)
    workers[:num_counters] = map(_without_counters, workers[:num_counters])
    num_workers, _ = _cut(map(_size, workers), over_bytes)
    queue = replace(
        router.queue,
        tenants=tenants[: len(tenants) - num_tenants],
        num_left_out=router.queue.num_left_out + num_tenants,
    )
    left_out = {"counters": num_counters - num_workers, "workers": num_workers}
    return replace(
        status,
        workers=tuple(workers[num_workers:]),
        routers=(replace(router, queue=queue),),
        left_out={what: count for what, count in left_out.items() if count},
    )


def _cut(sizes: Iterable[int], over_bytes: int) -> tuple[int, int]:
    """How many of the first to leave out, and how many bytes are too many still."""
    num_cut = 0
    for size in sizes:
        if over_bytes <= 0:
            break
        over_bytes -= size
        num_cut += 1
    return num_cut, over_bytes


def _busyness(entry: WorkerStatus) -> tuple[int, str]:
    return entry.num_attempts, entry.worker.id


def _without_counters(entry: WorkerStatus) -> WorkerStatus:
    return replace(entry, load=replace(entry.load, counters={}))


def _size(value: object) -> int:
    return len(_ENCODER.encode(value))
