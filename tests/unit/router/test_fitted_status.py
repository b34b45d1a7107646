"""The status of the largest cluster fits one message."""

import msgspec
import pytest
from msgspec.structs import replace

from baton.messages.bounds import MAX_BODY_BYTES, MAX_WORKERS
from baton.messages.codec import decode, encode
from baton.messages.control import Heartbeat
from baton.messages.operations import Status, StatusQuery
from baton.messages.status import MAX_TENANTS, QueueStatus, RouterStatus, TenantStatus, Times
from baton.messages.workers import MAX_DESTINATIONS, Load, WorkerStatus
from baton.router.router import fitted
from baton.tenants import Refusal
from tests.node_peers import TestPeer, a_worker_status, id_of
from tests.unit.router.router_cluster import cluster

COUNTERS = {f"a_counter_with_a_long_name_{number}": 10**12 + number for number in range(16)}


def a_status(num_workers: int, num_tenants: int, counters: dict[str, int] | None = None) -> Status:
    """Tenants come with the busiest first, workers with the least busy first."""
    load = Load(
        num_tokens=10**12,
        pages={"free": 10**5},
        kv_bytes_to={id_of(f"d{number}"): 10**12 for number in range(MAX_DESTINATIONS)},
        times={"step": Times([10**6] * 8, 1e3)},
        counters=COUNTERS if counters is None else counters,
    )
    workers = tuple(
        a_worker_status(f"d{number}", load, num_attempts=number, beat_age_s=0.5)
        for number in range(num_workers)
    )
    tenants = tuple(
        TenantStatus(tenant=f"tenant-{number}", work_tokens=10**9, refused=dict.fromkeys(Refusal, 10**6))
        for number in range(num_tenants)
    )
    router = RouterStatus(id=id_of("one"), queue=QueueStatus(num_queued=num_tenants, tenants=tenants))
    return Status(workers=workers, routers=(router,), num_gateways=2)


def _without_destinations(entry: WorkerStatus) -> WorkerStatus:
    return replace(entry, load=replace(entry.load, kv_bytes_to={}))


def test_status_that_fits_is_unchanged() -> None:
    status = a_status(100, 100)
    assert fitted(status) is status


def test_busiest_tenants_and_workers_of_the_largest_cluster_stay() -> None:
    status = a_status(MAX_WORKERS, MAX_TENANTS)
    told = fitted(status)
    assert len(encode(told)) <= MAX_BODY_BYTES and decode(encode(told)) == told
    assert len(told.workers) == MAX_WORKERS and told.workers[-1] == _without_destinations(status.workers[-1])
    assert told.left_out == {"counters": sum(not each.load.counters for each in told.workers)}
    assert not any(each.load.kv_bytes_to for each in told.workers)
    assert all(bool(each.load.counters) == bool(each.load.times) for each in told.workers)
    assert told.queue.num_left_out == MAX_TENANTS - len(told.queue.tenants)


def test_status_of_a_router_fits_a_message() -> None:
    names = tuple(f"d{number}" for number in range(3))
    c = cluster(*names)
    counters = {f"{number:064}": 2**62 for number in range(6000)}
    for name in names:
        c[name].say(Heartbeat(load=Load(counters=counters)))
    operator = TestPeer.operator(c.router)
    operator.say(StatusQuery())
    told = operator.only(Status)
    assert len(encode(told)) <= MAX_BODY_BYTES and len(told.workers) == 3
    assert told.left_out == {"counters": 1}


def test_least_busy_tenants_are_left_out_first() -> None:
    status = a_status(700, MAX_TENANTS)
    told = fitted(status)
    num_left_out = told.queue.num_left_out
    assert told.left_out == {} and 0 < num_left_out < MAX_TENANTS
    assert told.queue.tenants == status.queue.tenants[:-num_left_out]
    assert sorted(told.workers, key=lambda each: each.num_attempts) == [
        *map(_without_destinations, status.workers)
    ]
    assert MAX_BODY_BYTES - 1024 < len(encode(told)) <= MAX_BODY_BYTES, "no more goes than has to"
    assert told.queue.num_queued == MAX_TENANTS


@pytest.mark.parametrize("most_bytes", [700, 5000, 20_000, 60_000])
def test_any_bound_is_kept(most_bytes: int) -> None:
    told = fitted(a_status(40, 40), most_bytes)
    assert len(msgspec.msgpack.encode(told)) <= most_bytes
    assert len(told.workers) + told.left_out.get("workers", 0) == 40
    assert len(told.queue.tenants) + told.queue.num_left_out == 40
    if told.workers:
        assert max(each.num_attempts for each in told.workers) == 39
