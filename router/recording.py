"""A router's recent inputs and decisions, kept in memory so that they can be replayed (sim/replay.py).

The decisions of a router follow from its state, its inputs, and one clock reading for each (`TurnClock`).

1. Each input and each decision is appended to a list. A decision waits for nothing else.
2. The next tick packs the list into a chunk of bytes. A prompt is recorded as its number of tokens and the
   keys of its pages. Reports that only operators read are left out.
3. Every few minutes a chunk is a checkpoint: the router's whole state (router/checkpoint.py), written in a
   tick in which no work is deferred.
4. The oldest checkpoint and the chunks up to the next one are dropped when the next one is older than the
   kept time, or when the memory is full. So the first chunk is a checkpoint, and all others can be replayed.
5. `baton bundle` fetches the chunks, half a mebibyte in a message.
"""

import logging
import platform
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Self, TypeAlias, get_args

import msgspec
import numpy as np
from msgspec.structs import asdict

from baton.config.loader import without_credentials
from baton.config.router import RouterConfig
from baton.messages.control import (
    Alive,
    Decision,
    Ended,
    Heartbeat,
    Hello,
    KvEventBatch,
    Measured,
    Reachable,
    Rejected,
    Started,
    Submit,
)
from baton.messages.operations import (
    MAX_PART_BYTES,
    Drain,
    Flip,
    RecordingPart,
    RecordingQuery,
    RestartWorker,
    Scale,
    SupervisorReport,
    Undrain,
    WatchWorkers,
)
from baton.messages.orders import Sleep, Wake
from baton.request import AttemptKey
from baton.router.checkpoint import save, with_zero_tokens, without_tokens
from baton.router.index.prefix_index import IndexChange
from baton.router.policies.base import RoutingChoice
from baton.router.policies.candidates import PairCandidate
from baton.router.redis.messages import SharedDispatch
from baton.router.sliced_work import Family
from baton.rpc.peers import Peer

if TYPE_CHECKING:
    from baton.router.router import Router

CHECKPOINTS: Final = 3  # within the kept time
LARGEST_CHECKPOINT: Final = 0.5  # share of the memory
BUILD: Final = {
    "python": platform.python_version(),
    "numpy": np.__version__,
    "machine": platform.machine(),
}
NO_PEER: Final = -1

logger = logging.getLogger(__name__)


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True, tag_field="kind"):
    """An input of the router that is not a message."""


class Joined(Event, frozen=True, kw_only=True):
    """A process has connected. hello: set when the event is packed."""

    hello: Hello | None = None


class Left(Event, frozen=True):
    """A connection has ended."""


class Tick(Event, frozen=True):
    """The host has called `Router.tick`."""


class WorkTurn(Event, frozen=True, kw_only=True):
    """A turn of the event loop does a slice of the deferred work."""

    work: int  # its number in `Router.sliced_work`


class Linked(Event, frozen=True):
    """The router shares its dispatches from now on."""


class Logs(Event, frozen=True):
    """The router writes a decision log from now on."""


NumTokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**20)]  # more than a Submit can carry


class Submitted(Submit, frozen=True, kw_only=True, omit_defaults=True):
    """A Submit `without_tokens`, and the numbers of its tokens."""

    num_prompt_tokens: NumTokens
    num_generated_tokens: NumTokens = 0

    @classmethod
    def of(cls, submit: Submit) -> Self:
        """Return the record of a Submit."""
        request = submit.request
        return cls(
            **asdict(submit) | {"request": without_tokens(request)},
            num_prompt_tokens=len(request.token_ids),
            num_generated_tokens=len(request.generated_token_ids),
        )

    def replayed(self) -> Submit:
        """Return the Submit with zeros for its tokens."""
        fields = {name: getattr(self, name) for name in Submit.__struct_fields__}
        num_tokens = self.num_prompt_tokens, self.num_generated_tokens
        return Submit(**fields | {"request": with_zero_tokens(self.request, *num_tokens)})


class PromptPages(Event, frozen=True, kw_only=True):
    """The keys of a prompt's pages, computed by the router."""

    request_id: str
    attempt: int
    family: Family
    keys: bytes


class Decided(Event, frozen=True, kw_only=True):
    """An attempt was dispatched."""

    request_id: str
    attempt: int
    num_tokens: int
    reason: str
    decode: str
    prefill: str
    is_blind: bool = False
    draw: int = 0
    num_candidates: int = 0
    chosen: PairCandidate | None = None  # where the policy predicts costs


Input: TypeAlias = msgspec.Struct  # a message, or an Event
Record: TypeAlias = (
    Joined
    | Left
    | Tick
    | WorkTurn
    | Linked
    | Logs
    | IndexChange
    | Submitted
    | PromptPages
    | Decided
    | Rejected
    | Started
    | Ended
    | Reachable
    | Heartbeat
    | Alive
    | KvEventBatch
    | Measured
    | Drain
    | WatchWorkers
    | SupervisorReport
    | Undrain
    | RestartWorker
    | Scale
    | Flip
    | Sleep
    | Wake
    | SharedDispatch
)
Outcome: TypeAlias = Decided | Rejected


class RouterCheckpoint(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """A router's state at one time, and the arguments of a new router that goes on from there."""

    at_s: float  # by the router's clock
    date_s: float  # seconds since 1970
    router: str
    config: RouterConfig  # without credentials
    max_index_pages: int
    pages_per_slice: int
    defers: bool  # long work is done in later turns
    build: dict[str, str]
    peers: tuple[tuple[int, Hello], ...]  # number, hello of each connected process
    state: bytes


class Inputs(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """Inputs and decisions in order: (router's time, number of the sender or NO_PEER, record)."""

    records: tuple[tuple[float, int, Record], ...]


AnyChunk: TypeAlias = RouterCheckpoint | Inputs
_ENCODER: Final = msgspec.msgpack.Encoder()
_CHUNKS: Final[msgspec.msgpack.Decoder[AnyChunk]] = msgspec.msgpack.Decoder(AnyChunk)


def decode_chunk(body: bytes) -> AnyChunk:
    """Read a chunk. Raises msgspec.MsgspecError for a chunk of another build."""
    return _CHUNKS.decode(body)


def no_recording() -> RecordingPart:
    """Return the answer of a router that keeps no recording."""
    return RecordingPart()


class _Chunk(NamedTuple):
    at_s: float  # of its last record
    body: bytes


_Decision: TypeAlias = tuple[Decision | Rejected, RoutingChoice | None]


class Recording:
    """The chunks of one router."""

    def __init__(self, kept_s: float, memory_bytes: int, date: Callable[[], float] = time.time) -> None:
        """kept_s: seconds that can be replayed. memory_bytes: the most that all chunks take."""
        self.num_bytes = 0
        self._kept_s = kept_s
        self._memory_bytes = memory_bytes
        self._date = date
        self._entries: list[tuple[float, Peer | None, Input | _Decision]] = []
        self._now_s = 0.0
        self._keys: dict[tuple[AttemptKey, Family], bytes] = {}  # computed since the last chunk
        self._peers: dict[Peer, int] = {}
        self._num_peers = 0
        self._chunks: dict[int, _Chunk] = {}  # by number, the oldest first
        self._next_number = 1
        self._checkpoints: deque[int] = deque()  # numbers of chunks; the first chunk is one
        self._checkpoint_s = 0.0  # of the last one
        self._num_bytes_since = 0  # the last checkpoint
        self._is_over = False  # the state is too large, or cannot be written

    # Called by the router.

    def begin(self, router: "Router") -> None:
        """Write the first checkpoint."""
        for peer in router.peers:
            self._enter(peer)
        self._add_checkpoint(router)

    def add(self, now_s: float, peer: Peer | None, input: Input) -> None:
        """Append an input, before it is handled."""
        self._now_s = now_s
        self._entries.append((now_s, peer, input))

    def decided(self, decision: Decision | Rejected, choice: RoutingChoice | None) -> None:
        """Append a decision: the attempt was dispatched, or rejected."""
        self._entries.append((self._now_s, None, (decision, choice)))

    def keys_computed(self, key: AttemptKey, family: Family, keys: bytes) -> None:
        """Note the keys of a prompt's pages."""
        self._keys[key, family] = keys

    def tick(self, router: "Router") -> None:
        """Pack the inputs since the last tick, drop old chunks, and write a checkpoint when one is due."""
        self._pack()
        if self._is_over:
            return
        is_due = (
            self._now_s - self._checkpoint_s >= self._kept_s / CHECKPOINTS
            or self._num_bytes_since > self._memory_bytes / (CHECKPOINTS + 1)
        )
        if is_due and not any(work.num_waiting for work in router.sliced_work):
            self._add_checkpoint(router)
        self._drop()

    def part(self, query: RecordingQuery) -> RecordingPart:
        """Return the part of the recording that an operator asks for."""
        self._pack()
        number = query.number or self._first_for(self._now_s - query.last_s)
        if number not in self._chunks:
            return no_recording()
        body = self._chunks[number].body
        return RecordingPart(
            number=number,
            body=body[query.first : query.first + MAX_PART_BYTES],
            num_bytes=len(body),
            next_number=number + 1 if number + 1 in self._chunks else 0,
        )

    def chunks(self) -> list[bytes]:
        """Return all chunks, the oldest first."""
        self._pack()
        return [chunk.body for chunk in self._chunks.values()]

    # Chunks.

    def _first_for(self, since_s: float) -> int:
        """The number of the last checkpoint that is not later than `since_s`; of the first, if all are.

        0: there is none.
        """
        early = (number for number in self._checkpoints if self._chunks[number].at_s <= since_s)
        return max(early, default=min(self._checkpoints, default=0))

    def _pack(self) -> None:
        entries, self._entries = self._entries, []
        keys, self._keys = self._keys, {}
        if self._is_over or not (entries or keys):
            return
        records: list[tuple[float, int, Record]] = [
            (self._now_s, NO_PEER, _prompt_pages(*prompt, joined)) for prompt, joined in keys.items()
        ]
        for at_s, peer, input in entries:
            if isinstance(input, (Joined, Left)):
                records.append((at_s, *self._connection(peer, input)))
            elif (pack := _PACKERS.get(type(input))) is not None:
                number = NO_PEER if peer is None else self._peers.get(peer, NO_PEER)
                records.append((at_s, number, pack(input)))
        if records:
            self._append(_Chunk(self._now_s, _ENCODER.encode(Inputs(tuple(records)))))

    def _connection(self, peer: Peer | None, input: Joined | Left) -> tuple[int, Joined | Left]:
        """Return the number of a peer that comes or goes, and its record."""
        assert peer is not None, "only peers come and go"
        if isinstance(input, Left):
            return self._peers.pop(peer, NO_PEER), input
        self._enter(peer)
        return self._num_peers, Joined(hello=peer.hello)

    def _enter(self, peer: Peer) -> None:
        self._num_peers += 1
        self._peers[peer] = self._num_peers

    def _append(self, chunk: _Chunk) -> None:
        self._chunks[self._next_number] = chunk
        self._next_number += 1
        self.num_bytes += len(chunk.body)
        self._num_bytes_since += len(chunk.body)

    def _add_checkpoint(self, router: "Router") -> None:
        peers = {f"peer {number}": peer for peer, number in self._peers.items()}
        try:
            state = save(router.__getstate__(), router.outside | peers)
        except (TypeError, OverflowError, msgspec.MsgspecError) as error:
            self._end(f"the router's state cannot be written: {error}")
            return
        if len(state) > LARGEST_CHECKPOINT * self._memory_bytes:
            self._end(f"the router's state takes {len(state)} bytes, raise router.recording_memory_bytes")
            return
        now_s = router.now_s
        checkpoint = RouterCheckpoint(
            at_s=now_s,
            date_s=self._date(),
            router=router.hello.id,
            config=without_credentials(router.config),
            max_index_pages=router.max_index_pages,
            pages_per_slice=router.pages_per_slice,
            defers=router.sliced_work[0].is_deferred,
            build=BUILD,
            peers=tuple((number, peer.hello) for peer, number in self._peers.items()),
            state=state,
        )
        self._checkpoints.append(self._next_number)
        self._append(_Chunk(now_s, _ENCODER.encode(checkpoint)))
        self._checkpoint_s, self._num_bytes_since = now_s, 0

    def _drop(self) -> None:
        """Drop the chunks before the second checkpoint, as long as they are too old or too many."""
        while len(self._checkpoints) > 1:
            second = self._checkpoints[1]
            if (
                self._chunks[second].at_s > self._now_s - self._kept_s
                and self.num_bytes <= self._memory_bytes
            ):
                return
            for number in range(self._checkpoints.popleft(), second):
                self.num_bytes -= len(self._chunks.pop(number).body)

    def _end(self, reason: str) -> None:
        logger.warning("nothing is recorded any more: %s", reason)
        self._is_over = True
        self._chunks.clear()
        self._checkpoints.clear()
        self.num_bytes = 0


def _prompt_pages(key: AttemptKey, family: Family, keys: bytes) -> PromptPages:
    return PromptPages(request_id=key[0], attempt=key[1], family=family, keys=keys)


def outcome_of(decision: Decision | Rejected, choice: RoutingChoice | None) -> Outcome:
    """Return the record of a decision. choice: the policy's; None if no policy was asked."""
    if isinstance(decision, Rejected):
        return decision
    return Decided(
        request_id=decision.request_id,
        attempt=decision.attempt,
        num_tokens=decision.num_tokens,
        reason=decision.reason,
        decode=decision.chosen.decode,
        prefill=decision.chosen.prefill,
        is_blind=choice is not None and choice.is_blind,
        draw=0 if choice is None else choice.draw,
        num_candidates=0 if choice is None else len(choice.candidates),
        chosen=None if choice is None else choice.candidate,
    )


def _beat(heartbeat: Heartbeat) -> Heartbeat:
    """A heartbeat without the counts that only operators read."""
    load = msgspec.structs.replace(heartbeat.load, counters={}, gauges={})
    return msgspec.structs.replace(heartbeat, load=load)


# Type of an entry -> its record. Messages of other types change nothing that a decision depends on.
_PACKERS: Final[dict[type, Callable[[Any], Record]]] = {
    **dict.fromkeys(get_args(Record), lambda record: record),
    tuple: lambda decided: outcome_of(*decided),
    Submit: Submitted.of,
    Heartbeat: _beat,
}
