"""Several threads that write into another's pool, as cuda_ipc has: with shared memory in a GPU's place."""

import threading
from collections.abc import Iterator
from queue import Queue

import pytest
import torch

from baton.kvtransfer.protocol.transfer_plan import Offsets, TransferPlan, plan_transfer
from baton.kvtransfer.ranks.pages import PageMemory, SharedPool
from baton.kvtransfer.ranks.receive_registration import ReceiveRegistration, ReceiveRegistrations
from baton.kvtransfer.transports.base import OutgoingTransfer, Piece, TransferStatus
from baton.kvtransfer.transports.shm import ShmListener, ShmTransport
from baton.pages import PageLayout

KEY = b"the key of the tests' cluster"
WRITER = b"source incarnati"
LAYOUT = PageLayout(tp_size=1, page_size=16, num_layers=8, num_kv_heads=8, head_dim=64, dtype="bfloat16")
PLAN = plan_transfer(LAYOUT, LAYOUT, 0, 0)
NUM_PAGES = 128  # 32 MiB: several parts
SOURCE_PAGES = tuple(torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(1)).tolist())
PAGES = SOURCE_PAGES[::-1]


class TwoThreads(ShmTransport):
    inline_bytes = -1
    num_threads = 2


class Gated(ShmTransport):
    """Its first copy begins when the gate is opened."""

    inline_bytes = -1
    gate = threading.Event()

    def copy(self, plan: TransferPlan, source_offset_N: Offsets, destination_offset_N: Offsets) -> None:
        assert self.gate.wait(10)
        super().copy(plan, source_offset_N, destination_offset_N)


class Destination:
    def __init__(self) -> None:
        self.shared = SharedPool()
        self.pool = self.shared.zeros((NUM_PAGES, LAYOUT.page_bytes), torch.uint8)
        self.registrations = ReceiveRegistrations(NUM_PAGES)
        self.door = ShmListener(self.shared, self.registrations, KEY, lambda transfers: None)

    def grant(self, transfer: OutgoingTransfer) -> None:
        self.shared.generations.grant(PAGES, (1,) * NUM_PAGES)
        self.registrations.add(
            ReceiveRegistration(
                id=transfer.id,
                epoch=transfer.epoch,
                plan=PLAN,
                num_units=NUM_PAGES,
                pages=PAGES,
                writer=WRITER,
                may_write_directly=True,
            )
        )


@pytest.fixture
def destination() -> Iterator[Destination]:
    made = Destination()
    yield made
    made.door.close()
    made.shared.close()


def outgoing(number: int, *, is_bulk: bool = False) -> OutgoingTransfer:
    return OutgoingTransfer(
        id=bytes([number]) * 16,
        epoch=1,
        plan=PLAN,
        source_pages=SOURCE_PAGES,
        destination_pages=PAGES,
        destination_generations=(1,) * NUM_PAGES,
        is_bulk=is_bulk,
    )


def test_threads_share_the_parts_and_abort_waits_for_them_all(destination: Destination) -> None:
    source = torch.randint(0, 256, (NUM_PAGES, LAYOUT.page_bytes), dtype=torch.uint8)
    ended = threading.Semaphore(0)
    transport = TwoThreads(
        destination.door.address,
        KEY,
        PageMemory.of(source),
        WRITER,
        on_end=lambda handle: ended.release(),
    )
    destination.grant(outgoing(1))
    transport.open()
    transfer_queue = [
        transport.push(Piece(outgoing(1), first, first + NUM_PAGES // 2)) for first in (0, NUM_PAGES // 2)
    ]
    for _ in transfer_queue:
        assert ended.acquire(timeout=10)
    assert [transport.poll(handle).status for handle in transfer_queue] == [TransferStatus.DONE] * 2
    assert torch.equal(destination.pool[list(PAGES)], source[list(SOURCE_PAGES)])

    again = transport.push(Piece(outgoing(1), 0, NUM_PAGES))
    transport.abort(outgoing(1).id)
    source.zero_()  # ours again, at once
    left = destination.pool.clone()
    assert transport.poll(again).status.is_final
    transport.close()
    assert torch.equal(destination.pool, left)


def test_a_hand_off_overtakes_a_pull_that_has_begun(destination: Destination) -> None:
    source = torch.randint(0, 256, (NUM_PAGES, LAYOUT.page_bytes), dtype=torch.uint8)
    ended: Queue[int] = Queue()
    transport = Gated(destination.door.address, KEY, PageMemory.of(source), WRITER, on_end=ended.put)
    pull, hand_off = outgoing(1, is_bulk=True), outgoing(2)
    for transfer in (pull, hand_off):
        destination.grant(transfer)
    transport.open()
    transfer_queue = [transport.push(Piece(pull, 0, NUM_PAGES)), transport.push(Piece(hand_off, 0, 1))]
    Gated.gate.set()
    assert [ended.get(timeout=10), ended.get(timeout=10)] == transfer_queue[::-1]
    assert torch.equal(destination.pool[list(PAGES)], source[list(SOURCE_PAGES)])
    transport.close()
