"""What rank 0 of a replica has the ranks of it do, and what they answer.

A transfer's state machines run in rank 0. Each of its parts is carried out by the rank of ours that it is of:
what the machines ask for goes there as a command, and comes back as an event. In rank 0 itself the two are
calls; a follower's travel over a private connection (kvtransfer/ranks/remote.py, kvtransfer/ranks/remote.py).

The life of a part, where it arrives:

1. OpenPart lets its bytes land; PartOpened. HashUnits says which units are there: their digests are taken.
2. ClosePart ends that; WriterStopped when nothing can be written any more. WriterDied comes unasked: the
   source rank's process is gone, and whoever has the part open is to end it.
3. VerifyPart; PartVerified. OpenPart once more opens it for the units that were wrong.

Where it leaves: ReachPeer opens a transport; PartReached, with one or without any. GrantPart says where to
write. Each PushPart is answered by PartWritten, and if all went well by PartHashed. StopPart ends its pushes:
PartStopped when nothing reads or writes for it any more. ForgetPart is the end of either.
"""

import hashlib
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from baton.kvtransfer.protocol.messages import (
    Digests,
    Epoch,
    Generations,
    NumUnits,
    Page,
    Pages,
    Part,
    RankListenerAddresses,
    Reason,
    TransferId,
    Unit,
    decode_by,
)
from baton.kvtransfer.protocol.transfer_plan import peers_of
from baton.kvtransfer.transports.base import Spans
from baton.messages.bounds import schema_hash
from baton.pages import PageLayout
from baton.rpc.auth import Generations as KeyGenerations

MAX_COUNTS: Final = 256  # of a rank, each with a name
Rank: TypeAlias = Annotated[int, Meta(ge=0, le=2**16 - 1)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
DigestKey: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]  # of a transfer, see Link
Layers: TypeAlias = tuple[Rank, Rank]  # [first, stop)
Mark: TypeAlias = Count  # a place in a step, see engine/cache/page_pool.py; 0: before all steps


class RankMessage(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="kind"
):
    """One of the classes below."""


class RankSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: bytes | KeyGenerations  # of page links; bytes: one that never changes
    layout: PageLayout
    rank: Rank
    host: str  # where its doors listen
    transport: str  # a name of kvtransfer/transports/registry.py that is tried first, or "auto"
    num_hashing_threads: int


class PeerRank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank of another replica: whom a part leaves for, or comes from."""

    host: str  # its address
    layout: PageLayout
    rank: Rank
    doors: RankListenerAddresses


class OfPart(RankMessage, frozen=True):
    transfer: TransferId
    part: Part


# Commands.
class SetUp(RankMessage, frozen=True):
    """To a follower, first and once: open the doors of your pool."""

    settings: RankSettings


class OpenPart(OfPart, frozen=True):
    epoch: Epoch
    num_units: NumUnits
    pages: Pages
    generations: Generations
    source: PeerRank
    layers: Layers
    digest_key: DigestKey
    after: Mark = 0  # nobody is let in before the rank's steps have passed it: they may write these pages


class ClosePart(OfPart, frozen=True):
    is_confirmed: bool  # as of handoff.CloseLanding


class HashUnits(OfPart, frozen=True):
    first: Unit
    stop: NumUnits


class VerifyPart(OfPart, frozen=True):
    digests: Digests  # of every unit


class ReachPeer(OfPart, frozen=True):
    link: Count  # transports are of one link to the peer, and end with it
    destination: PeerRank
    layers: Layers
    digest_key: DigestKey


class GrantPart(OfPart, frozen=True):
    epoch: Epoch
    pages: Pages  # the destination's
    generations: Generations
    is_bulk: bool = False  # as of OutgoingTransfer


class PushPart(OfPart, frozen=True):
    first: Unit
    stop: NumUnits
    more_pages: tuple[Page, ...]  # of the source, which follow those of the pushes before
    after: Mark = 0  # nothing is read before the rank's steps have passed it: they write these pages


class StopPart(OfPart, frozen=True):
    pass


class ForgetPart(OfPart, frozen=True):
    pass


class DropLink(RankMessage, frozen=True):
    """The link has ended: the transports that were opened for it end too."""

    link: Count


class UseKeys(RankMessage, frozen=True):
    """Prove new connections with these keys; those that are open stay."""

    generations: Annotated[KeyGenerations, Meta(min_length=1, max_length=2)]


class TellCounts(RankMessage, frozen=True):
    """Counted."""


class StopAll(RankMessage, frozen=True):
    """No page leaves any more, now and later; AllStopped."""


# Events.
class Came(RankMessage, frozen=True):
    """A follower's first word."""

    rank: Rank


class Ready(RankMessage, frozen=True):
    """The answer to SetUp."""

    doors: RankListenerAddresses


class AllStopped(RankMessage, frozen=True):
    pass


class Counted(RankMessage, frozen=True):
    """What went wrong or well in this rank since its start, by name."""

    counts: Annotated[dict[Annotated[str, Meta(max_length=64)], Count], Meta(max_length=MAX_COUNTS)]


class PartOpened(OfPart, frozen=True):
    pass


class WriterStopped(OfPart, frozen=True):
    pass


class WriterDied(OfPart, frozen=True):
    pass


class PartVerified(OfPart, frozen=True):
    corrupt_units: tuple[Unit, ...]


class PartReached(OfPart, frozen=True):
    transport: str  # "": none is left


class PartWritten(OfPart, frozen=True):
    """Units [first, stop) are in the destination's memory, or will never be."""

    first: Unit
    stop: NumUnits
    is_done: bool
    reason: Reason
    num_bytes: Count
    num_messages: Count
    spans: Spans


class PartHashed(OfPart, frozen=True):
    first: Unit
    stop: NumUnits
    digests: Digests
    reason: Reason = ""  # why there are none


class PartStopped(OfPart, frozen=True):
    pass


PartCommand: TypeAlias = (
    OpenPart | ClosePart | HashUnits | VerifyPart | ReachPeer | GrantPart | PushPart | StopPart | ForgetPart
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
ToRankZero: TypeAlias = Came | Ready | AllStopped | Counted | PartEvent
RANK_SCHEMA: Final = schema_hash(ToFollower, ToRankZero)
_ENCODER: Final = msgspec.msgpack.Encoder()
_TO_FOLLOWER: Final[msgspec.msgpack.Decoder[ToFollower]] = msgspec.msgpack.Decoder(ToFollower)
_TO_RANK_ZERO: Final[msgspec.msgpack.Decoder[ToRankZero]] = msgspec.msgpack.Decoder(ToRankZero)


def encode(message: ToFollower | ToRankZero) -> bytes:
    """The body of a frame."""
    return _ENCODER.encode(message)


def decode_for_follower(body: bytes) -> ToFollower:
    """WireError for what no rank 0 says."""
    return decode_by(_TO_FOLLOWER, body)


def decode_for_rank_zero(body: bytes) -> ToRankZero:
    """WireError for what no follower says."""
    return decode_by(_TO_RANK_ZERO, body)


_PERSON: Final = b"baton kv part"


class PartRanks(NamedTuple):
    """The parts of a transfer: each pair of a source rank and a destination rank that share heads, and each
    group of layers that leaves by itself.

    Both replicas number them from 0 in the same order, destination rank by destination rank, and within a
    pair of ranks group by group. Part 0 is of the two ranks 0, and of the first layers. To the landings of a
    rank, and so on the wire of bytes, a part is a transfer of its own.
    """

    source: int
    destination: int
    layers: tuple[int, int]  # [first, stop)


@lru_cache(maxsize=64)
def parts_of(source: PageLayout, destination: PageLayout, num_layer_groups: int = 1) -> tuple[PartRanks, ...]:
    """Every part of a transfer from one replica to another. ConfigError when they serve two models,
    ValueError when these have fewer layers than groups.
    """
    groups = layer_groups(source.num_layers, num_layer_groups)
    return tuple(
        PartRanks(source_rank, rank, layers)
        for rank in range(destination.tp_size)
        for source_rank in peers_of(destination, source, rank)
        for layers in groups
    )


def layer_groups(num_layers: int, num_groups: int) -> list[tuple[int, int]]:
    """[first, stop) of each group, as equal as can be: those in which an engine tells of a step's layers."""
    if not 1 <= num_groups <= num_layers:
        raise ValueError(f"{num_layers} layers make no {num_groups} groups")
    bounds = [group * num_layers // num_groups for group in range(num_groups + 1)]
    return list(pairwise(bounds))


def registration_id(transfer: bytes, part: int) -> bytes:
    """16 bytes by which the part's bytes are let in: of part 0 the transfer's own id."""
    if part == 0:
        return transfer
    return hashlib.blake2b(part.to_bytes(2, "big"), key=transfer, digest_size=16, person=_PERSON).digest()
