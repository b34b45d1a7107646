"""What goes over a data stream besides page bytes: a header before each part, an answer after it.

Both are of fixed size and sealed under the stream's session key, counted per direction: one that is
changed, repeated, left out or moved to another stream is found before anything is done about it. A header
names units of a transfer, never a page or an offset; its bytes follow in plan order.
"""

import hmac
import struct
from enum import IntEnum
from typing import Final, Protocol

import msgspec
import numpy as np

from baton.errors import WireError
from baton.kvtransfer.protocol.transfer_plan import Offsets, TransferPlan
from baton.kvtransfer.ranks.pages import PageMemory, PagePacking, StagedParts
from baton.kvtransfer.transports.page_socket import Buffer, MemoryRuns

MAX_PART_BYTES: Final = 64 * 2**20  # a larger one would hold its stream up for too long
SEAL_BYTES: Final = 16
_HEADER: Final = struct.Struct(">4sQ16sIIIQ")  # magic, number, transfer, epoch, first, stop, bytes
_ANSWER: Final = struct.Struct(">4sQB")  # magic, number, outcome
_HEADER_MAGIC: Final = b"BKV1"
_ANSWER_MAGIC: Final = b"BKA1"
HEADER_BYTES: Final = _HEADER.size + SEAL_BYTES
ANSWER_BYTES: Final = _ANSWER.size + SEAL_BYTES


class WriteOutcome(IntEnum):
    """What became of a part, as its receiver says."""

    WRITTEN = 0
    REFUSED = 1  # its transfer has ended here, or never was


_OUTCOMES: Final = frozenset(WriteOutcome)


class PartHeader(msgspec.Struct, frozen=True):
    transfer: bytes
    epoch: int
    first: int
    stop: int
    num_bytes: int


def stream_key(session_key: bytes) -> bytes:
    """The key of a stream's records, so that no other use of the session's key can be taken for one."""
    return hmac.digest(session_key, b"baton data stream 1", "sha256")


def encode_header(key: bytes, number: int, header: PartHeader) -> bytes:
    """number: how many headers went before it on this stream."""
    plain = _HEADER.pack(
        _HEADER_MAGIC,
        number,
        header.transfer,
        header.epoch,
        header.first,
        header.stop,
        header.num_bytes,
    )
    return plain + _seal(key, plain)


def decode_header(key: bytes, number: int, record: bytes | bytearray) -> PartHeader:
    """WireError for anything but the header that is due. At most MAX_PART_BYTES follow it."""
    magic, sent_number, transfer, epoch, first, stop, num_bytes = _HEADER.unpack(
        _unsealed(key, record, HEADER_BYTES)
    )
    _check(magic == _HEADER_MAGIC and sent_number == number, "header")
    _check(0 < num_bytes <= MAX_PART_BYTES, "length")
    return PartHeader(transfer, epoch, first, stop, num_bytes)


def encode_answer(key: bytes, number: int, outcome: WriteOutcome) -> bytes:
    plain = _ANSWER.pack(_ANSWER_MAGIC, number, outcome)
    return plain + _seal(key, plain)


def decode_answer(key: bytes, number: int, record: bytes | bytearray) -> WriteOutcome:
    """WireError for anything but the answer to part `number` of the stream."""
    magic, sent_number, outcome = _ANSWER.unpack(_unsealed(key, record, ANSWER_BYTES))
    _check(magic == _ANSWER_MAGIC and sent_number == number, "answer")
    _check(outcome in _OUTCOMES, "answer")
    return WriteOutcome(outcome)


def _seal(key: bytes, plain: bytes | bytearray) -> bytes:
    return hmac.digest(key, plain, "sha256")[:SEAL_BYTES]


def _unsealed(key: bytes, record: bytes | bytearray, expected: int) -> bytes | bytearray:
    _check(len(record) == expected, "length")
    plain, seal = record[:-SEAL_BYTES], record[-SEAL_BYTES:]
    _check(hmac.compare_digest(seal, _seal(key, plain)), "seal")
    return plain


def _check(is_right: bool, reason: str) -> None:
    if not is_right:
        raise WireError(f"a record of a data stream has a wrong {reason}", reason=reason)


# Where a tcp stream takes a part's bytes from, and where it puts them.
#
# A CPU's pages are sent from and received into as they lie. A GPU's go by way of pinned memory, of which each
# stream has as much as its largest part, some 32 MiB: a fallback, at the speed of the bus or of the network.

_START: Final = np.zeros(1, dtype=np.int64)  # the one run that a part is when it is staged


class StreamPages(Protocol):
    """A rank's pool, for one thread."""

    def outgoing(self, plan: TransferPlan, offset_N: Offsets, head: Buffer) -> MemoryRuns:
        """The head, then the runs' bytes; good until the next call."""

    def incoming(self, plan: TransferPlan, offset_N: Offsets) -> MemoryRuns:
        """Where the runs' bytes are to be received."""

    def received(self, plan: TransferPlan, offset_N: Offsets) -> None:
        """All of them were: they are in the pages on return."""


class TcpPool(Protocol):
    """A rank's pool, for all streams."""

    num_pages: int

    def note_written(self) -> None:
        """As PagePacking's."""

    def stream(self) -> StreamPages: ...


def tcp_pool_of(pool: PageMemory | PagePacking) -> TcpPool:
    return HostTcpPool(pool) if isinstance(pool, PageMemory) else StagedTcpPool(pool)


class HostTcpPool:
    def __init__(self, memory: PageMemory) -> None:
        self._memory = memory
        self.num_pages = memory.num_pages

    def note_written(self) -> None:
        """A CPU has written when it says so."""

    def stream(self) -> StreamPages:
        return _InPlace(self._memory)


class StagedTcpPool:
    def __init__(self, packing: PagePacking) -> None:
        self._packing = packing
        self.num_pages = packing.num_pages

    def note_written(self) -> None:
        self._packing.note_written()

    def stream(self) -> StreamPages:
        return _Staged(self._packing)


class _InPlace:
    def __init__(self, memory: PageMemory) -> None:
        self._memory = memory

    def outgoing(self, plan: TransferPlan, offset_N: Offsets, head: Buffer) -> MemoryRuns:
        return MemoryRuns.of_runs(self._memory.address, offset_N, plan.run_bytes, head)

    def incoming(self, plan: TransferPlan, offset_N: Offsets) -> MemoryRuns:
        return MemoryRuns.of_runs(self._memory.address, offset_N, plan.run_bytes)

    def received(self, plan: TransferPlan, offset_N: Offsets) -> None:
        """They were received where they belong."""


class _Staged:
    def __init__(self, packing: PagePacking) -> None:
        self._parts = StagedParts(packing)

    def outgoing(self, plan: TransferPlan, offset_N: Offsets, head: Buffer) -> MemoryRuns:
        host = self._parts.fetch(plan, offset_N)
        return MemoryRuns.of_runs(host.data_ptr(), _START, len(host), head)

    def incoming(self, plan: TransferPlan, offset_N: Offsets) -> MemoryRuns:
        host = self._parts.room(len(offset_N) * plan.run_bytes)
        return MemoryRuns.of_runs(host.data_ptr(), _START, len(host))

    def received(self, plan: TransferPlan, offset_N: Offsets) -> None:
        self._parts.store(plan, offset_N)
