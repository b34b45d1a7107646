"""Replays a router's recording (router/recording.py) on a new router, on the recorded clock.

Under the recorded policy every decision must be the recorded one, bit for bit: workers, predicted seconds,
random draws. `Replay.run` returns the first decision that differs. With another policy, that policy is asked
for each decision as well, in the recorded state of the cluster, and the recorded choice is carried out. The
cost model that the router had learnt predicts both choices.
"""

import datetime
import logging
import lzma
import re
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import msgspec

from baton.clock import TurnClock
from baton.errors import ConfigError, reason_of
from baton.messages.codec import AnyMessage
from baton.messages.control import Decision, Ended, Hello, KvEventBatch, Rejected, Started
from baton.messages.workers import Worker
from baton.request import AttemptKey
from baton.router.checkpoint import UNREADABLE, load
from baton.router.index.prefix_index import (
    IndexEvents,
    IndexForgotten,
    IndexJoined,
    IndexRestored,
    PrefixIndex,
)
from baton.router.pairing import NoSlot, Pairing, PairQuestion, Unpaired
from baton.router.policies.base import Pair, PolicyContext, RoutingChoice
from baton.router.policies.cost import predicted
from baton.router.policies.registry import POLICIES, load_policy, policy_class
from baton.router.recording import (
    NO_PEER,
    Decided,
    Inputs,
    Joined,
    Left,
    Linked,
    Logs,
    Outcome,
    PromptPages,
    Record,
    RouterCheckpoint,
    Submitted,
    Tick,
    WorkTurn,
    decode_chunk,
    outcome_of,
)
from baton.router.redis.messages import AnyShared, SharedDispatch
from baton.router.router import Router
from baton.rpc.peer_clock import ClockOffset
from baton.sim.process import Events, OffsetClock

logger = logging.getLogger(__name__)

RECORDING: Final = re.compile("routers/[0-9a-f]{32}/recording")  # name in a bundle
LENGTH_BYTES: Final = 4
MAX_RECORDINGS_BYTES: Final = 2**31  # of one bundle; a router keeps 64 MiB unless it is told otherwise
_ENCODE: Final = msgspec.msgpack.Encoder().encode


class Difference(NamedTuple):
    """The first decision that differs. recorded, replayed: None on the side that has fewer decisions."""

    number: int  # of the decision, from 0
    recorded: Outcome | None
    replayed: Outcome | None


class ReplayedPair(NamedTuple):
    """A pair of workers, as the cost model predicts it."""

    decode: str
    prefill: str  # "": the decode worker computes the prompt
    ttft_s: float
    num_held_tokens: int


class Compared(NamedTuple):
    """One decision by both policies. other: None where the other policy lets the attempt wait."""

    request_id: str
    attempt: int
    num_tokens: int
    recorded: ReplayedPair
    other: ReplayedPair | None

    @property
    def is_elsewhere(self) -> bool:
        """True when the other policy chooses other workers."""
        return self.other is None or self.other[:2] != self.recorded[:2]


class Replayed(NamedTuple):
    """The result of a replay."""

    num_inputs: int
    seconds: float  # of the router's clock
    outcomes: Sequence[Outcome]
    difference: Difference | None
    compared: Sequence[Compared]  # with another policy


class MutePeer:
    """A peer that only has a Hello; messages to it are dropped."""

    silence_s = quiet_s = 0.0
    clock_offset: ClockOffset | None = None

    def __init__(self, hello: Hello) -> None:
        self.hello = hello

    def send(self, message: AnyMessage) -> None:
        """See Peer."""

    def close(self) -> None:
        """See Peer; the recording says when the connection ended."""


class UnsharedLink:
    """A link that shares nothing; a recording has the messages of other routers."""

    def joined(self, worker: Worker) -> None:
        """See SharingLink."""

    def left(self, worker_id: str) -> None:
        """See SharingLink."""

    def pages(self, worker_id: str, events: KvEventBatch) -> None:
        """See SharingLink."""

    def share(self, message: AnyShared) -> None:
        """See SharingLink."""


class Replay:
    """One router's recording, and a router that replays it."""

    def __init__(self, chunks: Sequence[bytes]) -> None:
        """chunks: of `Recording`, in order. Raises ConfigError for damaged ones and for another build's."""
        try:
            decoded = list(map(decode_chunk, chunks))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            message = f"the recording cannot be read, perhaps it is another build's: {error}"
            raise ConfigError(message) from error
        if not decoded or not isinstance(decoded[0], RouterCheckpoint):
            raise ConfigError("the recording does not begin with a router's state: nothing can be replayed")
        self.checkpoint = decoded[0]
        self.records = [
            record for chunk in decoded[1:] if isinstance(chunk, Inputs) for record in chunk.records
        ]

    def run(self, policy: str | None = None) -> Replayed:
        """Replay all inputs. policy: compared with the recorded one.

        Raises ConfigError for a policy that does not exist, and for a router's state that is damaged or of
        another build.
        """
        host = self._replayed()
        # Once more, on a router of its own: asking another policy changes caches of the router.
        comparison = None if policy is None else self._replayed(policy).comparison
        recorded = [record for _, _, record in self.records if isinstance(record, Decided | Rejected)]
        ends = [at_s for at_s, _, _ in self.records[-1:]]
        return Replayed(
            num_inputs=len(self.records) - len(recorded),
            seconds=sum(ends) - self.checkpoint.at_s if ends else 0.0,
            outcomes=recorded,
            difference=_first_difference(recorded, host.outcomes),
            compared=() if comparison is None else comparison.compared,
        )

    def decisions(self) -> Iterator[dict[str, Any]]:
        """Yield the recorded decisions, with their dates, as JSON objects."""
        for at_s, _, record in self.records:
            if isinstance(record, Decided | Rejected):
                told = msgspec.to_builtins(record)
                told.pop("chosen", None)
                if isinstance(record, Decided) and record.chosen is not None:
                    told["num_held_tokens"] = record.chosen.num_held_tokens
                    told["terms"] = msgspec.to_builtins(record.chosen.terms)
                yield {"date": self._date(at_s), **told}

    def faults(self) -> Iterator[dict[str, Any]]:
        """Yield the recorded starts and ends of processes, and repeated submissions, as JSON objects."""
        hellos = dict(self.checkpoint.peers)
        names = {hello.id: _name_of(hello) for hello in hellos.values()}
        for at_s, peer, record in self.records:
            told: dict[str, Any] = {}
            if isinstance(record, Joined) and record.hello is not None:
                hellos[peer], names[record.hello.id] = record.hello, _name_of(record.hello)
                told = {"process": names[record.hello.id]}
            elif isinstance(record, Left) and peer in hellos:
                told = {"process": _name_of(hellos[peer])}
            elif isinstance(record, Submitted):
                request = record.request
                if request.attempt or record.avoid:
                    told = {"request_id": request.request_id, "attempt": request.attempt}
                    told["avoid"] = [names.get(each, each) for each in record.avoid]
            if told:
                kind = "Replay" if isinstance(record, Submitted) else type(record).__name__
                yield {"date": self._date(at_s), "kind": kind, **told}

    def _date(self, at_s: float) -> str:
        date_s = self.checkpoint.date_s + at_s - self.checkpoint.at_s
        date = datetime.datetime.fromtimestamp(date_s, datetime.UTC)
        return date.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def _replayed(self, policy: str | None = None) -> "_Host":
        """Replay all inputs, from the recorded state of the router. policy: asked as well."""
        try:
            host = _Host(self.checkpoint, self.records)
        except ConfigError:
            raise
        except UNREADABLE as error:
            raise ConfigError(f"the router's state cannot be read: {error!r}") from error
        if policy is not None:
            host.compare(policy)
        for record in self.records:
            host.replay(*record)
        return host


def frame_chunks(chunks: Sequence[bytes]) -> bytes:
    """Return the chunks as one file: the length of each in four bytes, then its bytes."""
    return b"".join(len(chunk).to_bytes(LENGTH_BYTES, "big") + chunk for chunk in chunks)


def read_bundle(path: Path, own_policy: str = "") -> list[Replay]:
    """Return each router's recording in a file of `baton bundle`. Raises ConfigError if there is none.

    own_policy: a policy from outside this tree, whose code may run when the file names it. No other does.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [each for each in archive.infolist() if RECORDING.fullmatch(each.filename)]
            if sum(member.file_size for member in members) > MAX_RECORDINGS_BYTES:
                raise ConfigError(
                    f"--replay: {path} has more than {MAX_RECORDINGS_BYTES} bytes of recordings"
                )
            members.sort(key=lambda member: member.filename)
            found = [Replay(list(_framed(archive.read(member)))) for member in members]
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError) as error:
        raise ConfigError(f"--replay: {path} cannot be read: {reason_of(error)}") from None
    if not found:
        raise ConfigError(f"--replay: {path} has no recording of a router")
    for policy in (replay.checkpoint.config.policy for replay in found):
        if policy not in (*POLICIES, own_policy):
            raise ConfigError(
                f"--replay: {path} names the routing policy {policy!r}, which is not Baton's; if you trust "
                f"its code and the file, run it with --own-policy {policy}"
            )
    return found


def _framed(body: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(body):
        begin = place + LENGTH_BYTES
        place = begin + int.from_bytes(body[place:begin], "big")
        if place == begin:
            raise EOFError("a chunk is empty")
        yield body[begin:place]


def _first_difference(recorded: Sequence[Outcome], replayed: Sequence[Outcome]) -> Difference | None:
    for number, (one, other) in enumerate(zip_longest(recorded, replayed)):
        if one is None or other is None or _ENCODE(one) != _ENCODE(other):
            return Difference(number, one, other)
    return None


class _Host:
    """Gives a router recorded inputs, as baton/rpc/server.py gives it real ones."""

    def __init__(self, checkpoint: RouterCheckpoint, records: Sequence[tuple[float, int, Record]]) -> None:
        self.outcomes: list[Outcome] = []
        self._time = Events()  # the recorded time
        self._time.now_s = checkpoint.at_s
        self._turns: deque[Callable[[], None]] = deque()
        self._peers = {number: MutePeer(hello) for number, hello in checkpoint.peers}
        self._router = router = Router(
            checkpoint.config,
            OffsetClock(self._time, 0.0),
            checkpoint.router,
            max_index_pages=checkpoint.max_index_pages,
            call_soon=self._turns.append if checkpoint.defers else None,
            pages_per_slice=checkpoint.pages_per_slice,
        )
        peers = {f"peer {number}": peer for number, peer in self._peers.items()}
        outside = router.outside | {"sharing": UnsharedLink(), "log": _discard} | peers
        module, colon, _ = checkpoint.config.policy.partition(":")
        router.__setstate__(load(checkpoint.state, outside, module if colon else ""))
        router.cluster_state.on_outcome = self._decided
        router.cluster_state.keys.known = {
            ((record.request_id, record.attempt), record.family): record.keys
            for _, _, record in records
            if isinstance(record, PromptPages)
        }
        self.comparison: _Comparison | None = None

    def compare(self, policy: str) -> None:
        """Compare all decisions from now on."""
        self.comparison = _Comparison(self._router, policy)

    def replay(self, at_s: float, peer: int, record: Record) -> None:
        """Give the router one input. Errors are those that the recorded router raised too."""
        self._time.now_s = at_s
        try:
            self._handle(peer, record)
        except Exception:
            logger.debug("the router raises", exc_info=True)

    def _handle(self, peer: int, record: Record) -> None:
        router = self._router
        match record:
            case PromptPages() | Decided() | Rejected():
                return
            case Joined(hello=hello):
                assert hello is not None, "a packed event has its hello"
                self._peers[peer] = MutePeer(hello)
                router.joined(self._peers[peer])
            case Left():
                router.left(self._peers.pop(peer))
            case Tick():
                router.tick()
            case WorkTurn():
                self._turns.popleft()()
            case Linked():
                router.link(UnsharedLink())
            case Logs():
                router.log_to(_discard)
            case SharedDispatch():
                router.heard(record)
            case Started() | Ended() if peer == NO_PEER:  # of another router
                router.heard(record)
            case IndexJoined() | IndexForgotten() | IndexEvents() | IndexRestored():
                router.change_index(record)
            case Submitted():
                router.received(self._peers[peer], record.replayed())
            case _:
                router.received(self._peers[peer], record)

    def _decided(self, decision: Decision | Rejected, choice: RoutingChoice | None) -> None:
        outcome = outcome_of(decision, choice)
        # Read back, as the recorded ones were.
        self.outcomes.append(msgspec.msgpack.decode(_ENCODE(outcome), type=Outcome))
        if self.comparison is not None:
            self.comparison.decided(outcome)


class _SeenIndex(PrefixIndex):
    """The prefix index for a policy that is only asked: it takes no expectation of the policy's choices."""

    def __init__(self, index: PrefixIndex) -> None:
        self.__dict__ = index.__dict__  # one state for both

    def expect(self, worker_id: str, keys: bytes, ttl_s: float) -> None:
        """See `PrefixIndex.expect`."""


class _Comparison:
    """Asks another policy the questions that the router asks its own."""

    def __init__(self, router: Router, policy: str) -> None:
        self.compared: list[Compared] = []
        self._router = router
        state = router.cluster_state
        clock = router.outside["clock"]
        assert isinstance(clock, TurnClock)
        index, random = _SeenIndex(state.index), Random(router.config.seed)
        self._context = PolicyContext(clock, router.in_flight, index, state.model, state.keys, random)
        config = msgspec.structs.replace(router.config, policy=policy)
        self._policy = policy_class(policy)(self._context)
        self._pairing = Pairing(
            config, router.members, self._policy, load_policy(self._policy, self._context)
        )
        self._asked: dict[AttemptKey, tuple[Compared | None, object]] = {}
        router.pairing.on_pair = self._ask

    def _ask(self, question: PairQuestion, answer: Pair | Unpaired | NoSlot) -> None:
        if isinstance(answer, Pair):
            other = self._pairing.pair(question)
            compared = self._compared(question, answer, other if isinstance(other, Pair) else None)
            self._asked[question.submit.request.key] = compared, other

    def _compared(self, question: PairQuestion, answer: Pair, other: Pair | None) -> Compared:
        request = question.submit.request
        return Compared(
            request_id=request.request_id,
            attempt=request.attempt,
            num_tokens=request.num_tokens,
            recorded=self._choice(question, answer),
            other=None if other is None else self._choice(question, other),
        )

    def _choice(self, question: PairQuestion, pair: Pair) -> ReplayedPair:
        candidate = pair.choice.candidate if pair.choice is not None else None
        if candidate is None:
            request, workers = question.submit.request, (pair.decode.id, pair.prefill_id)
            view = self._pairing.view_of(request.model, question.reached)
            candidate = predicted(self._context, request, view, question.claim, *workers)
        return ReplayedPair(
            pair.decode.id, pair.prefill_id, candidate.terms.ttft_s, candidate.num_held_tokens
        )

    def decided(self, outcome: Outcome) -> None:
        """Keep the comparison, and tell the other policy that its own choice was dispatched."""
        compared, other = self._asked.pop((outcome.request_id, outcome.attempt), (None, None))
        if compared is None or not isinstance(outcome, Decided):
            return
        self.compared.append(compared)
        if isinstance(other, Pair) and other.choice is not None:
            self._policy.expect(other.choice, compared.num_tokens)


def _name_of(hello: Hello) -> str:
    return f"{hello.process} {hello.id}" if hello.worker is None else hello.worker.name


def _discard(line: bytes) -> None:
    """Take the place of a decision log."""
