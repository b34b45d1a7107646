"""What rank 0 of a replica has the ranks of it do, and what they answer.

A transfer's state machines run in rank 0. Each of its parts is carried out by the rank of ours that it is of:
what the machines ask for goes there as a command, and comes back as an event. In rank 0 itself the two are
calls; a follower's travel over a private connection (remote_rank.py, rank_agent.py).

The life of a part, where it arrives:

1. OpenPart lets its bytes land; PartOpened. HashUnits says which units are there: their digests are taken.
2. ClosePart ends that; WriterStopped when nothing can be written any more. WriterDied comes unasked: the
   source rank's process is gone, and whoever has the part open is to end it.
3. VerifyPart; PartVerified. OpenPart once more opens it for the units that were wrong.

Where it leaves: ReachPeer opens a transport; PartReached, with one or without any. GrantPart says where to
write. Each PushPart is answered by PartWritten, and if all went well by PartHashed. StopPart ends its pushes:
PartStopped when nothing reads or writes for it any more. ForgetPart is the end of either.
"""

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from baton.keys import Generations as KeyGenerations
from baton.kvtransfer.messages import (
    Digests,
    Epoch,
    Generations,
    NumUnits,
    Page,
    Pages,
    Part,
    RankDoors,
    Reason,
    TransferId,
    Unit,
    decode_by,
)
from baton.kvtransfer.transport import Spans
from baton.layout import PageLayout
from baton.schema import schema_hash

MAX_COUNTS: Final = 256  # of a rank, each with a name

Rank: TypeAlias = Annotated[int, Meta(ge=0, le=2**16 - 1)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
DigestKey: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]  # of a transfer, see Link
Layers: TypeAlias = tuple[Rank, Rank]  # [first, stop)
Mark: TypeAlias = Count  # a place in a step, see engine/step_marks.py; 0: before all steps


class RankMessage(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="kind"
):
    """One of the classes below."""


class RankSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: bytes | KeyGenerations  # of page links; bytes: one that never changes
    layout: PageLayout
    rank: Rank
    host: str  # where its doors listen
    transport: str  # a name of choose.py that is tried first, or "auto"
    num_hashing_threads: int


class PeerRank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank of another replica: whom a part leaves for, or comes from."""

    host: str  # its address
    layout: PageLayout
    rank: Rank
    doors: RankDoors


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

    doors: RankDoors


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
