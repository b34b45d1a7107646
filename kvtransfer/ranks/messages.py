"""The commands that rank 0 of a replica gives to the replica's ranks, and the events that the ranks report.

The state machines of a transfer run in rank 0. Each part of the transfer is carried out by one of the ranks:
a command goes to that rank, and events come back. In rank 0 itself both are calls; to and from a follower
they travel over a private connection (kvtransfer/ranks/ranks.py).

The life of a part at the destination:

1. OpenPart admits the part's bytes to the pages; PartOpened. HashUnits says which units are written: the rank
   takes their digests.
2. ClosePart ends that; WriterStopped when nothing can be written any more. WriterDied comes unasked: the
   source rank's process is dead, and the part must be closed.
3. VerifyPart; PartVerified. Another OpenPart opens the part again for the units that were wrong.

The life of a part at the source: ReachPeer names the destination's pages and opens a transport; PartReached,
with or without one. Each PushPart is answered by PartWritten and, if all went well, by PartHashed.
StopPart ends the part's pushes; PartStopped when the rank reads and writes nothing for it any more.
ForgetPart ends the life of a part at both ends.
"""

import hashlib
from functools import lru_cache
from itertools import pairwise
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
    Page,
    Pages,
    Part,
    PeerRank,
    RankListenerAddresses,
    Reason,
    TransferId,
    Unit,
    decode_by,
)
from baton.kvtransfer.protocol.transfer_plan import peers_of
from baton.kvtransfer.transports.base import Count, PieceOutcome
from baton.messages.bounds import schema_hash
from baton.pages import PageLayout
from baton.rpc.auth import Generations as KeyGenerations

MAX_COUNTS: Final = 256  # of a rank, each with a name
Rank: TypeAlias = Annotated[int, Meta(ge=0, le=2**16 - 1)]
DigestKey: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]  # see Link.digest_key
Layers: TypeAlias = tuple[Rank, Rank]  # [first, stop)
Mark: TypeAlias = Count  # a place in a step, see engine/cache/page_pool.py; 0: before all steps


class RankMessage(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="kind"
):
    """A command or an event."""


class RankSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one rank of a replica."""

    key: bytes | KeyGenerations  # of page links; bytes: a key that never changes
    layout: PageLayout
    rank: Rank
    host: str  # the address that the rank listens on
    transport: str  # see kvtransfer/transports/registry.py
    num_hashing_threads: int


class OfPart(RankMessage, frozen=True):
    """A command for, or an event of, one part of a transfer."""

    transfer: TransferId
    part: Part


# Commands.
class SetUp(RankMessage, frozen=True):
    """The first command to a follower: listen for sources."""

    settings: RankSettings


class OpenPart(OfPart, frozen=True):
    """Admit the source's bytes to these pages."""

    epoch: Epoch
    num_units: NumUnits
    pages: Pages
    generations: Generations
    source: PeerRank
    layers: Layers
    digest_key: DigestKey
    after: Mark = 0  # the rank's steps up to this mark may write the pages: the part opens after them


class ClosePart(OfPart, frozen=True):
    """Admit no byte of the part any more."""

    is_confirmed: bool  # the source has said that it writes no more


class HashUnits(OfPart, frozen=True):
    """Units [first, stop) are written: take their digests."""

    first: Unit
    stop: NumUnits


class VerifyPart(OfPart, frozen=True):
    """Compare the digests that the source has sent."""

    digests: Digests  # of every unit


class ReachPeer(OfPart, frozen=True):
    """Open a transport to the destination's rank. PushPart writes the pages that the destination granted."""

    link: Count  # a transport ends with its link to the peer
    destination: PeerRank
    layers: Layers
    digest_key: DigestKey
    epoch: Epoch
    pages: Pages
    generations: Generations
    is_bulk: bool = False  # as of OutgoingTransfer


class PushPart(OfPart, frozen=True):
    """Write units [first, stop) into the granted pages."""

    first: Unit
    stop: NumUnits
    more_pages: tuple[Page, ...]  # of the source, after the pages of the pushes before
    after: Mark = 0  # the rank's steps up to this mark write the pages: they are read after them


class StopPart(OfPart, frozen=True):
    """End the part's pushes."""


class ForgetPart(OfPart, frozen=True):
    """Keep nothing of the part: its transfer is over."""


class DropLink(RankMessage, frozen=True):
    """A link to a peer has ended: close the transports that were opened for it."""

    link: Count


class UseKeys(RankMessage, frozen=True):
    """Prove new connections with these keys. Open connections stay."""

    generations: Annotated[KeyGenerations, Meta(min_length=1, max_length=2)]


class TellCounts(RankMessage, frozen=True):
    """Asks for Counted."""


class StopAll(RankMessage, frozen=True):
    """Send no page any more, now and later; AllStopped."""


# Events.
class AgentHello(RankMessage, frozen=True):
    """The first message of a follower."""

    rank: Rank


class Ready(RankMessage, frozen=True):
    """The answer to SetUp."""

    listeners: RankListenerAddresses


class AllStopped(RankMessage, frozen=True):
    """No page leaves the rank any more."""


class Counted(RankMessage, frozen=True):
    """The rank's counters since its start, by name."""

    counts: Annotated[dict[Annotated[str, Meta(max_length=64)], Count], Meta(max_length=MAX_COUNTS)]


class PartOpened(OfPart, frozen=True):
    """The part's bytes are admitted."""


class WriterStopped(OfPart, frozen=True):
    """No byte of the part can be written any more."""


class WriterDied(OfPart, frozen=True):
    """The process that writes the part is dead."""


class PartVerified(OfPart, frozen=True):
    """The units with another digest than the source's."""

    corrupt_units: tuple[Unit, ...]


class PartReached(OfPart, frozen=True):
    """A transport is open, or none could be opened."""

    transport: str  # "" for none


class PartWritten(OfPart, frozen=True):
    """The push of units [first, stop) has ended."""

    first: Unit
    stop: NumUnits
    outcome: PieceOutcome


class PartHashed(OfPart, frozen=True):
    """The digests of units that were written."""

    first: Unit
    stop: NumUnits
    digests: Annotated[bytes, Meta(max_length=MAX_PAGES * DIGEST_BYTES)]
    reason: Reason = ""  # for which there are no digests


class PartStopped(OfPart, frozen=True):
    """The rank reads and writes nothing for the part any more."""


PartCommand: TypeAlias = (
    OpenPart | ClosePart | HashUnits | VerifyPart | ReachPeer | PushPart | StopPart | ForgetPart
)
Command: TypeAlias = PartCommand | DropLink | UseKeys
PartEvent: TypeAlias = (
    PartOpened
    | WriterStopped
    | WriterDied
    | PartVerified
    | PartReached
    | PartWritten
    | PartHashed
    | PartStopped
)
ToFollower: TypeAlias = SetUp | Command | StopAll | TellCounts
ToRankZero: TypeAlias = AgentHello | Ready | AllStopped | Counted | PartEvent
RANK_SCHEMA: Final = schema_hash(ToFollower, ToRankZero)
_ENCODER: Final = msgspec.msgpack.Encoder()
_TO_FOLLOWER: Final[msgspec.msgpack.Decoder[ToFollower]] = msgspec.msgpack.Decoder(ToFollower)
_TO_RANK_ZERO: Final[msgspec.msgpack.Decoder[ToRankZero]] = msgspec.msgpack.Decoder(ToRankZero)


def encode(message: ToFollower | ToRankZero) -> bytes:
    """The body of a frame."""
    return _ENCODER.encode(message)


def decode_for_follower(body: bytes) -> ToFollower:
    """WireError for anything but a command of rank 0."""
    return decode_by(_TO_FOLLOWER, body)


def decode_for_rank_zero(body: bytes) -> ToRankZero:
    """WireError for anything but a message of a follower."""
    return decode_by(_TO_RANK_ZERO, body)


class Route(NamedTuple):
    """A part of a transfer: the rank of this replica that carries it out, and the peer's rank."""

    rank: int
    peer: PeerRank
    layers: tuple[int, int]


class PartRanks(NamedTuple):
    """The ranks and layers of one part of a transfer.

    There is a part for each pair of a source rank and a destination rank that share heads, and for each group
    of layers that leaves by itself. Both replicas number the parts from 0 in the same order: destination rank
    by destination rank, and within a pair of ranks group by group. Part 0 is between the two ranks 0.
    """

    source: int
    destination: int
    layers: tuple[int, int]  # [first, stop)


@lru_cache(maxsize=64)
def parts_of(source: PageLayout, destination: PageLayout, num_layer_groups: int = 1) -> tuple[PartRanks, ...]:
    """Every part of a transfer from one replica to another.

    ConfigError when the two serve different models, ValueError when they have fewer layers than groups.
    """
    groups = layer_groups(source.num_layers, num_layer_groups)
    return tuple(
        PartRanks(source_rank, rank, layers)
        for rank in range(destination.tp_size)
        for source_rank in peers_of(destination, source, rank)
        for layers in groups
    )


def layer_groups(num_layers: int, num_groups: int) -> list[tuple[int, int]]:
    """[first, stop) of each group, as equal as possible. Engines finish a step's layers group by group."""
    if not 1 <= num_groups <= num_layers:
        raise ValueError(f"{num_layers} layers make no {num_groups} groups")
    bounds = [group * num_layers // num_groups for group in range(num_groups + 1)]
    return list(pairwise(bounds))


MAX_GROUPS: Final = 4
MIN_RUN_BYTES: Final = 256 << 10  # a page's share of one group: shorter runs cost more than they hide


def default_layer_groups(source: PageLayout) -> int:
    """Return the number of groups of layers in which a source of this layout sends its last pages."""
    return max(1, min(MAX_GROUPS, source.num_layers, source.page_bytes // MIN_RUN_BYTES))


def registration_id(transfer: bytes, part: int) -> bytes:
    """The 16 bytes under which a part's bytes are admitted: for part 0 the transfer's own id.

    To the registrations of a rank, and so in data streams, each part is a transfer of its own.
    """
    if part == 0:
        return transfer
    return hashlib.blake2b(
        part.to_bytes(2, "big"), key=transfer, digest_size=16, person=b"baton kv part"
    ).digest()
