"""A destination rank in a process of its own, which does what it is told.

The same `Destination` serves in the tests' own process where nothing has to die.
"""

import secrets
from pathlib import Path
from typing import Final, Literal

import msgspec
import torch
from torch import Tensor

from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.ranks.receive_registration import ReceiveRegistration, ReceiveRegistrations
from baton.kvtransfer.transports.group_receiver import GroupReceiver
from baton.kvtransfer.transports.rank_pair import GroupName, GroupSettings
from baton.kvtransfer.transports.rendezvous import Rendezvous
from baton.pages import DTYPE_BYTES, PageLayout
from tests.remote import Remote

WRITER: Final = b"w" * 16
SETTINGS: Final = GroupSettings(connect_s=10.0, stall_s=1.0)


class Rank(msgspec.Struct, frozen=True):
    """A rank of a layout, with a pool of so many pages."""

    layout: PageLayout
    rank: int
    num_pages: int

    def pool(self, device: str = "cpu") -> Tensor:
        cut = self.layout
        shape = (self.num_pages, cut.num_layers, 2, cut.heads_per_rank, cut.page_size, cut.head_dim)
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[cut.dtype]
        assert dtype.itemsize == DTYPE_BYTES[cut.dtype]
        return torch.zeros(shape, dtype=dtype, device=device)


class Invite(msgspec.Struct, tag=True):
    source: Rank


class Land(msgspec.Struct, tag=True):
    """A grant of pages 0, 1, 2 ... backwards from the last: [num_pages - 1, ...]."""

    source: Rank
    id: bytes
    epoch: int
    num_units: int


class End(msgspec.Struct, tag=True):
    id: bytes


class Save(msgspec.Struct, tag=True):
    path: str


Command = Invite | Land | End | Save


class Answer(msgspec.Struct):
    meeting: Rendezvous | None = None
    pages: tuple[int, ...] = ()
    num_pairs: int = 0


class Destination:
    def __init__(self, name: GroupName, me: Rank, device: str = "cpu") -> None:
        self.me = me
        self.pool = me.pool(device)
        self.registrations = ReceiveRegistrations(me.num_pages)
        self.receiver = GroupReceiver(name, self.registrations, self.pool, settings=SETTINGS)

    def do(self, command: Command) -> Answer:
        meeting, pages = None, tuple[int, ...]()
        if isinstance(command, Invite):
            source = command.source
            meeting = self.receiver.invite(
                plan_transfer(source.layout, self.me.layout, source.rank, self.me.rank),
                secrets.token_bytes(32),
            )
        elif isinstance(command, Land):
            pages = self._land(command)
        elif isinstance(command, End):
            self.registrations.close(command.id, lambda: None)
        else:
            content = self.pool.cpu().view(-1).view(torch.uint8).numpy().tobytes()
            Path(command.path).write_bytes(content)
        return Answer(meeting, pages, self.receiver.num_pairs())

    def _land(self, command: Land) -> tuple[int, ...]:
        source = command.source
        plan = plan_transfer(source.layout, self.me.layout, source.rank, self.me.rank)
        count = plan.destination.num_pages(command.num_units)
        pages = tuple(range(self.me.num_pages))[::-1][:count]
        self.registrations.add(
            ReceiveRegistration(
                id=command.id,
                epoch=command.epoch,
                plan=plan,
                num_units=command.num_units,
                pages=pages,
                writer=WRITER,
            )
        )
        return pages

    def close(self) -> None:
        self.receiver.close()


class RemoteDestination(Remote):
    """A Destination in another process."""

    def __init__(self, name: GroupName, me: Rank, device: Literal["cpu", "cuda"] = "cpu") -> None:
        super().__init__(_destination, name, me, device)
        self.me = me

    def do(self, command: Command) -> Answer:
        answer: Answer = self.call("do", command)
        return answer

    def close(self) -> None:
        self.kill()


def _destination(name: GroupName, me: Rank, device: str) -> Destination:
    torch.set_num_threads(1)
    return Destination(name, me, device)
