"""Transfers through torch.distributed between two ranks, and what remains of them when one is gone."""

import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from baton.errors import TransferFailed
from baton.kernels.copy_runs import copy_runs_reference
from baton.kvtransfer.protocol.transfer_plan import TransferPlan, plan_transfer
from baton.kvtransfer.transports.base import OutgoingTransfer, Piece, TransferProgress, TransferStatus
from baton.kvtransfer.transports.rank_pair import GroupSettings
from baton.kvtransfer.transports.rendezvous import Rendezvous
from baton.kvtransfer.transports.torch_distributed import GroupTransport
from baton.pages import PageLayout
from tests.unit.kvtransfer.group_peer import (
    SETTINGS,
    Destination,
    End,
    Invite,
    Land,
    Rank,
    RemoteDestination,
    Save,
)

AnyDestination = Destination | RemoteDestination
Close = Callable[[Destination | RemoteDestination | GroupTransport], None]


def rank(tp_size: int, page_size: int, number: int, num_pages: int, head_dim: int = 16) -> Rank:
    layout = PageLayout(
        tp_size=tp_size,
        page_size=page_size,
        num_layers=3,
        num_kv_heads=4,
        head_dim=head_dim,
        dtype="bfloat16",
    )
    return Rank(layout, number, num_pages)


LARGE = rank(1, 16, 0, 60, head_dim=1024)  # 768 KiB a page: many parts


class Source:
    """A source rank with random pages, and its transport to one destination."""

    def __init__(self, me: Rank, destination: AnyDestination) -> None:
        self.me = me
        self.destination = destination
        self.pool = me.pool()
        self.plan: TransferPlan = plan_transfer(
            me.layout, destination.me.layout, me.rank, destination.me.rank
        )
        generator = torch.Generator().manual_seed(me.rank)
        self.raw.copy_(torch.randint(0, 256, self.raw.shape, dtype=torch.uint8, generator=generator))
        self.transport = self.connect()

    @property
    def raw(self) -> Tensor:
        return self.pool.view(-1).view(torch.uint8)

    def connect(self) -> GroupTransport:
        meeting = self.destination.do(Invite(self.me)).meeting
        assert meeting is not None
        transport = GroupTransport("gloo", lambda: meeting, self.pool, self.plan, settings=SETTINGS)
        transport.open()
        return transport

    def transfer(self, num_units: int, epoch: int = 1) -> OutgoingTransfer:
        """Granted by the destination; the source's pages are scattered."""
        transfer = secrets.token_bytes(16)
        pages = self.destination.do(Land(self.me, transfer, epoch, num_units)).pages
        count = self.plan.source.num_pages(num_units)
        return OutgoingTransfer(
            id=transfer,
            epoch=epoch,
            plan=self.plan,
            source_pages=tuple(torch.randperm(self.me.num_pages)[:count].tolist()),
            destination_pages=pages,
            destination_generations=(1,) * len(pages),
        )

    def expected(self, moved: list[Piece]) -> bytes:
        """What the destination's pool is to hold when these pieces have arrived, and nothing else."""
        content = self.destination.me.pool().view(-1).view(torch.uint8)
        for piece in moved:
            pages = piece.transfer.source_pages, piece.transfer.destination_pages
            runs = self.plan.runs(piece.first, piece.stop, *pages)
            copy_runs_reference(
                self.raw, content, runs.source_offset_N, runs.destination_offset_N, runs.run_bytes
            )
        return content.numpy().tobytes()


def wait(transport: GroupTransport, handle: int, timeout_s: float = 20.0) -> TransferProgress:
    deadline_s = time.monotonic() + timeout_s
    while not (progress := transport.poll(handle)).status.is_final:
        assert time.monotonic() < deadline_s, f"ticket {handle} is still {progress}"
        threading.Event().wait(0.002)
    return progress


@pytest.fixture
def closing() -> Iterator[Callable[..., None]]:
    """Closes at the end, in the opposite order, what it was given."""
    opened: list[AnyDestination | GroupTransport] = []
    yield lambda *things: opened.extend(things)
    for thing in reversed(opened):
        thing.close()


def connect(closing: Callable[..., None], source: Rank, destination: AnyDestination) -> Source:
    closing(destination)
    connected = Source(source, destination)
    closing(connected.transport)
    return connected


def content(destination: AnyDestination, folder: Path) -> bytes:
    destination.do(Save(str(folder / "pool")))
    return (folder / "pool").read_bytes()


@pytest.mark.parametrize(
    ("me", "peer"),
    [
        (rank(1, 16, 0, 40), rank(1, 16, 0, 30)),
        (rank(1, 16, 0, 40), rank(2, 16, 1, 30)),
        (rank(4, 16, 3, 40), rank(2, 32, 1, 30)),
        (rank(1, 64, 0, 40), rank(1, 8, 0, 200)),
    ],
    ids=["equal", "tp", "tp and pages", "pages"],
)
def test_every_layout_arrives_byte_for_byte(
    me: Rank, peer: Rank, closing: Callable[..., None], tmp_path: Path
) -> None:
    source = connect(closing, me, RemoteDestination("gloo", peer))
    transfer = source.transfer(num_units := 20)
    pieces = [Piece(transfer, 0, 3), Piece(transfer, 3, 4), Piece(transfer, 4, num_units)]
    transfer_queue = [source.transport.push(piece) for piece in pieces]
    for handle, piece in zip(transfer_queue, pieces, strict=True):
        progress = wait(source.transport, handle)
        assert (progress.status, progress.num_bytes) == (TransferStatus.DONE, piece.num_bytes), progress
        assert progress.num_messages == 1
    assert content(source.destination, tmp_path) == source.expected(pieces)


def test_a_long_piece_goes_in_a_few_large_messages(closing: Callable[..., None], tmp_path: Path) -> None:
    source = connect(closing, LARGE, Destination("gloo", LARGE))
    piece = Piece(source.transfer(50), 0, 50)
    progress = wait(source.transport, source.transport.push(piece))
    assert progress.status == TransferStatus.DONE
    assert progress.num_messages < 12 and progress.num_bytes == piece.num_bytes > 35e6
    assert content(source.destination, tmp_path) == source.expected([piece])


def test_a_transfer_that_the_destination_ended_fails_alone(
    closing: Callable[..., None], tmp_path: Path
) -> None:
    source = connect(closing, rank(1, 16, 0, 40), Destination("gloo", rank(1, 16, 0, 30)))
    ended, stale, kept = source.transfer(4), source.transfer(4, epoch=7), source.transfer(8)
    source.destination.do(End(ended.id))
    other_epoch = msgspec.structs.replace(stale, epoch=6)
    for refused in (ended, other_epoch):
        progress = wait(source.transport, source.transport.push(Piece(refused, 0, 4)))
        assert (progress.status, progress.reason) == (
            TransferStatus.FAILED,
            "the destination has ended the transfer",
        )
    piece = Piece(kept, 2, 8)
    assert wait(source.transport, source.transport.push(piece)).status == TransferStatus.DONE
    assert content(source.destination, tmp_path) == source.expected([piece])


def test_a_killed_destination_fails_its_own_pair_at_once(
    closing: Callable[..., None], tmp_path: Path
) -> None:
    doomed = connect(closing, LARGE, killed := RemoteDestination("gloo", LARGE))
    healthy = connect(closing, LARGE, RemoteDestination("gloo", LARGE))
    transfer = doomed.transfer(50)
    killed.signal(signal.SIGSTOP)  # so that it dies in the middle
    handle = doomed.transport.push(Piece(transfer, 0, 50))
    queued = doomed.transport.push(Piece(transfer, 0, 1))
    piece = Piece(healthy.transfer(40), 0, 40)
    healthy_ticket = healthy.transport.push(piece)
    assert doomed.transport.poll(handle).status != TransferStatus.DONE
    killed.kill()
    begun_s = time.monotonic()
    assert wait(doomed.transport, handle).status == TransferStatus.FAILED
    assert "closed by peer" in doomed.transport.poll(handle).reason
    assert wait(doomed.transport, queued).status == TransferStatus.FAILED
    assert time.monotonic() - begun_s < SETTINGS.stall_s
    assert wait(doomed.transport, doomed.transport.push(Piece(transfer, 0, 1))).reason
    assert wait(healthy.transport, healthy_ticket).status == TransferStatus.DONE
    assert content(healthy.destination, tmp_path) == healthy.expected([piece])
    reborn = connect(closing, LARGE, RemoteDestination("gloo", LARGE))
    piece = Piece(reborn.transfer(50), 0, 50)
    assert wait(reborn.transport, reborn.transport.push(piece)).status == TransferStatus.DONE
    assert content(reborn.destination, tmp_path) == reborn.expected([piece])


def test_a_silent_destination_fails_at_the_deadline_and_a_new_pair_works(
    closing: Callable[..., None], tmp_path: Path
) -> None:
    source = connect(closing, LARGE, stopped := RemoteDestination("gloo", LARGE))
    broken, piece = source.transfer(50), Piece(source.transfer(20), 0, 20)
    stopped.signal(signal.SIGSTOP)
    begun_s = time.monotonic()
    progress = wait(source.transport, source.transport.push(Piece(broken, 0, 50)))
    assert progress.status == TransferStatus.FAILED and "Timed out" in progress.reason
    assert SETTINGS.stall_s <= time.monotonic() - begun_s < SETTINGS.stall_s + 2
    stopped.signal(signal.SIGCONT)
    source.destination.do(End(broken.id))
    again = source.connect()
    closing(again)
    assert wait(again, again.push(piece)).status == TransferStatus.DONE
    arrived = content(source.destination, tmp_path)
    tail = 40 * LARGE.layout.page_bytes  # the pages of `piece`: what the broken transfer wrote is its own
    assert arrived[tail:] == source.expected([piece])[tail:]


def test_abort_waits_for_no_answer_and_leaves_the_pair_alive(
    closing: Callable[..., None], tmp_path: Path
) -> None:
    source = connect(closing, LARGE, stopped := RemoteDestination("gloo", LARGE))
    aborted, piece = source.transfer(50), Piece(source.transfer(5), 0, 5)
    stopped.signal(signal.SIGSTOP)
    handle = source.transport.push(Piece(aborted, 0, 50))
    source.transport.abort(aborted.id)
    assert source.transport.poll(handle).status == TransferStatus.FAILED
    source.raw[: LARGE.layout.page_bytes] = 7  # nobody reads them for the aborted transfer any more
    stopped.signal(signal.SIGCONT)
    stopped.do(End(aborted.id))
    assert wait(source.transport, source.transport.push(piece)).status == TransferStatus.DONE
    source.transport.forget(handle)
    with pytest.raises(KeyError):
        source.transport.poll(handle)


def test_close_fails_what_is_unfinished_and_ends_the_pair_on_both_sides(closing: Callable[..., None]) -> None:
    source = connect(closing, LARGE, destination := Destination("gloo", LARGE))
    handle = source.transport.push(Piece(source.transfer(50), 0, 50))
    num_threads = threading.active_count()
    source.transport.close()
    source.transport.close()
    assert source.transport.poll(handle).reason == "the transport was closed"
    assert threading.active_count() <= num_threads - 2
    deadline_s = time.monotonic() + 10
    while destination.receiver.num_pairs():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.002)


def test_a_closed_destination_ends_its_pairs(closing: Callable[..., None]) -> None:
    source = connect(closing, LARGE, destination := Destination("gloo", LARGE))
    transfer = source.transfer(10)
    destination.close()
    assert destination.receiver.num_pairs() == 0
    assert (
        wait(source.transport, source.transport.push(Piece(transfer, 0, 10))).status == TransferStatus.FAILED
    )
    with pytest.raises(TransferFailed, match="pairs at once"):
        destination.do(Invite(LARGE))


def test_nobody_at_the_meeting_place_is_a_failure_in_time() -> None:
    plan = plan_transfer(LARGE.layout, LARGE.layout, 0, 0)
    meeting = Rendezvous(host="127.0.0.1", port=1, secret=b"x" * 32)
    settings = GroupSettings(connect_s=1.0)
    transport = GroupTransport("gloo", lambda: meeting, LARGE.pool(), plan, settings=settings)
    begun_s = time.monotonic()
    with pytest.raises(TransferFailed):
        transport.open()
    assert time.monotonic() - begun_s < 8
    transport.close()


def test_a_stranger_who_does_not_know_the_secret_never_meets_the_destination(
    closing: Callable[..., None],
) -> None:
    destination = Destination("gloo", LARGE)
    closing(destination)
    meeting = destination.do(Invite(LARGE)).meeting
    assert meeting is not None
    guessed = Rendezvous(host=meeting.host, port=meeting.port, secret=b"x" * 32)
    plan = plan_transfer(LARGE.layout, LARGE.layout, 0, 0)
    settings = GroupSettings(connect_s=1.0)
    transport = GroupTransport("gloo", lambda: guessed, LARGE.pool(), plan, settings=settings)
    with pytest.raises(TransferFailed, match="gloo"):
        transport.open()
    transport.close()


def test_a_stranger_with_torchs_own_client_learns_and_changes_nothing(closing: Callable[..., None]) -> None:
    """The rendezvous was a TCPStore, which lists and overwrites its keys for whoever connects."""
    destination = Destination("gloo", LARGE)
    closing(destination)
    meeting = destination.do(Invite(LARGE)).meeting
    assert meeting is not None
    for _ in range(3):
        with pytest.raises(RuntimeError):
            stranger = TCPStore(
                meeting.host,
                meeting.port,
                is_master=False,
                timeout=timedelta(seconds=1),
                wait_for_workers=False,
            )
            stranger.set("gloo/0/1", "an address of the stranger's")
            stranger.list_keys()
    plan = plan_transfer(LARGE.layout, LARGE.layout, 0, 0)
    transport = GroupTransport("gloo", lambda: meeting, LARGE.pool(), plan, settings=SETTINGS)
    closing(transport)
    transport.open()
    with pytest.raises(OSError):
        socket.create_connection((meeting.host, meeting.port), 1.0).close()


def test_pages_outside_the_pool_are_refused_by_push(closing: Callable[..., None]) -> None:
    source = connect(closing, LARGE, Destination("gloo", LARGE))
    transfer = msgspec.structs.replace(source.transfer(1), source_pages=(60,))
    with pytest.raises(ValueError, match="the pool has 60 pages"):
        source.transport.push(Piece(transfer, 0, 1))


def test_nccl_is_refused_for_pages_of_a_cpu(closing: Callable[..., None]) -> None:
    destination = Destination("gloo", LARGE)
    closing(destination)
    meeting = destination.do(Invite(LARGE)).meeting
    assert meeting is not None
    plan = plan_transfer(LARGE.layout, LARGE.layout, 0, 0)
    transport = GroupTransport("nccl", lambda: meeting, LARGE.pool(), plan)
    with pytest.raises(TransferFailed, match="nccl moves a GPU's pages"):
        transport.open()
    transport.close()
