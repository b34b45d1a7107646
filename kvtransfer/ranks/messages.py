"""The commands that rank 0 of a replica gives to the replica's ranks, and the events that the ranks report.

The state machines of a transfer run in rank 0. Each shard of the transfer is carried out by one of the ranks:
a command goes to that rank, and events come back. In rank 0 itself both are calls; to and from an agent
they travel over a private connection (kvtransfer/ranks/ranks.py).

The life of a shard at the destination:

1. OpenShard admits the source's bytes to the pages; the answer is ShardOpened. HashUnits names written units:
   the rank takes their digests.
2. CloseShard admits no more bytes; the answer, once none can be written, is WriterStopped. A rank closes a
   shard by itself when the source rank's process has died.
3. VerifyShard compares the digests; the answer is ShardVerified. Another OpenShard admits the corrupt units
   again.

The life of a shard at the source: ReachPeer names the destination's pages and opens a transport; the answer
is ShardReached, also when no transport opens. Each PushUnits is answered by PushEnded and, if all went well,
by UnitsHashed. StopShard ends the shard's pushes; the answer is ShardStopped, once the rank reads and writes
nothing for the shard. ForgetShard ends the life of a shard at both ends.
"""

import hashlib
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from baton.kvtransfer.protocol.messages import (
    DIGEST_BYTES,
    MAX_PAGES,
    Digests,
    Epoch,
    Generations,
    NumUnits,
    Pages,
    PeerRank,
    RankListenerAddresses,
    Reason,
    Shard,
    Unit,
)
from baton.kvtransfer.transports.base import Count, PieceOutcome, Rank, RankSettings
from baton.messages.bounds import Message, PageId, TransferId, schema_hash
from baton.messages.codec import decode_as
from baton.messages.workers import ReplicaNonce
from baton.rpc.auth import Generations as KeyGenerations

MAX_COUNTS: Final = 256  # of a rank, each with a name
DigestKey: TypeAlias = Annotated[bytes, Meta(max_length=32)]  # see Link.digest_key
Layer: TypeAlias = Annotated[int, Meta(ge=0, le=2**16 - 1)]
Layers: TypeAlias = tuple[Layer, Layer]  # [first, stop)
Mark: TypeAlias = Count  # a place in a step, see engine/cache/page_pool.py; 0: before all steps


class RankMessage(Message, frozen=True):
    """A command or an event."""


class OfShard(RankMessage, frozen=True):
    """A command for, or an event of, one shard of a transfer."""

    transfer: TransferId
    shard: Shard


# Commands.
class SetUp(RankMessage, frozen=True):
    """The first command to an agent: listen for sources."""

    settings: RankSettings


class OpenShard(OfShard, frozen=True):
    """Admit the source's bytes to these pages."""

    epoch: Epoch
    num_units: NumUnits
    pages: Pages
    generations: Generations
    source: PeerRank
    layers: Layers
    digest_key: DigestKey
    after: Mark = 0  # the rank's steps up to this mark may write the pages: the shard opens after them


class CloseShard(OfShard, frozen=True):
    """Admit no byte of the shard any more."""

    is_confirmed: bool  # the source has said that it writes no more


class HashUnits(OfShard, frozen=True):
    """Units [first, stop) are written: take their digests."""

    first: Unit
    stop: NumUnits


class VerifyShard(OfShard, frozen=True):
    """Compare the digests that the source has sent."""

    digests: Digests  # of every unit


class ReachPeer(OfShard, frozen=True):
    """Open a transport to the destination's rank. PushUnits writes the pages that the destination granted."""

    link: Count  # a transport ends with its link to the peer
    destination: PeerRank
    layers: Layers
    digest_key: DigestKey
    epoch: Epoch
    pages: Pages
    generations: Generations
    is_bulk: bool = False  # as in Piece


class PushUnits(OfShard, frozen=True):
    """Write units [first, stop) into the granted pages."""

    first: Unit
    stop: NumUnits
    more_pages: tuple[PageId, ...]  # of the source, after the pages of the pushes before
    after: Mark = 0  # the rank's steps up to this mark write the pages: they are read after them


class StopShard(OfShard, frozen=True):
    """End the shard's pushes."""


class ForgetShard(OfShard, frozen=True):
    """Keep nothing of the shard: its transfer is over."""


class DropLink(RankMessage, frozen=True):
    """A link to a peer has ended: close the transports that were opened for it."""

    link: Count


class UseKeys(RankMessage, frozen=True):
    """Prove new connections with these keys. Open connections stay."""

    generations: Annotated[KeyGenerations, Meta(min_length=1, max_length=2)]


class TellCounts(RankMessage, frozen=True):
    """Ask for the rank's counters; the answer is Counted."""


class StopAll(RankMessage, frozen=True):
    """Send no page any more, now and later; AllStopped."""


# Events.
class AgentHello(RankMessage, frozen=True):
    """The first message of an agent."""

    rank: Rank
    replica: ReplicaNonce = b""  # as in RankZero; b"" on rank 0's node


class Ready(RankMessage, frozen=True):
    """The answer to SetUp."""

    listeners: RankListenerAddresses


class AllStopped(RankMessage, frozen=True):
    """No page leaves the rank any more."""


class Counted(RankMessage, frozen=True):
    """The rank's counters since its start, by name."""

    counts: Annotated[dict[Annotated[str, Meta(max_length=64)], Count], Meta(max_length=MAX_COUNTS)]


class ShardOpened(OfShard, frozen=True):
    """The shard's bytes are admitted."""


class WriterStopped(OfShard, frozen=True):
    """No byte of the shard can be written any more."""


class ShardVerified(OfShard, frozen=True):
    """The units with another digest than the source's."""

    corrupt_units: tuple[Unit, ...]


class ShardReached(OfShard, frozen=True):
    """A transport is open, or none could be opened."""

    transport: str  # "" for none


class PushEnded(OfShard, frozen=True):
    """The push of units [first, stop) has ended."""

    first: Unit
    stop: NumUnits
    outcome: PieceOutcome


class UnitsHashed(OfShard, frozen=True):
    """The digests of units that were written."""

    first: Unit
    stop: NumUnits
    digests: Annotated[bytes, Meta(max_length=MAX_PAGES * DIGEST_BYTES)]
    reason: Reason = ""  # why there are no digests; "" when there are


class ShardStopped(OfShard, frozen=True):
    """The rank reads and writes nothing for the shard any more."""


ShardCommand: TypeAlias = (
    OpenShard | CloseShard | HashUnits | VerifyShard | ReachPeer | PushUnits | StopShard | ForgetShard
)
Command: TypeAlias = ShardCommand | DropLink | UseKeys
ShardEvent: TypeAlias = (
    ShardOpened | WriterStopped | ShardVerified | ShardReached | PushEnded | UnitsHashed | ShardStopped
)
ToAgent: TypeAlias = SetUp | Command | StopAll | TellCounts
ToRankZero: TypeAlias = AgentHello | Ready | AllStopped | Counted | ShardEvent
RANK_SCHEMA: Final = schema_hash(ToAgent, ToRankZero)
_ENCODER: Final = msgspec.msgpack.Encoder()
_TO_AGENT: Final[msgspec.msgpack.Decoder[ToAgent]] = msgspec.msgpack.Decoder(ToAgent)
_TO_RANK_ZERO: Final[msgspec.msgpack.Decoder[ToRankZero]] = msgspec.msgpack.Decoder(ToRankZero)


def encode(message: ToAgent | ToRankZero) -> bytes:
    """Return the body of a frame."""
    return _ENCODER.encode(message)


def decode_for_agent(body: bytes) -> ToAgent:
    """Decode a command of rank 0. Raises WireError for anything else."""
    return decode_as(_TO_AGENT, body)


def decode_for_rank_zero(body: bytes) -> ToRankZero:
    """Decode a message of an agent. Raises WireError for anything else."""
    return decode_as(_TO_RANK_ZERO, body)


class Route(NamedTuple):
    """A shard of a transfer: the rank of this replica that carries it out, and the peer's rank."""

    rank: int
    peer: PeerRank
    layers: tuple[int, int]
    group: int  # see ShardRanks


def registration_id(transfer: bytes, shard: int) -> bytes:
    """Return the 16-byte id of the shard's receive registration; shard 0 has the transfer's id.

    Registrations and data streams treat each shard as a transfer.
    """
    if shard == 0:
        return transfer
    return hashlib.blake2b(
        shard.to_bytes(2, "big"), key=transfer, digest_size=16, person=b"baton kv shard"
    ).digest()
