"""The control messages between two endpoints. The bytes of the pages use separate transports.

The type of every integer and every list has a bound, so decoding refuses values out of range. Messages refer
to the destination's memory by page id and generation, never by address or offset, and to the pages that a
holder has by their keys. Times are durations, so the clocks of two machines need not agree.

A transfer is one attempt to move one request's pages from one replica to another. It has a shard for every
pair of a source rank and a destination rank that share heads, and for each group of layers that is sent
separately (ShardRanks in kvtransfer/protocol/transfer_plan.py); shards are numbered from 0. A transfer
between two replicas of one rank, with all layers in one group, has one shard.
"""

from itertools import pairwise
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from baton.errors import WireError
from baton.messages.bounds import KEY_BYTES, MAX_PULLED_PAGES, Generation, Message, PageId, TransferId
from baton.messages.codec import decode_as
from baton.pages import PageLayout

PROTOCOL: Final = 11
MAX_PAGES: Final = 65_536  # pages of one transfer; also the limit of its units
MAX_SHARDS: Final = 256
MAX_RANKS: Final = 128  # in one replica: two such replicas have at most MAX_SHARDS shards
MAX_DIGESTS: Final = 1 << 22  # in all shards of one transfer: 32 MiB
DIGEST_BYTES: Final = 8  # for one unit, see kvtransfer/ranks/digests.py
NO_DIGESTS: Final = b""  # the key of a transfer without digests
MAX_DURATION_MS: Final = 24 * 3600 * 1000

ID_BYTES: Final = 16

Incarnation: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
Epoch: TypeAlias = Annotated[int, Meta(ge=1, le=2**32 - 1)]
Shard: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SHARDS - 1)]
NumLayerGroups: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_SHARDS)]
NumUnits: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_PAGES)]
Unit: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_PAGES)]
Units: TypeAlias = Annotated[tuple[Unit, ...], Meta(min_length=1, max_length=MAX_PAGES)]
Pages: TypeAlias = Annotated[tuple[PageId, ...], Meta(min_length=1, max_length=MAX_PAGES)]
PulledPages: TypeAlias = Annotated[tuple[PageId, ...], Meta(min_length=1, max_length=MAX_PULLED_PAGES)]
Keys: TypeAlias = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=MAX_PULLED_PAGES * KEY_BYTES)]
Generations: TypeAlias = Annotated[tuple[Generation, ...], Meta(min_length=1, max_length=MAX_PAGES)]
PulledGenerations: TypeAlias = Annotated[
    tuple[Generation, ...], Meta(min_length=1, max_length=MAX_PULLED_PAGES)
]
DurationMs: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_DURATION_MS)]
Digests: TypeAlias = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=MAX_PAGES * DIGEST_BYTES)]
Reason: TypeAlias = Annotated[str, Meta(max_length=256)]
TransportName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=16)]
ListenerAddress: TypeAlias = Annotated[str, Meta(min_length=1, max_length=107)]


class TransferMessage(Message, frozen=True):
    """The base of all control messages; the tag `kind` is the class name."""


class OfTransfer(TransferMessage, frozen=True):
    """A message of one attempt at a transfer."""

    transfer: TransferId
    epoch: Epoch


class RankListenerAddresses(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The listeners of one rank, by transport name. Addresses are relative to the rank's host or node."""

    incarnation: Incarnation  # the rank's process, which may die while other ranks live
    host: Annotated[str, Meta(min_length=1, max_length=64)]  # equal for ranks that share a kernel
    device: Literal["cpu", "cuda"]
    # The address of the rank's node. "": rank 0's node; if that is "", too, the link's address.
    node: Annotated[str, Meta(max_length=255)] = ""
    addresses: Annotated[dict[TransportName, ListenerAddress], Meta(max_length=8)] = {}


class EndpointHello(TransferMessage, frozen=True):
    """The first message in each direction of every link; see kvtransfer/links.py."""

    protocol: Annotated[int, Meta(ge=0, le=2**16 - 1)]
    incarnation: Incarnation  # new for each process; page ids and epochs are valid only within one
    fingerprint: Annotated[str, Meta(min_length=1, max_length=128)]  # identifies the model
    layout: PageLayout  # of all ranks together
    listeners: Annotated[tuple[RankListenerAddresses, ...], Meta(max_length=MAX_RANKS)] = ()  # of each rank
    has_digests: bool = True  # of pages, unless both ends say that they need none


class PeerRank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank of the peer replica, which sends or receives one shard of a transfer."""

    host: str  # the address by which this replica reaches the rank
    layout: PageLayout
    rank: Annotated[int, Meta(ge=0, le=2**16 - 1)]
    listeners: RankListenerAddresses


class Grant(OfTransfer, frozen=True):
    """Destination to source: the destination's pages, which the source fills with the KV that it computes.

    The destination sends a grant without a request: the router gives the transfer's id to both sides. Each
    transfer of a destination has a new epoch. The whole transfer ends within `deadline_ms`.
    """

    deadline_ms: DurationMs
    num_units: NumUnits
    pages: Pages
    generations: Generations
    position: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0  # in its sequence, of the first token to move
    num_layer_groups: NumLayerGroups = 1  # a pair of ranks has a shard for each group of layers


class PullRequest(OfTransfer, frozen=True):
    """Destination to holder: write the KV of these cached pages into the destination's pages."""

    deadline_ms: DurationMs
    num_units: NumUnits
    wanted_keys: Keys  # the holder finds each page by its key, see baton/pages.py
    pages: PulledPages
    generations: PulledGenerations

    @property
    def num_layer_groups(self) -> int:
        """Return 1: all layers of the wanted pages are computed, and leave together (see Grant)."""
        return 1

    @property
    def keys(self) -> list[bytes]:
        """Return the key of each wanted page."""
        joined = self.wanted_keys
        return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]


TransferRequest: TypeAlias = Grant | PullRequest


class Wrote(OfTransfer, frozen=True):
    """Source to destination: units [first, stop) of a shard are written, and more units follow."""

    first: Unit
    stop: Unit
    shard: Shard = 0


class Commit(OfTransfer, frozen=True):
    """Source to destination: with units [first, stop) the whole shard is written.

    Only a Corrupt makes the source write units of the shard again.
    """

    first: Unit
    stop: Unit
    digests: Digests  # one for each unit, in order
    shard: Shard = 0


class Verified(OfTransfer, frozen=True):
    """Destination to source: all digests match and the pages are adopted. The source may free its pages."""


class Corrupt(OfTransfer, frozen=True):
    """Destination to source: the digests of these units do not match. The source writes and commits again."""

    units: Units  # in ascending order
    shard: Shard = 0


class Extend(OfTransfer, frozen=True):
    """Either direction: the heartbeat of an open transfer, which renews the receiver's lease."""


class Abort(OfTransfer, frozen=True):
    """Either direction, at any time: the sender has ended the transfer, refuses it or does not know it."""

    reason: Reason


class Released(TransferMessage, frozen=True):
    """Source to destination: the source writes no further byte of this transfer.

    A source that does not know the transfer sends it, too.
    """

    transfer: TransferId


class EndpointClosed(TransferMessage, frozen=True):
    """Either direction: the endpoint closes. It writes and accepts no further byte of any transfer; its
    process may live on.
    """


AnyMessage: TypeAlias = (
    EndpointHello
    | Grant
    | PullRequest
    | Wrote
    | Commit
    | Verified
    | Corrupt
    | Extend
    | Abort
    | Released
    | EndpointClosed
)


def check_request(request: TransferRequest, num_shards: int, num_pages: int) -> None:
    """Raise ValueError for a request to send that no message can carry, or no peer accepts.

    A peer would drop the link, and all its transfers, because of an invalid request. num_shards: of the
    transfer. num_pages: of the destination.
    """
    if len(request.transfer) != ID_BYTES:
        raise ValueError(f"a transfer's id has {ID_BYTES} bytes, got {len(request.transfer)}")
    if isinstance(request, Grant) and not 0 <= request.position < 2**31:
        raise ValueError(f"the position is a token from 0 to 2^31 - 1, got {request.position}")
    if (complaint := size_complaint(request.num_units, num_shards)) is not None:
        raise ValueError(complaint)
    if isinstance(request, PullRequest) and max(len(request.keys), num_pages) > MAX_PULLED_PAGES:
        raise ValueError(
            f"a pull has at most {MAX_PULLED_PAGES} pages on each side, got {len(request.keys)} into "
            f"{num_pages}"
        )


def size_complaint(num_units: int, num_shards: int) -> str | None:
    """Return why no transfer has so many units and shards, or None."""
    if 1 <= num_units <= MAX_PAGES and num_shards <= MAX_SHARDS and num_units * num_shards <= MAX_DIGESTS:
        return None
    return (
        f"a transfer has 1 to {MAX_PAGES} units, at most {MAX_SHARDS} shards and {MAX_DIGESTS} units in "
        f"all of them; got {num_units} units in {num_shards} shards"
    )


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[AnyMessage]] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """Return the body of a frame."""
    return _ENCODER.encode(message)


def decode(body: bytes) -> AnyMessage:
    """Decode and check the body of a frame. Raises WireError for a malformed or an out-of-range message."""
    message = decode_as(_DECODER, body)
    complaint = _complaint(message)
    if complaint is not None:
        raise WireError(f"{type(message).__name__}: {complaint}", reason="malformed")
    return message


def _complaint(message: AnyMessage) -> str | None:
    """Check the rules that involve several fields; return the first violation, or None."""
    match message:
        case EndpointHello() if _exceeds_limits(message.layout):
            return f"the layout exceeds the limits: {message.layout}"
        case Grant() | PullRequest() if len(message.pages) != len(message.generations):
            return f"{len(message.pages)} pages have {len(message.generations)} generations"
        case Grant() | PullRequest() if len(set(message.pages)) != len(message.pages):
            return "a page is granted twice"
        case PullRequest() if len(message.wanted_keys) % KEY_BYTES:
            return f"{len(message.wanted_keys)} bytes are not a multiple of the size of a key, {KEY_BYTES}"
        case Wrote() | Commit() if message.first >= message.stop:
            return f"the range of units [{message.first}, {message.stop}) is empty"
        case Commit() if len(message.digests) % DIGEST_BYTES:
            return f"{len(message.digests)} bytes are not a multiple of the digest size, {DIGEST_BYTES}"
        case Corrupt() if any(a >= b for a, b in pairwise(message.units)):
            return "the units are not in ascending order"
    return None


def _exceeds_limits(layout: PageLayout) -> bool:
    """Return True when a dimension of the layout is so large that byte offsets may not fit 64 bits."""
    counts = (layout.tp_size, layout.page_size, layout.num_layers, layout.num_kv_heads, layout.head_dim)
    return max(counts) > MAX_PAGES
