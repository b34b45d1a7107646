"""Senders whose threads write into another pool, as cuda_ipc's: with shared memory in a GPU's place."""

import threading
from collections.abc import Iterator
from queue import Queue

import msgspec
import pytest
import torch

from baton.kernels.pages import Offsets
from baton.kvtransfer.protocol.transfer_plan import TransferPlan, plan_transfer
from baton.kvtransfer.transports.base import LocalRank, Piece
from baton.kvtransfer.transports.direct import ShmSender
from tests.layouts import a_layout
from tests.transfer_ends import Destination, PlannedTransfer, Push, local_rank

LAYOUT = a_layout(num_layers=8, num_kv_heads=8, head_dim=64, dtype="bfloat16")
PLAN = plan_transfer(LAYOUT, LAYOUT, 0, 0)
NUM_PAGES = 128  # 32 MiB: several parts
SOURCE_PAGES = tuple(torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(1)).tolist())
PAGES = SOURCE_PAGES[::-1]


class TwoThreads(ShmSender):
    """No copy begins before the gate is open."""

    def __init__(self, rank: LocalRank, address: str, num_threads: int) -> None:
        super().__init__(rank, address)
        self.gate = threading.Event()
        self.inline_bytes = -1
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(num_threads)]

    def copy(self, plan: TransferPlan, source_offset_N: Offsets, destination_offset_N: Offsets) -> None:
        assert self.gate.wait(10)
        super().copy(plan, source_offset_N, destination_offset_N)


@pytest.fixture
def destination() -> Iterator[Destination]:
    made = Destination(LAYOUT, NUM_PAGES)
    yield made
    made.close()


@pytest.fixture
def source() -> LocalRank:
    return local_rank(torch.randint(0, 256, (NUM_PAGES, LAYOUT.page_bytes), dtype=torch.uint8))


def granted(destination: Destination, number: int, *, is_bulk: bool = False) -> Piece:
    """Return all of a transfer that the destination has granted."""
    grant = PlannedTransfer(
        id=(bytes([number]) * 16).hex(),
        source=LAYOUT,
        destination=LAYOUT,
        num_units=NUM_PAGES,
        source_pages=SOURCE_PAGES,
        pages=PAGES,
    )
    destination.grant(msgspec.to_builtins(grant))
    return grant.piece(0, NUM_PAGES, is_bulk=is_bulk)


def test_threads_share_the_parts_and_abort_waits_for_them_all(
    destination: Destination, source: LocalRank
) -> None:
    sender = TwoThreads(source, destination.addresses()["shm"], 2)
    sender.gate.set()
    whole, half = granted(destination, 1), NUM_PAGES // 2
    sender.open()
    halves = [msgspec.structs.replace(whole, first=first, stop=first + half) for first in (0, half)]
    pushes = [Push(sender, piece) for piece in halves]
    assert all(push.outcome().is_done for push in pushes)
    assert torch.equal(destination.pages[list(PAGES)], source.pool[list(SOURCE_PAGES)])

    again = Push(sender, whole)
    sender.abort(whole.transfer)
    source.pool.zero_()  # the source may reuse its pages at once
    left = destination.pages.clone()
    assert again.has_ended
    sender.close()
    assert torch.equal(destination.pages, left)


def test_hand_off_overtakes_a_pull_that_has_begun(destination: Destination, source: LocalRank) -> None:
    sender = TwoThreads(source, destination.addresses()["shm"], 1)
    pull, hand_off = granted(destination, 1, is_bulk=True), granted(destination, 2)
    sender.open()
    ended: Queue[str] = Queue()
    sender.push(pull, lambda outcome: ended.put("pull"))
    sender.push(msgspec.structs.replace(hand_off, stop=1), lambda outcome: ended.put("hand-off"))
    sender.gate.set()
    assert [ended.get(timeout=10), ended.get(timeout=10)] == ["hand-off", "pull"]
    assert torch.equal(destination.pages[list(PAGES)], source.pool[list(SOURCE_PAGES)])
    sender.close()
