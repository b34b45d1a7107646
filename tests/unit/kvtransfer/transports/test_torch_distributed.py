"""Pairs of ranks over torch.distributed. Behaviour common to transports: faults/test_transports.py."""

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import NamedTuple, cast

import msgspec
import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore

from baton.errors import TransferFailed
from baton.kernels.pages import Offsets
from baton.kvtransfer.protocol.transfer_plan import TransferPlan, plan_transfer
from baton.kvtransfer.transports import torch_distributed
from baton.kvtransfer.transports.base import LocalRank, Piece, TransferQueue
from baton.kvtransfer.transports.pages import DevicePages, HostPages, PageMemory, PagePacking
from baton.kvtransfer.transports.rank_pair import (
    ANSWER_TAG,
    DESTINATION,
    FOREVER,
    NUM_SLOTS,
    PAYLOAD_TAG,
    RECORD_TAG,
    SOURCE,
    GlooChannel,
    PairGroup,
    PairStore,
    Work,
    join_gloo,
    part_size,
)
from baton.kvtransfer.transports.records import MAX_BATCH, MAX_PART_BYTES
from baton.kvtransfer.transports.registry import TRANSPORTS
from baton.kvtransfer.transports.torch_distributed import (
    GroupListener,
    GroupSender,
    GroupSettings,
    GroupTransport,
    NcclChannel,
    NcclTransport,
    join_nccl,
)
from tests.layouts import a_layout
from tests.transfer_ends import (
    ObservedGloo,
    Push,
    local_rank,
    peer_rank,
    piece_of,
    registration_of,
)
from tests.waiting import wait_for

LAYOUT = a_layout(num_layers=3, num_kv_heads=4, head_dim=1024, dtype="bfloat16")
PLAN = plan_transfer(LAYOUT, LAYOUT, 0, 0)
NUM_PAGES = 60  # of 768 KiB: many parts
SETTINGS = GroupSettings(connect_s=5.0, stall_s=2.0)
PIECE = piece_of(PLAN, tuple(range(50)), tuple(range(50))[::-1])


class Pair:
    """Both ends in this process, with messages of the transport that is given."""

    def __init__(self, transport: GroupTransport) -> None:
        self.transport = transport
        shape = NUM_PAGES, LAYOUT.page_bytes
        self.source = torch.randint(0, 2**62, (NUM_PAGES, LAYOUT.page_bytes // 8)).view(torch.uint8)
        self.pages = torch.zeros(shape, dtype=torch.uint8)
        self.rank = local_rank(self.pages, layout=LAYOUT)
        self.listener = GroupListener(transport, self.rank, SETTINGS)
        peer = peer_rank(transport.name, self.listener.address, LAYOUT)
        self.sender = GroupSender(transport, local_rank(self.source, layout=LAYOUT), peer, SETTINGS)

    def grant(self, piece: Piece) -> Piece:
        self.rank.registrations.add(registration_of(piece))
        return piece

    def has_arrived(self, piece: Piece) -> bool:
        return torch.equal(self.pages[list(piece.destination_pages)], self.source[list(piece.source_pages)])

    def close(self) -> None:
        self.sender.close()
        self.listener.close()


@pytest.fixture
def gloo() -> Iterator[Pair]:
    pair = Pair(ObservedGloo())
    yield pair
    pair.close()


def num_pairs() -> int:
    return sum(thread.name == "gloo-answer" for thread in threading.enumerate())


@pytest.mark.parametrize("unit_mib", [1, 8, 20, 40, 63])
def test_message_has_room_for_a_part_of_any_units(unit_mib: int) -> None:
    layout = msgspec.structs.replace(LAYOUT, num_layers=4 * unit_mib)
    plan = plan_transfer(layout, layout, 0, 0)
    assert plan.sent_unit_bytes == unit_mib * 2**20
    for transport in [each for each in TRANSPORTS.values() if isinstance(each, GroupTransport)]:
        size = part_size(plan, transport.part_bytes)
        room = size + plan.sent_unit_bytes
        assert room <= MAX_PART_BYTES
        assert (size == transport.part_bytes) == (
            transport.part_bytes + plan.sent_unit_bytes <= MAX_PART_BYTES
        )
        queue = TransferQueue(size, 1)
        for num_units in (1, 2, 5, 31, 64, 100):
            queue.push(piece_of(plan, tuple(range(num_units))), lambda outcome: None)
        sizes = [part.num_bytes for part in iter(partial(queue.take, wait=False), None)]
        assert max(sizes) <= room and sum(sizes) == 203 * plan.sent_unit_bytes


def test_closed_sender_fails_its_pieces_and_ends_the_pair_on_both_sides(gloo: Pair) -> None:
    gloo.sender.open()
    num_threads = threading.active_count()
    push = Push(gloo.sender, gloo.grant(PIECE))
    gloo.sender.close()
    gloo.sender.close()
    assert push.outcome().reason == "the transport was closed" and gloo.sender.is_broken
    wait_for(lambda: threading.active_count() <= num_threads - 3 and num_pairs() == 0)


def test_closed_destination_ends_its_pairs(gloo: Pair) -> None:
    gloo.sender.open()
    gloo.listener.close()
    assert num_pairs() == 0
    assert not Push(gloo.sender, gloo.grant(PIECE)).outcome().is_done


def test_destination_without_room_forms_no_pair(gloo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_distributed, "MAX_PAIRS", 0)
    with pytest.raises(TransferFailed, match="gloo: no more than 0 pairs"):
        gloo.sender.open()
    wait_for(lambda: num_pairs() == 0)


def test_nccl_is_refused_for_pages_of_a_cpu() -> None:
    nccl = NcclTransport()
    rank = local_rank(torch.zeros((1, LAYOUT.page_bytes), dtype=torch.uint8), layout=LAYOUT)
    assert nccl.listen(rank) is None
    with contextlib.closing(GroupListener(nccl, rank, SETTINGS)) as listener:
        sender = GroupSender(nccl, rank, peer_rank("nccl", listener.address, LAYOUT), SETTINGS)
        with contextlib.closing(sender), pytest.raises(TransferFailed, match="nccl: .* not on a GPU"):
            sender.open()


# Messages of a pair, as the ends hand them to torch.


def small_piece(name: bytes, first_page: int, num_pages: int = 2) -> Piece:
    pages = tuple(range(first_page, first_page + num_pages))
    return piece_of(PLAN, pages, transfer=name * 16)


def counts(pair: Pair) -> tuple[int, int, int]:
    """Return the numbers of records, payloads and answers."""
    assert isinstance(pair.transport, ObservedGloo)
    num_sent = pair.transport.num_sent
    return num_sent[SOURCE, RECORD_TAG], num_sent[SOURCE, PAYLOAD_TAG], num_sent[DESTINATION, ANSWER_TAG]


def test_parts_that_wait_share_records_and_answers(gloo: Pair) -> None:
    pushes = [Push(gloo.sender, gloo.grant(small_piece(bytes([name]), 2 * name))) for name in range(20)]
    gloo.sender.open()
    assert all(push.outcome().is_done for push in pushes)
    assert counts(gloo) == (20 // MAX_BATCH, 20, 20 // MAX_BATCH)
    assert torch.equal(gloo.pages[:40], gloo.source[:40])


def test_refused_part_fails_alone_in_its_batch(gloo: Pair) -> None:
    first, ended, old, last = (
        small_piece(name, 2 * place) for place, name in enumerate((b"a", b"b", b"c", b"d"))
    )
    for piece in (first, last):
        gloo.grant(piece)
    gloo.rank.registrations.close(gloo.grant(ended).transfer, lambda: None)
    newer = msgspec.structs.replace(registration_of(old), epoch=2)
    gloo.rank.registrations.add(newer)
    pushes = [Push(gloo.sender, piece) for piece in (first, ended, old, last)]
    gloo.sender.open()
    assert [push.outcome().is_done for push in pushes] == [True, False, False, True]
    assert counts(gloo) == (1, 4, 1)
    assert gloo.has_arrived(first) and gloo.has_arrived(last) and not gloo.pages[2:6].any()
    assert not gloo.sender.is_broken


@pytest.mark.parametrize(
    ("rank", "tag", "number"),
    [
        (SOURCE, RECORD_TAG, 1),  # packed in part, nothing announced
        (SOURCE, PAYLOAD_TAG, 1),  # announced
        (SOURCE, PAYLOAD_TAG, 3),  # sent in part
        (DESTINATION, ANSWER_TAG, 1),  # written, not answered
        (SOURCE, RECORD_TAG, 2),  # the first of its batches answered or under way
    ],
)
@pytest.mark.parametrize("who", ["source", "destination"])
def test_abort_in_every_state_of_a_batch_leaves_no_page_and_no_slot(
    gloo: Pair, rank: int, tag: int, number: int, who: str
) -> None:
    """Two transfers share each batch, and one of them ends in the middle."""
    assert isinstance(gloo.transport, ObservedGloo)
    aborted, other = piece_of(PLAN, tuple(range(20)), transfer=b"a" * 16), small_piece(b"o", 20, 20)
    reused = threading.Event()
    safe: list[bytes] = []

    def abort() -> None:
        if who == "source":
            gloo.sender.abort(aborted.transfer)
            gloo.source[:20] = 0  # the pages belong to another request now
        gloo.rank.registrations.close(aborted.transfer, lambda: safe.append(aborted.transfer))
        reused.set()

    def on_send(sending_rank: int, sent_tag: int, sent_number: int) -> None:
        if (sending_rank, sent_tag, sent_number) == (rank, tag, number):
            threading.Thread(target=abort).start()
            time.sleep(0.02)  # it may have to wait for this thread

    gloo.transport.on_send = on_send
    sent = gloo.source.clone()
    for piece in (aborted, other):
        gloo.grant(piece)
    pieces = [
        msgspec.structs.replace(each, first=unit, stop=unit + 2)
        for unit in range(0, 20, 2)
        for each in (aborted, other)
    ]
    pushes = [Push(gloo.sender, piece) for piece in pieces]
    gloo.sender.open()
    assert reused.wait(10) and all(push.outcome().is_done for push in pushes[1::2])
    for push in pushes[::2]:
        push.outcome()
    wait_for(lambda: len(safe) == 1)
    assert gloo.has_arrived(other)
    written = [page for page in range(20) if gloo.pages[page].any()]
    assert torch.equal(gloo.pages[written], sent[written]), "a page was sent after its abort"
    gloo.pages.zero_()
    for name in range(3 * NUM_SLOTS):  # every slot, again and again
        assert Push(gloo.sender, gloo.grant(small_piece(bytes([name]), 40))).outcome().is_done
    assert not gloo.pages[:40].any() and gloo.has_arrived(small_piece(b"x", 40))
    assert gloo.rank.registrations.num_open() == 1 + 3 * NUM_SLOTS


def test_failed_packing_lets_go_of_every_part(gloo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = HostPages.pack

    def fail(pages: HostPages, plan: TransferPlan, offset_N: Offsets, payload: Tensor, lane: int = 0) -> None:
        if offset_N[0] == 10 * LAYOUT.page_bytes:
            raise TransferFailed("the GPU is gone")
        pack(pages, plan, offset_N, payload, lane)

    monkeypatch.setattr(HostPages, "pack", fail)
    pushes = [Push(gloo.sender, gloo.grant(small_piece(bytes([name]), 5 * name))) for name in range(4)]
    gloo.sender.open()
    assert "the GPU is gone" in pushes[3].outcome().reason and gloo.sender.is_broken
    for name in range(4):
        gloo.sender.abort(bytes([name]) * 16)  # would wait for a thread that never leaves the pages


def test_failed_unpacking_ends_the_pair_and_not_its_thread(
    gloo: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(HostPages, "unpack", fail)
    gloo.sender.open()
    push = Push(gloo.sender, gloo.grant(small_piece(b"a", 0)))
    assert not push.outcome().is_done and gloo.sender.is_broken
    wait_for(lambda: num_pairs() == 0)
    assert "out of memory" in caplog.text


# The channel that carries records over gloo and payloads over NCCL, with lanes. Another gloo group stands in
# for NCCL. A lane is a list of the calls that were enqueued on it, which run when the lane is waited for.

NUM_LANES = 2


class Lane(NamedTuple):
    number: int
    calls: deque[Callable[[], object]]


class LanedPages(HostPages):
    """A CPU's pages, copied on lanes as a GPU's are. `notes` has the calls as they are enqueued and run."""

    num_lanes = NUM_LANES

    def __init__(self, memory: PageMemory) -> None:
        super().__init__(memory)
        self.streams = [Lane(number, deque()) for number in range(NUM_LANES)]
        self.notes: list[tuple[str, int]] = []

    def enqueue(self, name: str, lane: int, call: Callable[[], object]) -> None:
        self.notes.append((name, lane))
        self.streams[lane].calls.append(call)

    def pack(self, plan: TransferPlan, offset_N: Offsets, staging: Tensor, lane: int = 0) -> None:
        self.enqueue("pack", lane, partial(super().pack, plan, offset_N, staging))

    def unpack(self, plan: TransferPlan, offset_N: Offsets, staging: Tensor, lane: int = 0) -> None:
        self.enqueue("unpack", lane, partial(super().unpack, plan, offset_N, staging))

    def finish(self, timeout_s: float = math.inf, lane: int = 0) -> None:
        self.notes.append(("finish", lane))
        calls = self.streams[lane].calls
        while calls:
            calls.popleft()()


class Current(threading.local):
    lane: Lane | None = None


class LanedWork(Work):
    """A receive that ends on the lane that waits for it."""

    def __init__(self, work: Work, current: Current, pages: LanedPages) -> None:
        self._work, self._current, self._pages = work, current, pages

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        assert self._current.lane is not None
        self._pages.enqueue(
            "receive", self._current.lane.number, lambda: self._work.wait(timedelta(seconds=5))
        )
        return True


class LanedGroup(PairGroup):
    """In place of NCCL: sends what a lane has done, and lets a lane wait for what it receives."""

    def __init__(self, group: PairGroup, current: Current, pages: LanedPages) -> None:
        self._group, self._current, self._pages = group, current, pages

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Work:
        lane = self._current.lane
        assert lane is not None and not lane.calls, "the part is not packed yet"
        self._pages.notes.append(("send", lane.number))
        return self._group.send(tensors, dstRank, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Work:
        return LanedWork(self._group.recv(tensors, srcRank, tag), self._current, self._pages)

    def abort(self) -> None:
        self._group.abort()


class LanedTransport(GroupTransport):
    """As NcclTransport, between pages of a CPU."""

    name = "nccl"
    is_automatic = True
    device = "cpu"
    part_bytes = 2 * LAYOUT.page_bytes

    def __init__(self, current: Current) -> None:
        self._current = current
        self.pages: dict[int, LanedPages] = {}  # by rank

    def join(
        self, store: PairStore, rank: int, host: str, packing: PagePacking, num_bytes: int, timeout_s: float
    ) -> GlooChannel:
        assert isinstance(packing, LanedPages)
        self.pages[rank] = packing
        records, bulk = (join_gloo(PrefixStore(name, store), rank, host, timeout_s) for name in ("a", "b"))
        group = LanedGroup(bulk, self._current, packing)
        channel = NcclChannel(records, group, 1 - rank, num_bytes, cast(DevicePages, packing))
        channel.connect(rank, timeout_s)
        packing.notes.clear()
        return channel


@pytest.fixture
def laned(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    current = Current()

    @contextlib.contextmanager
    def stream(lane: Lane) -> Iterator[None]:
        before, current.lane = current.lane, lane
        yield
        current.lane = before

    monkeypatch.setattr(torch_distributed, "on_stream", stream)
    monkeypatch.setattr(LocalRank, "packing", lambda rank, num_lanes: LanedPages(PageMemory.of(rank.pool)))
    pair = Pair(LanedTransport(current))
    yield pair
    pair.close()


def test_lanes_receive_while_others_unpack_and_unpack_behind_their_receive(laned: Pair) -> None:
    assert isinstance(laned.transport, LanedTransport)
    piece = laned.grant(piece_of(PLAN, tuple(range(2 * MAX_BATCH))))
    push = Push(laned.sender, piece)
    laned.sender.open()
    assert push.outcome().is_done and laned.has_arrived(piece)
    source, destination = laned.transport.pages[SOURCE].notes, laned.transport.pages[DESTINATION].notes
    assert source == [
        *(("pack", 0), ("pack", 1), ("finish", 0), ("send", 0)),
        *(("pack", 0), ("finish", 1), ("send", 1)),
        *(("pack", 1), ("finish", 0), ("send", 0)),
        *(("finish", 1), ("send", 1)),
    ]
    arrived = [("finish", 0), ("unpack", 0), ("finish", 0)], [("finish", 1), ("unpack", 1), ("finish", 1)]
    assert destination == [
        *(("receive", 0), ("receive", 1)),
        *(*arrived[0], ("receive", 0), *arrived[1], ("receive", 1)),
        *(*arrived[0], *arrived[1]),
    ]


def test_part_that_is_refused_frees_its_lane(laned: Pair) -> None:
    refused, written = small_piece(b"r", 0, 8), laned.grant(small_piece(b"w", 8, 8))
    pushes = [Push(laned.sender, piece) for piece in (refused, written)]
    laned.sender.open()
    assert [push.outcome().is_done for push in pushes] == [False, True]
    assert laned.has_arrived(written) and not laned.pages[:8].any()


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_torch_without_nccl_is_named() -> None:
    with pytest.raises(TransferFailed, match="has no NCCL"):
        join_nccl(HashStore(), SOURCE, 1.0)
