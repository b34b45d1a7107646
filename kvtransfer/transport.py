"""What every transport offers: it moves pieces of transfers to one destination rank.

The life of a piece, at the source:

1. `push` takes it and returns a ticket at once; it is PENDING until a thread of the transport takes it up.
2. SENDING: its bytes are read from the source's pages. Those pages must stay as they are until step 3.
3. DONE: every byte is in the destination's memory, and the destination has said so or could see it.
   FAILED: with a reason; any part of its bytes may have arrived. Its pages may still be touched until
   `abort` or `close` has returned, which must come before they are reused.
4. `forget` ends the ticket, once its outcome has been read.

`abort` ends all pieces of one transfer. Nothing that happens to one destination reaches another.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

import msgspec

from baton.kvtransfer.transfer_plan import Offsets, Side, TransferPlan

# Called from the transport's thread when a ticket is DONE or FAILED; it must return at once.
OnEnd = Callable[[int], None]


class TransferStatus(IntEnum):
    PENDING = 0
    SENDING = 1
    DONE = 2
    FAILED = 3

    @property
    def is_final(self) -> bool:
        return self >= TransferStatus.DONE


class OutgoingTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to move one request's pages to one destination rank, as the source knows it.

    `destination_generations` are those of `destination_pages` when they were granted: a transport that
    writes into them directly may not write a page whose generation has changed.
    """

    id: bytes  # 16 random bytes
    epoch: int
    plan: TransferPlan
    source_pages: tuple[int, ...]
    destination_pages: tuple[int, ...]
    destination_generations: tuple[int, ...]
    is_bulk: bool = False  # nobody waits for it: pieces of other transfers overtake its own


class Piece(msgspec.Struct, frozen=True):
    """Units [first, stop) of a transfer: what one `push` moves."""

    transfer: OutgoingTransfer
    first: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.first) * self.transfer.plan.unit_bytes


class Spans(msgspec.Struct, frozen=True):
    """Where the seconds of a piece went; they add up to the time from `push` to its end."""

    queued_s: float = 0.0  # behind other pieces
    gather_s: float = 0.0  # finding the runs, and packing them where the transport packs
    wire_s: float = 0.0  # moving the bytes, and the destination's word that they are there


class Progress(msgspec.Struct, frozen=True):
    status: TransferStatus
    num_bytes: int = 0  # that have been moved so far
    num_messages: int = 0  # system calls, sends or copies that it took
    reason: str = ""  # why it FAILED
    spans: Spans = Spans()


class Transport(Protocol):
    """Calls are safe from any thread. All but `open`, `abort` and `close` return at once."""

    name: str

    def open(self) -> None:
        """Connect. TransferFailed when the destination can't be reached this way; `close` is still due."""

    def push(self, piece: Piece) -> int:
        """Queue a piece and return its ticket. A transport that is broken or closed fails the ticket."""

    @property
    def is_broken(self) -> bool:
        """Whether every piece fails from now on, whichever transfer it is of."""

    def poll(self, ticket: int) -> Progress:
        """KeyError for a ticket that was forgotten."""

    def forget(self, ticket: int) -> None:
        """Drop a ticket whose outcome has been read; one that is still open is dropped when it ends."""

    def abort(self, transfer: bytes) -> None:
        """Fail all unfinished pieces of a transfer.

        On return this process neither reads its source pages nor writes its destination pages any more;
        what the network still holds is the destination's to refuse (see landing.py).
        """

    def close(self) -> None:
        """Fail everything unfinished, stop the threads, give back memory and sockets. Twice is harmless.

        An `open` that waits in another thread fails soon; close once more when it has.
        """


def offsets_of(side: Side, first: int, stop: int, pages: Sequence[int]) -> Offsets:
    """`side.offsets`, at a cost that does not grow with the pages that [first, stop) has no part in."""
    first_page = first // side.units_per_page
    before = first_page * side.units_per_page
    return side.offsets(first - before, stop - before, pages[first_page : side.num_pages(stop)])
