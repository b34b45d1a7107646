"""Who gets a meeting, and who does not."""

import socket
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from baton.errors import TransferFailed
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.ranks.receive_registration import ReceiveRegistration, ReceiveRegistrations
from baton.kvtransfer.transports.base import OutgoingTransfer, Piece
from baton.kvtransfer.transports.group_receiver import (
    GroupListener,
    GroupReceiver,
    RendezvousRequest,
    request_rendezvous,
)
from baton.kvtransfer.transports.listener import MAX_NEWCOMERS
from baton.kvtransfer.transports.rank_pair import GroupSettings, payload_bytes
from baton.kvtransfer.transports.torch_distributed import GroupTransport
from baton.pages import PageLayout
from baton.rpc.connection import DroppedPeers
from tests.transfer_ends import wait_for
from tests.unit.kvtransfer.transports.test_torch_distributed import wait

KEY = b"the cluster's key"
SETTINGS = GroupSettings(connect_s=5.0, stall_s=2.0)
LAYOUT = PageLayout(tp_size=1, page_size=16, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")
PLAN = plan_transfer(LAYOUT, LAYOUT, 0, 0)
KNOCK = RendezvousRequest(name="gloo", layout=LAYOUT, rank=0, payload_bytes=payload_bytes(PLAN))
OTHER_MODEL = PageLayout(tp_size=1, page_size=16, num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32")


class House:
    def __init__(self) -> None:
        self.pool = torch.zeros(6, PLAN.unit_bytes, dtype=torch.uint8)
        self.registrations = ReceiveRegistrations(6)
        self.dropped = DroppedPeers()
        self.receiver = GroupReceiver("gloo", self.registrations, self.pool, settings=SETTINGS)
        self.door = GroupListener(self.receiver, LAYOUT, 0, KEY, dropped=self.dropped)


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.door.close()
    made.receiver.close()


def test_a_source_that_holds_the_key_moves_pages(house: House) -> None:
    meet = partial(request_rendezvous, house.door.address, KEY, KNOCK, SETTINGS.connect_s)
    pool = torch.randint(0, 256, house.pool.shape, dtype=torch.uint8)
    transport = GroupTransport("gloo", meet, pool, PLAN, settings=SETTINGS)
    transport.open()
    house.registrations.add(
        ReceiveRegistration(id=b"t" * 16, epoch=3, plan=PLAN, num_units=2, pages=(5, 1), writer=b"w" * 16)
    )
    transfer = OutgoingTransfer(
        id=b"t" * 16,
        epoch=3,
        plan=PLAN,
        source_pages=(0, 4),
        destination_pages=(5, 1),
        destination_generations=(1, 1),
    )
    assert wait(transport, transport.push(Piece(transfer, 0, 2))).reason == ""
    assert torch.equal(house.pool[5], pool[0]) and torch.equal(house.pool[1], pool[4])
    assert not transport.is_broken
    transport.close()
    assert transport.is_broken


@pytest.mark.parametrize("key", [b"another cluster's key", b"short"])
def test_another_key_gets_no_meeting(house: House, key: bytes) -> None:
    with pytest.raises(TransferFailed, match="gloo 127.0.0.1"):
        request_rendezvous(house.door.address, key, KNOCK, SETTINGS.connect_s)
    assert house.receiver.num_pairs() == 0


@pytest.mark.parametrize(
    ("rendezvous_request", "reason"),
    [
        (
            RendezvousRequest(name="nccl", layout=LAYOUT, rank=0, payload_bytes=payload_bytes(PLAN)),
            "a door of gloo",
        ),
        (
            RendezvousRequest(name="gloo", layout=LAYOUT, rank=1, payload_bytes=payload_bytes(PLAN)),
            "no rank 1",
        ),
        (
            RendezvousRequest(name="gloo", layout=OTHER_MODEL, rank=0, payload_bytes=payload_bytes(PLAN)),
            "num_layers",
        ),
        (RendezvousRequest(name="gloo", layout=LAYOUT, rank=0, payload_bytes=1), "of 1 there"),
    ],
)
def test_a_source_that_does_not_fit_is_told_why(
    house: House, rendezvous_request: RendezvousRequest, reason: str
) -> None:
    with pytest.raises(TransferFailed, match=reason):
        request_rendezvous(house.door.address, KEY, rendezvous_request, SETTINGS.connect_s)
    assert house.receiver.num_pairs() == 0


def test_silent_strangers_keep_no_source_from_its_meeting(house: House) -> None:
    silent = [socket.create_connection(house.door.address) for _ in range(3 * MAX_NEWCOMERS)]
    wait_for(lambda: house.dropped.counts().get("crowd", 0) >= MAX_NEWCOMERS)
    request_rendezvous(house.door.address, KEY, KNOCK, SETTINGS.connect_s)
    for sock in silent:
        sock.close()


def test_nobody_at_the_door_is_a_failure(house: House) -> None:
    house.door.close()
    with pytest.raises(TransferFailed):
        request_rendezvous(house.door.address, KEY, KNOCK, SETTINGS.connect_s)
