"""Transports between two real processes: the right bytes, and what is left when one of them fails."""

import gc
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from baton.errors import TransferFailed
from baton.pages import PageLayout
from tests.layouts import a_layout
from tests.remote import Remote
from tests.transfer_ends import (
    OPTIONAL,
    PACKAGES,
    TCP,
    Destination,
    PlannedTransfer,
    Source,
    digest,
    grant_of,
    is_installed,
    needs,
    open_files,
    write,
)
from tests.waiting import wait_for

STREAMS = pytest.mark.parametrize("name", ["tcp", "gloo", *OPTIONAL])
ALL = pytest.mark.parametrize("name", ["tcp", "shm", "gloo", *OPTIONAL])
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
POOL = 96
PAGES_BACK_S = 2.0  # one second, and as much for a machine with other work


def layout(
    tp_size: int = 1, page_size: int = 16, num_layers: int = 2, transfer_dtype: str = "auto"
) -> PageLayout:
    return a_layout(
        tp_size=tp_size,
        page_size=page_size,
        num_layers=num_layers,
        num_kv_heads=4,
        head_dim=32,
        dtype="bfloat16",
        transfer_dtype=transfer_dtype,
    )


LARGE = layout(num_layers=64)  # 512 KiB a page: a transfer of all takes a while


@pytest.fixture
def source() -> Iterator[Source]:
    yield from closed(Source(layout(), POOL))


@pytest.fixture
def large_source() -> Iterator[Source]:
    yield from closed(Source(LARGE, POOL))


@pytest.fixture
def destination() -> Iterator[Destination]:
    end = Destination(LARGE, POOL)
    yield end
    end.close()


def closed(end: Source) -> Iterator[Source]:
    yield end
    if hasattr(end, "sender"):
        end.close()


def plain(grant: PlannedTransfer) -> dict[str, object]:
    converted: dict[str, object] = msgspec.to_builtins(grant)
    return converted


def large_grant(seed: int = 0, **rest: int) -> PlannedTransfer:
    return grant_of(LARGE, LARGE, POOL // 2, POOL, seed, **rest)


LAYOUTS = [
    (layout(), layout()),
    (layout(), layout(page_size=8)),
    (layout(page_size=4), layout()),
    (layout(), layout(tp_size=2)),
    (layout(tp_size=4), layout(tp_size=2, page_size=32)),
    (layout(transfer_dtype="int8"), layout(transfer_dtype="int8")),
    (layout(tp_size=4, transfer_dtype="fp8"), layout(tp_size=2, page_size=32, transfer_dtype="fp8")),
]


@pytest.fixture(scope="module")
def lasting_peer() -> Iterator[Remote]:
    with Remote(Destination, layout=layout(), num_pages=1) as peer:
        yield peer


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("tcp", "cpu"),
        ("shm", "cpu"),
        ("gloo", "cpu"),
        pytest.param("nixl", "cpu", marks=needs("nixl")),
        pytest.param("mooncake", "cpu", marks=needs("mooncake")),
        pytest.param("tcp", "cuda", marks=GPU),
        pytest.param("cuda_ipc", "cuda", marks=GPU),
        pytest.param("nccl", "cuda", marks=GPU),
    ],
)
@pytest.mark.parametrize(
    "pair",
    LAYOUTS,
    ids=lambda pair: "-".join(f"{a.tp_size}x{a.page_size}" for a in pair) + f"-{pair[0].transfer_dtype}",
)
def test_the_bytes_are_exactly_those_of_the_plan(
    name: str, device: str, pair: tuple[PageLayout, PageLayout], lasting_peer: Remote
) -> None:
    theirs, ours = pair
    ranks = theirs.tp_size - 1, ours.tp_size - 1
    lasting_peer.renew(ours, POOL, ranks[1], device)
    source = Source(theirs, POOL, ranks[0], device=device)
    try:
        source.open(name, lasting_peer.addresses(), ours, ranks[1])
    except TransferFailed as error:
        if name == "nccl" and torch.cuda.device_count() == 1:
            pytest.skip(f"two ranks on one GPU: {error}")  # NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1 can
        raise
    expected = torch.zeros((POOL, ours.page_bytes), dtype=torch.uint8)
    grant = grant_of(theirs, ours, 24, POOL, source_rank=ranks[0], rank=ranks[1])
    lasting_peer.grant(grant)
    for first, stop in ((0, 1), (10, 24), (1, 9), (5, 5)):
        write(grant, source.pages.cpu(), expected, first, stop)
        moved = source.outcome(source.push(plain(grant), first, stop))
        assert (moved.is_done, moved.num_bytes) == (True, (stop - first) * grant.plan.sent_unit_bytes), moved
    assert lasting_peer.digest() == digest(expected)
    source.close()


@ALL
def test_many_pieces_in_flight_arrive_whole(name: str, large_source: Source, lasting_peer: Remote) -> None:
    lasting_peer.renew(LARGE, POOL, 0, "cpu")
    large_source.open(name, lasting_peer.addresses(), LARGE)
    expected = torch.zeros((POOL, LARGE.page_bytes), dtype=torch.uint8)
    grant = large_grant()
    lasting_peer.grant(grant)
    pushes = [large_source.push(plain(grant), unit, unit + 1) for unit in range(grant.num_units)]
    assert all(large_source.outcome(push).is_done for push in pushes)
    write(grant, large_source.pages, expected, 0, grant.num_units)
    assert lasting_peer.digest() == digest(expected)


@ALL
@pytest.mark.parametrize("delay_ms", [0, 1, 3, 10, 100])
def test_abort_at_any_moment_leaves_pages_that_can_be_reused(
    name: str, delay_ms: int, large_source: Source, destination: Destination
) -> None:
    large_source.open(name, destination.addresses(), LARGE)
    aborted, next_one = large_grant(), large_grant(seed=1, epoch=2, generation=2)
    destination.grant(plain(aborted))
    push = large_source.push(plain(aborted), 0, aborted.num_units)
    time.sleep(delay_ms / 1000)
    large_source.abort(aborted.id)
    large_source.pages.add_(1)  # they are the source's own again
    destination.end(plain(aborted))
    if name == "shm":
        assert not destination.is_safe(aborted.id)
        destination.release(aborted.id)
    assert wait_for(lambda: destination.is_safe(aborted.id)) < PAGES_BACK_S
    assert large_source.has_ended(push)

    destination.pages.zero_()
    expected = torch.zeros_like(destination.pages)
    destination.grant(plain(next_one))
    push = large_source.push(plain(next_one), 0, next_one.num_units)
    assert large_source.outcome(push).is_done
    write(next_one, large_source.pages, expected, 0, next_one.num_units)
    assert torch.equal(destination.pages, expected)


@ALL
def test_a_transfer_that_has_ended_is_written_no_more(
    name: str, large_source: Source, destination: Destination
) -> None:
    grant = large_grant()
    large_source.open(name, destination.addresses(), LARGE)
    destination.grant(plain(grant))
    destination.end(plain(grant))
    refused = large_source.outcome(large_source.push(plain(grant), 0, 8))
    assert not refused.is_done and refused.reason
    assert not destination.pages.any()
    other = msgspec.structs.replace(grant, id="ab" * 16, epoch=7, generation=7)
    destination.grant(plain(other))
    zombie = msgspec.structs.replace(other, epoch=6, generation=6)
    assert not large_source.outcome(large_source.push(plain(zombie), 0, 8)).is_done
    assert not destination.pages.any()
    assert large_source.outcome(large_source.push(plain(other), 0, 8)).is_done


@ALL
def test_killing_a_destination_fails_its_own_transfers_alone(name: str, large_source: Source) -> None:
    arguments = {"layout": LARGE, "num_pages": POOL}
    other = Source(LARGE, POOL)
    with Remote(Destination, **arguments) as doomed, Remote(Destination, **arguments) as spared:
        large_source.open(name, doomed.addresses(), LARGE)
        grant = large_grant()
        doomed.grant(grant)
        large_source.keep_pushing(plain(grant), grant.num_units)
        time.sleep(0.05)
        doomed.kill()
        if name != "shm":  # with shm its memory is mapped: writes go where nobody reads
            started_s = time.monotonic()
            push = large_source.push(plain(grant), 0, grant.num_units)
            assert not large_source.outcome(push).is_done
            assert time.monotonic() - started_s < TCP.stall_s
        other.open(name, spared.addresses(), LARGE)  # a new peer needs no restart of the source
        spared.grant(grant)
        assert other.outcome(other.push(plain(grant), 0, grant.num_units)).is_done
        other.close()


@STREAMS
def test_a_stopped_destination_hits_the_deadline_and_abort_does_not_wait_for_it(
    name: str, large_source: Source
) -> None:
    with Remote(Destination, layout=LARGE, num_pages=POOL) as peer:
        large_source.open(name, peer.addresses(), LARGE)
        grants = [large_grant(), large_grant(seed=1)]
        for grant in grants:
            peer.grant(grant)
        peer.signal(signal.SIGSTOP)
        pushes = [large_source.push(plain(grant), 0, grant.num_units) for grant in grants]
        time.sleep(0.05)  # the threads of the sender take the pieces
        started_s = time.monotonic()
        large_source.abort(grants[0].id)
        assert time.monotonic() - started_s < TCP.stall_s
        assert not large_source.outcome(pushes[1]).is_done
        assert time.monotonic() - started_s < TCP.connect_s + 4 * TCP.stall_s
        started_s = time.monotonic()
        large_source.sender.close()
        assert time.monotonic() - started_s < TCP.connect_s + 4


@ALL
def test_a_killed_source_leaves_pages_within_a_second(name: str, destination: Destination) -> None:
    with Remote(Source, layout=LARGE, num_pages=POOL) as peer:
        peer.open(name, destination.addresses(), LARGE)
        grant = large_grant()
        destination.grant(plain(grant))
        peer.keep_pushing(grant, grant.num_units)
        wait_for(lambda: bool(destination.pages[grant.pages[0]].any()))
        peer.kill()
        if name == "shm":
            wait_for(lambda: destination.orphans == [grant.id], PAGES_BACK_S)
        destination.end(plain(grant))
        wait_for(lambda: destination.is_safe(grant.id), PAGES_BACK_S)
        wait_for(lambda: destination.num_streams() == 0, PAGES_BACK_S)


@ALL
def test_a_zombie_source_writes_nothing_into_reused_pages(name: str, destination: Destination) -> None:
    with Remote(Source, layout=LARGE, num_pages=POOL) as peer:
        peer.open(name, destination.addresses(), LARGE)
        grant = large_grant()
        destination.grant(plain(grant))
        peer.keep_pushing(grant, grant.num_units)
        wait_for(lambda: bool(destination.pages[grant.pages[0]].any()))
        peer.signal(signal.SIGSTOP)
        destination.end(plain(grant))
        if name == "shm":
            time.sleep(0.2)
            assert not destination.is_safe(grant.id)  # it may be in the middle of a write
            peer.signal(signal.SIGCONT)
            peer.abort(grant.id)
            destination.release(grant.id)
        wait_for(lambda: destination.is_safe(grant.id), PAGES_BACK_S)
        destination.pages.fill_(7)
        if name != "shm":
            peer.signal(signal.SIGCONT)
        push = peer.push(grant, 0, grant.num_units)
        assert not peer.is_done(push)
        assert bool((destination.pages == 7).all())


def test_a_stopped_shm_source_holds_its_pages_until_it_is_dead(destination: Destination) -> None:
    with Remote(Source, layout=LARGE, num_pages=POOL) as peer:
        peer.open("shm", destination.addresses(), LARGE)
        grant = large_grant()
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
        assert destination.is_safe(again.id)  # a dead process writes nothing


@ALL
def test_another_clusters_key_opens_nothing(name: str, destination: Destination) -> None:
    source = Source(LARGE, POOL, key=(b"another key of 16 bytes").hex())
    with pytest.raises(TransferFailed, match="key"):
        source.open(name, destination.addresses(), LARGE)
    wait_for(lambda: destination.num_streams() == 0, 2.0)


@ALL
def test_sender_without_a_listener_does_not_open(name: str) -> None:
    source = Source(LARGE, 1)
    with pytest.raises(TransferFailed, match=name):
        source.open(name, {name: "\0baton-kv-unbound" if name == "shm" else "1"}, LARGE)


def shared_files() -> list[str]:
    """Return the names in /dev/shm, without those of browsers, semaphores and Ray of other tests."""
    others = (".org.chromium", "sem.", "plasma", "ray")
    return sorted(path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith(others))


def test_nothing_is_left_of_ends_that_were_closed() -> None:
    def live_and_die() -> None:
        destination = Destination(layout(), POOL)
        for name in ("tcp", "shm", *filter(is_installed, PACKAGES)):
            source = Source(layout(), POOL)
            source.open(name, destination.addresses(), layout())
            grant = grant_of(layout(), layout(), 8, POOL, seed=ord(name[0]))
            destination.grant(plain(grant))
            assert source.outcome(source.push(plain(grant), 0, 8)).is_done
            source.close()
        destination.close()
        del destination, source
        gc.collect()

    live_and_die()
    before = open_files(), threading.active_count(), shared_files()
    for _ in range(3):
        live_and_die()
    assert (open_files(), threading.active_count(), shared_files()) == before


def test_killed_processes_leave_no_shared_memory_behind() -> None:
    before = shared_files()
    with Remote(Destination, layout=LARGE, num_pages=POOL) as peer:
        source = Source(LARGE, POOL)
        source.open("shm", peer.addresses(), LARGE)
        peer.kill()
        source.close()
    assert shared_files() == before
