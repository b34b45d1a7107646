"""The status of a router and its workers, for operators: the answer to a StatusQuery."""

from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec.structs import replace

from baton.messages.bounds import MAX_BODY_BYTES
from baton.messages.operations import Status
from baton.messages.workers import WorkerStatus
from baton.router.in_flight import InFlight
from baton.router.membership import Membership

SLACK_BYTES: Final = 128  # more than the counts of what was left out take
_ENCODER: Final = msgspec.msgpack.Encoder()


def worker_statuses(members: Membership, in_flight: InFlight, now_s: float) -> tuple[WorkerStatus, ...]:
    """The status of each member."""
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


def fitted(status: Status, most_bytes: int = MAX_BODY_BYTES) -> Status:
    """The status of one router, cut down to the size of a message; what is left out is counted.

    First the gateways' refusals by tenant are left out; their sums stay. Then, as far as needed: the last
    tenants, which are the least busy; the counters of the least busy workers; those workers.

    A worker takes up to 1.1 KB, 0.6 KB of them its counters; a tenant with refusals 0.3 KB. Of 1024 each that
    is 1.4 MiB: all the tenants go, and the counters of an eighth of the workers.
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
    """The number of first entries to leave out, and the bytes that are still too many."""
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
