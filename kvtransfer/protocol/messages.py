"""What two endpoints say to each other about transfers, beside the bytes themselves.

Every integer and every list has a bound in its type, so it is refused while it is decoded, before anything
is made of it. Places in memory are page ids with their generations; no address or offset is ever sent.
Times are durations, so the clocks of two machines need not agree.

A transfer is one attempt to move one request's pages from one replica to another. It has a part for every
pair of a source rank and a destination rank that share heads, and for each group of layers that leaves by
itself (kvtransfer/ranks/messages.py); parts are numbered from 0. Two replicas of one rank, all layers
together: one part.
"""

from itertools import pairwise
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from baton.errors import WireError
from baton.messages.bounds import MAX_BODY_BYTES
from baton.pages import KEY_BYTES, PageLayout

KindT = TypeVar("KindT")

PROTOCOL: Final = 6
MAX_PAGES: Final = 65_536  # of one transfer, and units too
MAX_PULLED_PAGES: Final = 28_672  # of each side: a frame holds four lists of them, and keys
MAX_PARTS: Final = 256
MAX_RANKS: Final = 128  # of a replica: two of as many have no more than MAX_PARTS parts
MAX_DIGESTS: Final = 1 << 22  # of one transfer, all parts: 32 MiB
DIGEST_BYTES: Final = 8  # of one unit, see kvtransfer/ranks/digests.py
MAX_DURATION_MS: Final = 24 * 3600 * 1000

TransferId: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
Incarnation: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
Epoch: TypeAlias = Annotated[int, Meta(ge=1, le=2**32 - 1)]
Part: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_PARTS - 1)]
NumParts: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_PARTS)]
NumUnits: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_PAGES)]
Unit: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_PAGES)]
Units: TypeAlias = Annotated[tuple[Unit, ...], Meta(min_length=1, max_length=MAX_PAGES)]
Page: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Pages: TypeAlias = Annotated[tuple[Page, ...], Meta(min_length=1, max_length=MAX_PAGES)]
PulledPages: TypeAlias = Annotated[tuple[Page, ...], Meta(min_length=1, max_length=MAX_PULLED_PAGES)]
Keys: TypeAlias = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=MAX_PULLED_PAGES * KEY_BYTES)]
Generation: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Generations: TypeAlias = Annotated[tuple[Generation, ...], Meta(min_length=1, max_length=MAX_PAGES)]
PulledGenerations: TypeAlias = Annotated[
    tuple[Generation, ...], Meta(min_length=1, max_length=MAX_PULLED_PAGES)
]
DurationMs: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_DURATION_MS)]
Digests: TypeAlias = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=MAX_PAGES * DIGEST_BYTES)]
Reason: TypeAlias = Annotated[str, Meta(max_length=256)]
TransportName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=16)]
ListenerAddress: TypeAlias = Annotated[str, Meta(min_length=1, max_length=107)]
TransportNames: TypeAlias = Annotated[tuple[TransportName, ...], Meta(max_length=8)]


class TransferMessage(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="kind"
):
    """One of the classes below."""


class EndpointHello(TransferMessage, frozen=True):
    """The first message each way on every link; see kvtransfer/links.py."""

    protocol: Annotated[int, Meta(ge=0, le=2**16 - 1)]
    incarnation: Incarnation  # minted when the process starts: pages and epochs mean something within one
    fingerprint: Annotated[str, Meta(min_length=1, max_length=128)]  # of the model
    layout: PageLayout  # of each of its tp_size ranks


class RankListenerAddresses(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one rank listens for sources. Addresses are relative to the address of the rank's host."""

    incarnation: Incarnation  # of the rank's process, which may die alone
    host: Annotated[str, Meta(min_length=1, max_length=64)]  # equal for ranks that share a kernel
    device: Literal["cpu", "cuda"]
    addresses: Annotated[dict[TransportName, ListenerAddress], Meta(max_length=8)] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The transports that the rank listens with."""
        return tuple(self.addresses)


class PeerRank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank of another replica: the other end of a part of a transfer."""

    host: str  # its address, as this replica reaches it
    layout: PageLayout
    rank: Annotated[int, Meta(ge=0, le=2**16 - 1)]
    listeners: RankListenerAddresses


class ListenerAddresses(TransferMessage, frozen=True):
    """The second message each way: the doors of every rank of the sender, in order."""

    ranks: Annotated[tuple[RankListenerAddresses, ...], Meta(min_length=1, max_length=MAX_RANKS)]


class Grant(TransferMessage, frozen=True):
    """Destination to source: write the pages that you compute for this transfer here.

    The destination sends a grant without being asked: both sides know the transfer's id from elsewhere. The
    epoch is new with every transfer of the destination. The whole transfer ends within `deadline_ms`.
    """

    transfer: TransferId
    epoch: Epoch
    deadline_ms: DurationMs
    num_units: NumUnits
    pages: Pages
    generations: Generations
    position: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0  # in its sequence, of the first token to move
    num_parts: NumParts = 1
    num_layer_groups: NumParts = 1  # each pair of ranks has this many parts, one a group of layers
    transports: TransportNames = ()


class PullRequest(TransferMessage, frozen=True):
    """Destination to a holder of known pages: write these pages of yours here."""

    transfer: TransferId
    epoch: Epoch
    deadline_ms: DurationMs
    num_units: NumUnits
    holder: Incarnation  # whose pages are meant: a process that was started again holds others
    wanted_pages: PulledPages
    wanted_generations: PulledGenerations  # 0: the page is on the host, if its key still is
    wanted_keys: Keys  # what is in each page, see baton/pages.py
    pages: PulledPages
    generations: PulledGenerations
    transports: TransportNames = ()
    num_parts: NumParts = 1


class PullRefused(TransferMessage, frozen=True):
    """Holder to destination: the pages are not, or no longer, what was asked for; nothing was written."""

    transfer: TransferId
    epoch: Epoch
    reason: Reason


TransferRequest: TypeAlias = Grant | PullRequest


class Wrote(TransferMessage, frozen=True):
    """Source to destination: units [first, stop) of a part are in the destination's memory."""

    transfer: TransferId
    epoch: Epoch
    first: Unit
    stop: Unit
    part: Part = 0


class Commit(TransferMessage, frozen=True):
    """Source to destination: all of a part is written, and nothing of it will be written again unasked."""

    transfer: TransferId
    epoch: Epoch
    digests: Digests  # of every unit, in order
    part: Part = 0


class Verified(TransferMessage, frozen=True):
    """Destination to source: every digest was right, the pages are adopted, yours are free."""

    transfer: TransferId
    epoch: Epoch


class Corrupt(TransferMessage, frozen=True):
    """Destination to source: these units of a part are not what was sent; write them and commit once more."""

    transfer: TransferId
    epoch: Epoch
    units: Units  # rising
    part: Part = 0


class Extend(TransferMessage, frozen=True):
    """Either way, while a transfer goes on: the sender lives and has not given it up."""

    transfer: TransferId
    epoch: Epoch


class Abort(TransferMessage, frozen=True):
    """Either way, at any time: the sender has given the transfer up. Epoch 0: before any was granted."""

    transfer: TransferId
    epoch: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    reason: Reason


class Released(TransferMessage, frozen=True):
    """Source to destination: no byte of a part can be written any more."""

    transfer: TransferId
    epoch: Epoch
    part: Part = 0


AnyMessage: TypeAlias = (
    EndpointHello
    | ListenerAddresses
    | Grant
    | PullRequest
    | PullRefused
    | Wrote
    | Commit
    | Verified
    | Corrupt
    | Extend
    | Abort
    | Released
)

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[AnyMessage]] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """The body of a frame."""
    return _ENCODER.encode(message)


def decode(body: bytes) -> AnyMessage:
    """WireError, with the reason, for anything that `encode` does not make of a message in bounds."""
    message = decode_by(_DECODER, body)
    complaint = _complaint(message)
    if complaint is not None:
        raise WireError(f"{type(message).__name__}: {complaint}", reason="malformed")
    return message


def decode_by(decoder: "msgspec.msgpack.Decoder[KindT]", body: bytes) -> KindT:
    """WireError, with the reason, for what is too long or none of the decoder's messages."""
    if len(body) > MAX_BODY_BYTES:
        raise WireError(f"a message of {len(body)} bytes, {MAX_BODY_BYTES} is most", reason="length")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"a message that is none: {error}", reason="malformed") from None


def _complaint(message: AnyMessage) -> str | None:
    """What the bounds of single fields can't say."""
    match message:
        case Grant() | PullRequest() if message.num_units * message.num_parts > MAX_DIGESTS:
            return f"{message.num_units} units in {message.num_parts} parts, {MAX_DIGESTS} are most together"
        case EndpointHello() if is_beyond(message.layout):
            return f"a layout beyond all models: {message.layout}"
        case Grant() | PullRequest() if len(message.pages) != len(message.generations):
            return f"{len(message.pages)} pages have {len(message.generations)} generations"
        case Grant() | PullRequest() if len(set(message.pages)) != len(message.pages):
            return "a page is granted twice"
        case PullRequest() if len(message.wanted_pages) != len(message.wanted_generations):
            return f"{len(message.wanted_pages)} pages have {len(message.wanted_generations)} generations"
        case PullRequest() if len(message.wanted_keys) != KEY_BYTES * len(message.wanted_pages):
            return f"{len(message.wanted_pages)} pages have {len(message.wanted_keys)} bytes of keys"
        case Wrote() if message.first >= message.stop:
            return f"units [{message.first}, {message.stop}) are none"
        case Commit() if len(message.digests) % DIGEST_BYTES:
            return f"{len(message.digests)} bytes are no digests of {DIGEST_BYTES}"
        case Corrupt() if any(a >= b for a, b in pairwise(message.units)):
            return "its units do not rise"
    return None


def is_beyond(layout: PageLayout) -> bool:
    """Whether it is of no model that there could be: a plan for it might not fit 64 bits."""
    counts = (layout.tp_size, layout.page_size, layout.num_layers, layout.num_kv_heads, layout.head_dim)
    return max(counts) > MAX_PAGES
