"""Two ranks that meet to form a process group of torch's, of the two of them alone.

1. For each source rank, and again after each failure, there is a new `Meeting`, with a secret that the two
   alone know (see kvtransfer/transports/group_receiver.py). They meet on a connection that only who holds the
   secret can make, and tell each other there how to connect (kvtransfer/transports/rendezvous.py).
2. Both `join` within a deadline, the destination as rank 0, the source as rank 1, each with a thread of its
   own. The default group is never touched, and whoever else is alive, dead or new makes no difference.
3. A group ends by `abort`, here or there. It is not mended: the next meeting has another secret.

Neither gloo nor NCCL knows who connects. Their sockets listen on the address given, which is for a network of
trusted hosts only; records are sealed under the secret (see kvtransfer/transports/tcp_streams.py), and pages
are checked by keyed digests (kvtransfer/ranks/digests.py), so that a stranger can break a pair but not have a
page taken for right.
"""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Final, Literal, Protocol, cast

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from baton.errors import TransferFailed
from baton.kernels.huge_pages import huge_zeros
from baton.kvtransfer.protocol.transfer_plan import TransferPlan
from baton.kvtransfer.ranks.pages import DevicePages, HostPages, PagePacking
from baton.kvtransfer.transports.tcp_streams import ANSWER_BYTES, HEADER_BYTES, MAX_PART_BYTES

DESTINATION: Final = 0
SOURCE: Final = 1
FOREVER: Final = timedelta(days=365)
_ABORT_TAG: Final = 2**20  # nothing is ever sent under it

GroupName = Literal["gloo", "nccl"]


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"  # of this machine, where the peer reaches it
    connect_s: float = 10.0  # for both ranks to meet
    stall_s: float = 5.0  # without an answer


class PendingJoin(Protocol):
    def wait(self, timeout: timedelta = ...) -> bool: ...


class PairGroup(Protocol):
    """The part of torch's process groups that is used here, gloo's and NCCL's alike."""

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> PendingJoin: ...

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> PendingJoin: ...

    def abort(self) -> None: ...


def join_gloo(store: Store, rank: int, host: str, timeout_s: float) -> PairGroup:
    """host: an address of this machine, the one to listen on. TransferFailed when the peer does not come."""
    with translated("gloo"):
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing from torch's stubs
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        return cast(PairGroup, ProcessGroupGloo(PrefixStore("gloo", store), rank, 2, options))


def abort_gloo(group: PairGroup, peer: int, scratch: Tensor) -> None:
    """End every wait on the group, in whatever thread, and its connection: the peer sees that at once.

    gloo has no call for it, but a receive that times out does just that.
    """
    with contextlib.suppress(RuntimeError):
        group.recv([scratch], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))


def join_nccl(store: Store, rank: int, timeout_s: float) -> PairGroup:
    """Connects with the first message. TransferFailed when this torch has no NCCL.

    torch ends the process when one of its own deadlines passes; that it never does is for our deadlines and
    `abort`, which come long before. TORCH_NCCL_ASYNC_ERROR_HANDLING=0 keeps it from doing so for a peer that
    died on another host: `config.prepare_nccl` sets that when an engine is loaded.
    """
    try:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # absent from CPU builds
    except ImportError as error:
        raise TransferFailed("this build of torch has no NCCL") from error
    with translated("nccl"):
        options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = FOREVER
        prefixed = PrefixStore("nccl", store)
        prefixed.set_timeout(timedelta(seconds=timeout_s))
        return cast(PairGroup, ProcessGroupNCCL(prefixed, rank, 2, options))


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """torch's errors as ours, at this border."""
    try:
        yield
    except RuntimeError as error:  # all of torch.distributed's derive from it
        raise TransferFailed(f"{what}: {_first_line(error)}") from error


def _first_line(error: RuntimeError) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# Messages between the two ranks of a pair: a record and a payload one way, an answer the other way.
#
# Both ends have NUM_SLOTS slots of staging memory. The source has at most that many messages unanswered, the
# destination as many receives posted, so a message never waits for its receiver to become ready. An answer
# says that the message's slot at the destination is free again.
#
# gloo carries a message whole. With NCCL the record and the answer go over gloo, which a silent or dead peer
# cannot block for good, and the payload from GPU to GPU, its length known to both by then.

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
        self._message_work: list[PendingJoin | None] = [None] * NUM_SLOTS
        self._answer_work: list[PendingJoin | None] = [None] * NUM_SLOTS

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

    def _wait(self, work: PendingJoin | None, timeout: timedelta) -> None:
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
        self._bulk_work: list[PendingJoin | None] = [None] * NUM_SLOTS
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
