"""Transports between two real processes: the right bytes, and what is left when one of them fails."""

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from baton.errors import TransferFailed
from baton.kvtransfer.transports.base import TransferStatus
from baton.pages import PageLayout
from tests.remote import Remote
from tests.transfer_ends import (
    SETTINGS,
    Destination,
    Grant,
    Source,
    digest,
    grant_of,
    open_files,
    outcome,
    source_pages,
    wait_for,
    write,
)

BOTH = pytest.mark.parametrize("name", ["tcp", "shm"])
POOL = 96
PAGES_BACK_S = 2.0  # one second, and as much for a machine with other work
DONE, FAILED = TransferStatus.DONE, TransferStatus.FAILED


def layout(tp_size: int = 1, page_size: int = 16, num_layers: int = 2) -> PageLayout:
    return PageLayout(
        tp_size=tp_size,
        page_size=page_size,
        num_layers=num_layers,
        num_kv_heads=4,
        head_dim=32,
        dtype="bfloat16",
    )


LARGE = layout(num_layers=64)  # 512 KiB a page: a transfer of all takes a while


@pytest.fixture
def source() -> Iterator[Source]:
    yield from closed(Source(layout().page_bytes, POOL))


@pytest.fixture
def large_source() -> Iterator[Source]:
    yield from closed(Source(LARGE.page_bytes, POOL))


@pytest.fixture
def destination() -> Iterator[Destination]:
    end = Destination(LARGE.page_bytes, POOL)
    yield end
    end.close()


def closed(end: Source) -> Iterator[Source]:
    yield end
    if hasattr(end, "transport"):
        end.close()


def plain(grant: Grant) -> dict[str, object]:
    converted: dict[str, object] = msgspec.to_builtins(grant)
    return converted


def large_grant(name: str, seed: int = 0, **rest: int) -> Grant:
    return grant_of(LARGE, LARGE, POOL // 2, POOL, seed, direct=name == "shm", **rest)


LAYOUTS = [
    (layout(), layout()),
    (layout(), layout(page_size=8)),
    (layout(page_size=4), layout()),
    (layout(), layout(tp_size=2)),
    (layout(tp_size=4), layout(tp_size=2, page_size=32)),
]


@pytest.fixture(scope="module")
def lasting_peer() -> Iterator[Remote]:
    with Remote(Destination, page_bytes=1, num_pages=1) as peer:
        yield peer


@BOTH
@pytest.mark.parametrize(
    "pair", LAYOUTS, ids=lambda pair: "-".join(f"{a.tp_size}x{a.page_size}" for a in pair)
)
def test_the_bytes_are_exactly_those_of_the_plan(
    name: str, pair: tuple[PageLayout, PageLayout], lasting_peer: Remote
) -> None:
    theirs, ours = pair
    lasting_peer.call("renew", ours.page_bytes, POOL)
    source = Source(theirs.page_bytes, POOL)
    source.open(name, lasting_peer.call("addresses"))
    expected = torch.zeros((POOL, ours.page_bytes), dtype=torch.uint8)
    grant = grant_of(theirs, ours, 24, POOL, direct=name == "shm")
    lasting_peer.call("grant", grant)
    for first, stop in ((0, 1), (10, 24), (1, 9), (5, 5)):
        write(grant, source.pages, expected, first, stop)
        progress = outcome(source.transport, source.push(plain(grant), first, stop))
        assert (progress.status, progress.num_bytes) == (DONE, (stop - first) * grant.plan.unit_bytes)
    assert lasting_peer.call("digest") == digest(expected)
    source.close()


@BOTH
def test_many_pieces_in_flight_arrive_whole(name: str, large_source: Source, lasting_peer: Remote) -> None:
    lasting_peer.call("renew", LARGE.page_bytes, POOL)
    large_source.open(name, lasting_peer.call("addresses"))
    expected = torch.zeros((POOL, LARGE.page_bytes), dtype=torch.uint8)
    grant = large_grant(name)
    lasting_peer.call("grant", grant)
    transfer_queue = [large_source.push(plain(grant), unit, unit + 1) for unit in range(grant.num_units)]
    assert {outcome(large_source.transport, handle).status for handle in transfer_queue} == {DONE}
    write(grant, large_source.pages, expected, 0, grant.num_units)
    assert lasting_peer.call("digest") == digest(expected)


@BOTH
@pytest.mark.parametrize("delay_ms", [0, 1, 3, 10, 100])
def test_abort_at_any_moment_leaves_pages_that_can_be_reused(
    name: str, delay_ms: int, large_source: Source, destination: Destination
) -> None:
    large_source.open(name, destination.addresses())
    aborted, next_one = large_grant(name), large_grant(name, seed=1, epoch=2, generation=2)
    destination.grant(plain(aborted))
    handle = large_source.push(plain(aborted), 0, aborted.num_units)
    time.sleep(delay_ms / 1000)
    large_source.abort(aborted.id)
    large_source.pages.add_(1)  # they are the source's own again
    destination.end(plain(aborted))
    if name == "shm":
        assert not destination.is_safe(aborted.id)
        destination.release(aborted.id)
    assert wait_for(lambda: destination.is_safe(aborted.id)) < PAGES_BACK_S
    assert large_source.transport.poll(handle).status.is_final

    destination.pages.zero_()
    expected = torch.zeros_like(destination.pages)
    destination.grant(plain(next_one))
    handle = large_source.push(plain(next_one), 0, next_one.num_units)
    assert outcome(large_source.transport, handle).status == DONE
    write(next_one, large_source.pages, expected, 0, next_one.num_units)
    assert torch.equal(destination.pages, expected)


@BOTH
def test_a_transfer_that_has_ended_is_written_no_more(
    name: str, source: Source, destination: Destination
) -> None:
    grant = grant_of(layout(), layout(), 8, POOL, direct=name == "shm")
    source.open(name, destination.addresses())
    destination.grant(plain(grant))
    destination.end(plain(grant))
    progress = outcome(source.transport, source.push(plain(grant), 0, 8))
    assert progress.status == FAILED and progress.reason
    assert not destination.pages.any()
    other = msgspec.structs.replace(grant, id="ab" * 16, epoch=7, generation=7)
    destination.grant(plain(other))
    zombie = msgspec.structs.replace(other, epoch=6, generation=6)
    assert outcome(source.transport, source.push(plain(zombie), 0, 8)).status == FAILED
    assert not destination.pages.any()
    assert outcome(source.transport, source.push(plain(other), 0, 8)).status == DONE


@BOTH
def test_killing_a_destination_fails_its_own_transfers_alone(name: str, large_source: Source) -> None:
    arguments = {"page_bytes": LARGE.page_bytes, "num_pages": POOL}
    other = Source(LARGE.page_bytes, POOL)
    with Remote(Destination, **arguments) as doomed, Remote(Destination, **arguments) as spared:
        large_source.open(name, doomed.call("addresses"))
        grant = large_grant(name)
        doomed.call("grant", grant)
        large_source.keep_pushing(plain(grant), grant.num_units)
        time.sleep(0.05)
        doomed.kill()
        if name == "tcp":  # with shm its memory is mapped: writes go where nobody reads
            started_s = time.monotonic()
            handle = large_source.push(plain(grant), 0, grant.num_units)
            assert outcome(large_source.transport, handle).status == FAILED
            assert time.monotonic() - started_s < SETTINGS.stall_s
        other.open(name, spared.call("addresses"))  # nobody needs a restart to meet a new peer
        spared.call("grant", grant)
        assert outcome(other.transport, other.push(plain(grant), 0, grant.num_units)).status == DONE
        other.close()


def test_a_stopped_destination_hits_the_deadline_and_abort_does_not_wait_for_it(large_source: Source) -> None:
    with Remote(Destination, page_bytes=LARGE.page_bytes, num_pages=POOL) as peer:
        large_source.open("tcp", peer.call("addresses"))
        grants = [large_grant("tcp"), large_grant("tcp", seed=1)]
        for grant in grants:
            peer.call("grant", grant)
        peer.signal(signal.SIGSTOP)
        transfer_queue = [large_source.push(plain(grant), 0, grant.num_units) for grant in grants]
        wait_for(lambda: large_source.transport.poll(transfer_queue[0]).status == TransferStatus.SENDING)
        started_s = time.monotonic()
        large_source.abort(grants[0].id)
        assert time.monotonic() - started_s < SETTINGS.stall_s
        assert outcome(large_source.transport, transfer_queue[1]).status == FAILED
        assert time.monotonic() - started_s < SETTINGS.connect_s + 4 * SETTINGS.stall_s
        started_s = time.monotonic()
        large_source.transport.close()
        assert time.monotonic() - started_s < SETTINGS.connect_s + 4


@BOTH
def test_a_killed_source_leaves_pages_within_a_second(name: str, destination: Destination) -> None:
    with Remote(Source, page_bytes=LARGE.page_bytes, num_pages=POOL) as peer:
        peer.call("open", name, destination.addresses())
        grant = large_grant(name)
        destination.grant(plain(grant))
        peer.call("keep_pushing", grant, grant.num_units)
        wait_for(lambda: bool(destination.pages[grant.pages[0]].any()))
        peer.kill()
        if name == "shm":
            wait_for(lambda: destination.orphans == [grant.id], PAGES_BACK_S)
        destination.end(plain(grant))
        wait_for(lambda: destination.is_safe(grant.id), PAGES_BACK_S)
        wait_for(lambda: destination.state()["streams"] == 0, PAGES_BACK_S)


@BOTH
def test_a_zombie_source_writes_nothing_into_reused_pages(name: str, destination: Destination) -> None:
    with Remote(Source, page_bytes=LARGE.page_bytes, num_pages=POOL) as peer:
        peer.call("open", name, destination.addresses())
        grant = large_grant(name)
        destination.grant(plain(grant))
        peer.call("keep_pushing", grant, grant.num_units)
        wait_for(lambda: bool(destination.pages[grant.pages[0]].any()))
        peer.signal(signal.SIGSTOP)
        destination.end(plain(grant))
        if name == "shm":
            time.sleep(0.2)
            assert not destination.is_safe(grant.id)  # it may be in the middle of a write
            peer.signal(signal.SIGCONT)
            peer.call("abort", grant.id)
            destination.release(grant.id)
        wait_for(lambda: destination.is_safe(grant.id), PAGES_BACK_S)
        destination.pages.fill_(7)
        if name == "tcp":
            peer.signal(signal.SIGCONT)
        handle = peer.call("push", grant, 0, grant.num_units)
        wait_for(lambda: peer.call("status", handle) == FAILED)
        assert bool((destination.pages == 7).all())


def test_a_stopped_shm_source_holds_its_pages_until_it_is_dead(destination: Destination) -> None:
    with Remote(Source, page_bytes=LARGE.page_bytes, num_pages=POOL) as peer:
        peer.call("open", "shm", destination.addresses())
        grant = large_grant("shm")
        destination.grant(plain(grant))
        peer.signal(signal.SIGSTOP)
        destination.end(plain(grant))
        time.sleep(0.2)
        assert not destination.is_safe(grant.id)
        peer.kill()
        wait_for(lambda: destination.is_safe(grant.id), PAGES_BACK_S)
        again = msgspec.structs.replace(grant, id="cd" * 16)
        destination.grant(plain(again))
        destination.end(plain(again))
        assert destination.is_safe(again.id)  # the dead write nothing


@BOTH
def test_another_clusters_key_opens_nothing(name: str, destination: Destination) -> None:
    source = Source(LARGE.page_bytes, POOL, key=(b"another key of 16 bytes").hex())
    with pytest.raises(TransferFailed, match="key"):
        source.open(name, destination.addresses())
    wait_for(lambda: destination.receiver.num_streams() == 0, 2.0)


@BOTH
def test_nobody_listens(name: str) -> None:
    source = Source(LARGE.page_bytes, 1)
    with pytest.raises(TransferFailed, match=name):
        source.open(name, {"tcp": ["127.0.0.1", 1], "shm": "\0baton-kv-nobody"})


def test_nothing_is_left_of_ends_that_were_closed() -> None:
    def live_and_die() -> None:
        destination = Destination(layout().page_bytes, POOL)
        for name in ("tcp", "shm"):
            source = Source(layout().page_bytes, POOL)
            source.open(name, destination.addresses())
            grant = grant_of(layout(), layout(), 8, POOL, seed=ord(name[0]))
            destination.grant(plain(grant))
            assert outcome(source.transport, source.push(plain(grant), 0, 8)).status == DONE
            source.close()
        destination.close()
        del destination, source
        gc.collect()

    live_and_die()
    before = (open_files(), threading.active_count(), sorted(os.listdir("/dev/shm")))
    for _ in range(3):
        live_and_die()
    assert (open_files(), threading.active_count(), sorted(os.listdir("/dev/shm"))) == before


def test_killed_processes_leave_no_shared_memory_behind() -> None:
    before = sorted(path.name for path in Path("/dev/shm").iterdir())
    with Remote(Destination, page_bytes=LARGE.page_bytes, num_pages=POOL) as peer:
        source = Source(LARGE.page_bytes, POOL)
        source.open("shm", peer.call("addresses"))
        peer.kill()
        source.close()
    assert sorted(path.name for path in Path("/dev/shm").iterdir()) == before


def test_source_pages_are_the_same_everywhere() -> None:
    assert digest(source_pages(8, 4)) == digest(source_pages(8, 4))
