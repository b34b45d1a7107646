"""A process group of torch's that one source rank and one destination rank form, and messages between the
two.

1. The two ranks have an authenticated connection (kvtransfer/transports/torch_distributed.py). `PairStore`
   carries over it what torch asks of a store: no third process can read or change the entries.
2. Both join, the destination as rank 0, the source as rank 1. torch's default group is never touched, and the
   pairs of other ranks make no difference.
3. A group ends by `abort`, at either rank. It is never mended: the next connection makes another group.

Neither gloo nor NCCL authenticates its peers, and their sockets listen on the address given: it must belong
to a network of trusted hosts. Records are sealed (kvtransfer/transports/records.py) and pages are checked by
keyed digests (kvtransfer/ranks/digests.py), so a stranger can break a pair but not forge a page.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Annotated, Final, Protocol, cast

import msgspec
import torch
from msgspec import Meta
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from baton.errors import BatonError, TransferFailed
from baton.kernels.native import huge_zeros
from baton.kvtransfer.protocol.transfer_plan import TransferPlan
from baton.kvtransfer.transports.records import BATCH_ANSWER_BYTES, BATCH_BYTES, MAX_BATCH, MAX_PART_BYTES
from baton.messages.codec import decode_as
from baton.rpc.connection import Connection

logger = logging.getLogger(__name__)

DESTINATION: Final = 0
SOURCE: Final = 1
MAX_ENTRIES: Final = 256  # of a peer; gloo sets one, NCCL one more
FOREVER: Final = timedelta(days=365)
_ABORT_TAG: Final = 2**20  # no message has this tag


class StoreEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A key that one of the two ranks has set, as sent to the other."""

    key: Annotated[str, Meta(max_length=256)]
    value: Annotated[bytes, Meta(max_length=2**16)]  # NIXL's grows with the network cards of a host


class PairStore(Store):
    """The store by which torch forms a group of the two ends of a connection.

    torch gets RuntimeError for a key that is not set within the timeout or before the connection ends.
    """

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        """connection: past its handshake; the store owns it."""
        super().__init__()
        self._connection = connection
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_over = False
        self._reader = threading.Thread(target=self._read, name="pair-store", daemon=True)
        self._reader.start()

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._values[key] = content
        try:
            self._connection.send(msgspec.msgpack.encode(StoreEntry(key, content)))
        except BatonError as error:
            raise RuntimeError(f"the peer is gone: {error}") from error

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else min(self._timeout_s, timeout.total_seconds())
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_over or self.check(keys), timeout_s):
                raise RuntimeError(f"the peer did not set {keys} within {timeout_s:g} s")
            if not self.check(keys):
                raise RuntimeError("the peer is gone")

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("the store of a pair counts nothing")

    def close(self) -> None:
        """Close the connection. Entries that have come can still be read."""
        self._connection.close()
        self._reader.join()

    def _read(self) -> None:
        try:
            for _ in range(MAX_ENTRIES):
                entry = self._connection.recv_message(lambda body: decode_as(StoreEntry, body, "entry"))
                with self._changed:
                    self._values[entry.key] = entry.value
                    self._changed.notify_all()
        except (BatonError, TimeoutError) as error:
            logger.debug("the connection of a pair ended: %s", error)
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()


class Work(Protocol):
    """The handle of a message that torch sends or receives."""

    def wait(self, timeout: timedelta = ...) -> bool: ...


class PairGroup(Protocol):
    """The methods of torch's process groups that are used here."""

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Work: ...

    def abort(self) -> None: ...


def join_gloo(store: Store, rank: int, host: str, timeout_s: float) -> PairGroup:
    """Form a gloo group of two. host: the address of this machine to listen on.

    TransferFailed when the peer does not join in time.
    """
    with translated("gloo"):
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing from torch's stubs
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        return cast(PairGroup, ProcessGroupGloo(PrefixStore("gloo", store), rank, 2, options))


@contextlib.contextmanager
def translated(library: str) -> Iterator[None]:
    """Raise torch's errors as TransferFailed, which names the library."""
    try:
        yield
    except RuntimeError as error:  # all errors of torch.distributed derive from it
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise TransferFailed(f"{library}: {lines[0]}") from error


# Messages: records and payloads from the source, answers from the destination.
#
# A record announces a batch of parts, and one answer ends the batch. Records and answers are numbered by
# batch, payloads by part. Part p lies in slot p % NUM_SLOTS of the staging memory, at both ends. The source
# has at most NUM_SLOTS parts unanswered, and the destination has a receive posted for each, so a message
# never waits for its receiver to become ready. An answer says that the batch's slots at the destination are
# free again.
#
# A record is a separate message. gloo never ends a wait for a message when the sender dies within it, so
# only the wait for a record, which is sent in one go, has no limit.

NUM_SLOTS: Final = 2 * MAX_BATCH  # one batch is packed or unpacked, one is on its way
RECORD_TAG: Final = 0
ANSWER_TAG: Final = 1
PAYLOAD_TAG: Final = 2


def part_size(plan: TransferPlan, wanted: int) -> int:
    """Return the bytes of a part: `wanted`, or less where large units leave less room in a message.

    Rounded up to whole units, a part has up to a unit more. TransferFailed when a unit is too large for a
    message.
    """
    part_bytes = min(wanted, MAX_PART_BYTES - plan.sent_unit_bytes)
    if part_bytes < 1:
        raise TransferFailed(f"a unit of {plan.sent_unit_bytes} bytes is too large for one message")
    return part_bytes


class GlooChannel:
    """A pair over gloo.

    TransferFailed, from every call but `abort`, when the pair is broken or a wait takes too long.
    """

    def __init__(self, group: PairGroup, peer: int, payloads: list[Tensor]) -> None:
        """peer: the other rank, SOURCE or DESTINATION. payloads: the staging memory of each slot, uint8."""
        self._group = group
        self._peer = peer
        self._payloads = payloads
        self._records = [torch.zeros(BATCH_BYTES, dtype=torch.uint8) for _ in payloads]
        self._answers = [torch.zeros(BATCH_ANSWER_BYTES, dtype=torch.uint8) for _ in payloads]
        self._scratch = torch.empty(1, dtype=torch.uint8)
        # A batch has a part at least, so no more batches than slots are unanswered.
        self._record_work: list[Work | None] = [None] * NUM_SLOTS
        self._answer_work: list[Work | None] = [None] * NUM_SLOTS
        self._payload_work: list[Work | None] = [None] * NUM_SLOTS

    def payload(self, part: int, num_bytes: int) -> Tensor:
        """Return the staging memory of a part: uint8 [num_bytes], on the device of the pool."""
        return self._payloads[part % NUM_SLOTS][:num_bytes]

    # The source.

    def send_record(self, batch: int, record: bytes, parts: Sequence[int]) -> None:
        """Announce parts; their payloads follow in this order."""
        slot = batch % NUM_SLOTS
        _write(self._records[slot], record)
        with translated("gloo"):
            self._record_work[slot] = self._group.send([self._records[slot]], self._peer, RECORD_TAG)
            self._answer_work[slot] = self._group.recv([self._answers[slot]], self._peer, ANSWER_TAG)

    def send_payload(self, part: int, num_bytes: int, lane: int) -> None:
        """Start to send the part that is in its slot. lane: of the packing that has packed the part."""
        with translated("gloo"):
            payload = self.payload(part, num_bytes)
            self._payload_work[part % NUM_SLOTS] = self._group.send([payload], self._peer, PAYLOAD_TAG)

    def end_batch(self) -> None:
        """Return once all payloads of the last record are under way; may wait for earlier ones."""

    def receive_answer(self, batch: int, parts: Sequence[int], timeout_s: float) -> bytes:
        """Return the answer to a batch of these parts. timeout_s: for each message of the batch."""
        timeout, slot = timedelta(seconds=timeout_s), batch % NUM_SLOTS
        _wait(self._record_work[slot], timeout)
        for part in parts:
            _wait(self._payload_work[part % NUM_SLOTS], timeout)
        _wait(self._answer_work[slot], timeout)
        return self._answers[slot].numpy().tobytes()

    # The destination.

    def post_record(self, batch: int) -> None:
        """Begin to receive the record of a batch."""
        slot = batch % NUM_SLOTS
        with translated("gloo"):
            self._record_work[slot] = self._group.recv([self._records[slot]], self._peer, RECORD_TAG)

    def post_payload(self, part: int) -> None:
        """Post the slot of a part. Parts are posted in order, once their slot is free."""
        slot = part % NUM_SLOTS
        with translated("gloo"):
            self._payload_work[slot] = self._group.recv([self._payloads[slot]], self._peer, PAYLOAD_TAG)

    def receive_record(self, batch: int) -> bytes:
        """Return the record of a batch that was posted; waits without a limit."""
        slot = batch % NUM_SLOTS
        _wait(self._record_work[slot], FOREVER)
        return self._records[slot].numpy().tobytes()

    def expect_payload(self, part: int, num_bytes: int, lane: int) -> None:
        """Begin to receive a part that was announced. lane: of the packing; the lane is idle until then."""

    def fetch_payload(self, part: int, num_bytes: int, lane: int, timeout_s: float) -> Tensor:
        """Wait for the whole of a part that is expected, and return it."""
        _wait(self._payload_work[part % NUM_SLOTS], timedelta(seconds=timeout_s))
        return self.payload(part, num_bytes)

    def answer(self, batch: int, record: bytes, timeout_s: float) -> None:
        """Start the answer to a batch."""
        slot = batch % NUM_SLOTS
        _wait(self._answer_work[slot], timedelta(seconds=timeout_s))  # the previous answer from here
        _write(self._answers[slot], record)
        with translated("gloo"):
            self._answer_work[slot] = self._group.send([self._answers[slot]], self._peer, ANSWER_TAG)

    def abort(self) -> None:
        """End the connection and the waits of all threads; the peer sees the end at once. May be repeated.

        gloo has no call for this, but a receive that times out has this effect.
        """
        with contextlib.suppress(RuntimeError):
            self._group.recv([self._scratch], self._peer, _ABORT_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """End the connection and free the slots. No thread is in a call, and no call follows."""
        self.abort()


def staging(num_bytes: int) -> list[Tensor]:
    """Return host memory for the payloads of a channel's slots."""
    return [huge_zeros((num_bytes,), torch.uint8) for _ in range(NUM_SLOTS)]


def _wait(work: Work | None, timeout: timedelta) -> None:
    if work is not None:
        with translated("gloo"):
            work.wait(timeout)


def _write(message: Tensor, record: bytes) -> None:
    message[: len(record)] = torch.frombuffer(bytearray(record), dtype=torch.uint8)
