"""Messages between the two ranks of a pair: a record and a payload one way, an answer the other way.

Both ends have NUM_SLOTS slots of staging memory. The source has at most that many messages unanswered, the
destination as many receives posted, so a message never waits for its receiver to become ready. An answer
says that the message's slot at the destination is free again.

gloo carries a message whole. With NCCL the record and the answer go over gloo, which a silent or dead peer
cannot block for good, and the payload from GPU to GPU, its length known to both by then.
"""

import contextlib
from datetime import timedelta
from typing import Final, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from baton.errors import TransferFailed
from baton.kernels.huge_pages import huge_zeros
from baton.kvtransfer.page_packing import DevicePages, HostPages, PagePacking
from baton.kvtransfer.pair import (
    FOREVER,
    SOURCE,
    GroupName,
    GroupSettings,
    PairGroup,
    Pending,
    abort_gloo,
    join_gloo,
    join_nccl,
    translated,
)
from baton.kvtransfer.tcp_records import ANSWER_BYTES, HEADER_BYTES, MAX_PART_BYTES
from baton.kvtransfer.transfer_plan import TransferPlan

PART_BYTES: Final = 8 * 2**20  # smaller ones wait longer for each other than they travel
NUM_SLOTS: Final = 3  # one is packed, one on its way, one unpacked
_PAYLOAD_AT: Final = -(-HEADER_BYTES // 64) * 64  # on a cache line
_MESSAGE_TAG: Final = 0
_ANSWER_TAG: Final = 1


class PairChannel(Protocol):
    """TransferFailed, from every call, when the pair is broken or a wait takes too long."""

    def payload(self, slot: int, num_bytes: int) -> Tensor:
        """The slot's staging memory: uint8 [num_bytes], where the pool is."""

    def send(self, slot: int, record: bytes, num_bytes: int) -> None:
        """Start a message with what `payload` has."""

    def receive_answer(self, slot: int, timeout_s: float) -> bytes:
        """The answer to the message that was sent from this slot."""

    def post(self, slot: int) -> None:
        """Be ready for the next message."""

    def receive(self, slot: int) -> bytes:
        """The record of the message that was posted here, as long as it takes."""

    def fetch(self, slot: int, num_bytes: int, timeout_s: float) -> Tensor:
        """Its payload, all of it."""

    def answer(self, slot: int, record: bytes, timeout_s: float) -> None: ...

    def abort(self) -> None:
        """End the pair and all waits on it, from any thread; any number of times."""


class Records:
    """The gloo half of a pair: messages of at most `message_bytes`, and answers."""

    def __init__(self, group: PairGroup, peer: int, message_bytes: int) -> None:
        self._group = group
        self._peer = peer
        self.messages = [huge_zeros((_PAYLOAD_AT + message_bytes,), torch.uint8) for _ in range(NUM_SLOTS)]
        self._answers = [torch.empty(ANSWER_BYTES, dtype=torch.uint8) for _ in range(NUM_SLOTS)]
        self._scratch = torch.empty(1, dtype=torch.uint8)
        self._message_work: list[Pending | None] = [None] * NUM_SLOTS
        self._answer_work: list[Pending | None] = [None] * NUM_SLOTS

    def payload(self, slot: int, num_bytes: int) -> Tensor:
        return self.messages[slot][_PAYLOAD_AT : _PAYLOAD_AT + num_bytes]

    def send(self, slot: int, record: bytes, num_bytes: int) -> None:
        message = self.messages[slot][: _PAYLOAD_AT + num_bytes]
        _write(message, record)
        with translated("gloo"):
            self._message_work[slot] = self._group.send([message], self._peer, _MESSAGE_TAG)
            self._answer_work[slot] = self._group.recv([self._answers[slot]], self._peer, _ANSWER_TAG)

    def receive_answer(self, slot: int, timeout_s: float) -> bytes:
        self._wait(self._answer_work[slot], timedelta(seconds=timeout_s))
        self._wait(self._message_work[slot], timedelta(seconds=timeout_s))
        return self._answers[slot].numpy().tobytes()

    def post(self, slot: int) -> None:
        with translated("gloo"):
            self._message_work[slot] = self._group.recv([self.messages[slot]], self._peer, _MESSAGE_TAG)

    def receive(self, slot: int) -> bytes:
        self._wait(self._message_work[slot], FOREVER)
        return self.messages[slot][:HEADER_BYTES].numpy().tobytes()

    def answer(self, slot: int, record: bytes, timeout_s: float) -> None:
        self._wait(self._answer_work[slot], timedelta(seconds=timeout_s))  # the one before from this slot
        _write(self._answers[slot], record)
        with translated("gloo"):
            self._answer_work[slot] = self._group.send([self._answers[slot]], self._peer, _ANSWER_TAG)

    def abort(self) -> None:
        abort_gloo(self._group, self._peer, self._scratch)

    def _wait(self, work: Pending | None, timeout: timedelta) -> None:
        if work is not None:
            with translated("gloo"):
                work.wait(timeout)


class GlooChannel(Records):
    def fetch(self, slot: int, num_bytes: int, timeout_s: float) -> Tensor:
        return self.payload(slot, num_bytes)


class NcclChannel(Records):
    """`bulk` and the staging memory are the GPU's; its work is ordered by the packing's stream."""

    def __init__(
        self, group: PairGroup, bulk: PairGroup, peer: int, payload_bytes: int, packing: DevicePages
    ) -> None:
        super().__init__(group, peer, 0)
        self._bulk = bulk
        self._bulk_work: list[Pending | None] = [None] * NUM_SLOTS
        self._packing = packing
        self._stream = packing.stream
        self._staging = [packing.staging(payload_bytes) for _ in range(NUM_SLOTS)]

    def payload(self, slot: int, num_bytes: int) -> Tensor:
        return self._staging[slot][:num_bytes]

    def send(self, slot: int, record: bytes, num_bytes: int) -> None:
        super().send(slot, record, 0)
        with translated("nccl"), torch.cuda.stream(self._stream):
            self._bulk_work[slot] = self._bulk.send([self.payload(slot, num_bytes)], self._peer, 0)

    def fetch(self, slot: int, num_bytes: int, timeout_s: float) -> Tensor:
        payload = self.payload(slot, num_bytes)
        with translated("nccl"), torch.cuda.stream(self._stream):
            work = self._bulk_work[slot] = self._bulk.recv([payload], self._peer, 0)
            work.wait()  # of the stream, not of this thread
        self._packing.finish(timeout_s)  # nothing is enqueued behind a receive that may never end
        return payload

    def connect(self, rank: int, timeout_s: float) -> None:
        """NCCL connects with the first message: have it fail here, not in the middle of a transfer."""
        if rank == SOURCE:
            with translated("nccl"), torch.cuda.stream(self._stream):
                self._bulk.send([self.payload(0, 1)], self._peer, 0).wait()
            self._packing.finish(timeout_s)
        else:
            self.fetch(0, 1, timeout_s)

    def abort(self) -> None:
        super().abort()
        with contextlib.suppress(RuntimeError):  # it may have ended by itself
            self._bulk.abort()


def join_pair(
    name: GroupName,
    store: Store,
    rank: int,
    packing: PagePacking,
    plan: TransferPlan,
    settings: GroupSettings,
) -> PairChannel:
    """Join the other rank, whom `store` reaches and nobody else. TransferFailed when it does not come in
    time, or cannot be talked to this way.
    """
    peer = 1 - rank
    num_bytes = payload_bytes(plan)
    if name == "gloo":
        if not isinstance(packing, HostPages):
            raise TransferFailed("gloo moves a CPU's pages, these are a GPU's")
        return GlooChannel(join_gloo(store, rank, settings.host, settings.connect_s), peer, num_bytes)
    if not isinstance(packing, DevicePages):
        raise TransferFailed("nccl moves a GPU's pages, these are a CPU's")
    records = join_gloo(store, rank, settings.host, settings.connect_s)
    channel = NcclChannel(records, join_nccl(store, rank, settings.connect_s), peer, num_bytes, packing)
    channel.connect(rank, settings.connect_s)
    return channel


def payload_bytes(plan: TransferPlan) -> int:
    """Room for any part: they come within half of PART_BYTES and a unit. The same on both sides."""
    num_bytes = PART_BYTES + PART_BYTES // 2 + plan.unit_bytes
    if num_bytes > MAX_PART_BYTES:
        raise TransferFailed(f"a unit of {plan.unit_bytes} bytes is too large for one message")
    return num_bytes


def _write(message: Tensor, record: bytes) -> None:
    message[: len(record)] = torch.frombuffer(bytearray(record), dtype=torch.uint8)
