"""The base of both worker roles: membership, drain, overload level, and the reports to routers.

A worker reports heartbeats, KV events and measured times (`WorkerReports`):

1. `heartbeat`: the worker's load, every BEAT_S, between two steps of the engine.
2. KV events, for routers that have asked (KvEventsWanted): first all pages that the worker holds, then the
   changes, at most every EVENTS_S, numbered through the worker's whole life. When a router asks, all routers
   that have asked get all pages again: every router gets the same messages.
3. Measured times, at most every MEASURED_S, for the same routers. Of steps a sample is sent: one each
   SAMPLE_S. Without a router the newest MAX_KEPT times are kept.

`SignsOfLife` (baton/rpc/server.py) reports the age of the current step.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Sequence
from math import inf
from typing import Final, Protocol

import msgspec

from baton.clock import Clock
from baton.errors import InvalidRequest
from baton.messages.bounds import MAX_EVENTS, MAX_REASON_CHARS
from baton.messages.codec import AnyMessage
from baton.messages.control import (
    Failure,
    Heartbeat,
    KvEventBatch,
    KvEventsWanted,
    Measured,
    Members,
    PageChanges,
    Pressure,
)
from baton.messages.operations import Drain, Flip
from baton.messages.orders import FollowedOrders, Sleep, Wake
from baton.messages.status import OverloadLevel, Times, snapshot
from baton.messages.workers import Load, PrefillTimes, StepTimes, Worker, WorkerRole, WorkerTimes
from baton.pages import short_keys
from baton.request import AttemptKey, Request, StepOutput
from baton.rpc.liveness import BEAT_S
from baton.rpc.peers import Peer, PeerRegistry

EVENTS_S: Final = 0.05
PAGES_PER_MESSAGE: Final = 8192  # a sixteenth of a frame
MEASURED_S: Final = 1.0
SAMPLE_S: Final = 1 / 32
MAX_KEPT: Final = 1024  # as many as one message may name
MAX_ENDED: Final = 4096  # requests that are remembered


class ReportedEngine(Protocol):
    """The part of an engine that every worker uses: see engine/replica.py."""

    def set_pressure(self, *, small_chunks: bool, makes_room: bool) -> None: ...
    def take_page_changes(self, *, is_snapshot: bool = False) -> PageChanges: ...
    def last_step(self) -> StepTimes | None: ...


class ReportedWorker(Protocol):
    """The part of a worker that heartbeats read."""

    @property
    def is_draining(self) -> bool: ...
    @property
    def attempts(self) -> tuple[AttemptKey, ...]: ...
    def load(self) -> Load: ...


class TimedSequence(Protocol):
    """The part of an engine's sequence that a `PromptTimer` reads."""

    @property
    def started_s(self) -> float | None: ...
    @property
    def own_s(self) -> float: ...
    @property
    def used_s(self) -> float: ...
    @property
    def computed_s(self) -> float: ...
    @property
    def preempted_s(self) -> float: ...
    @property
    def num_draft_tokens(self) -> int: ...
    @property
    def num_accepted_tokens(self) -> int: ...


class PromptTimer:
    """Measures a prompt that a worker computes, from its arrival to its first token."""

    def __init__(self, request: Request, arrived_s: float) -> None:
        self.first_token_s = inf
        self.times: PrefillTimes | None = None  # from the first token on
        self._request = request
        self._arrived_s = arrived_s
        self._sequence: TimedSequence | None = None
        self._pulled = (0, 0.0)
        self._prompt_s = self._preempted_s = 0.0  # until the first token
        self._told_s = 0.0  # of the sequence's used_s

    @property
    def is_running(self) -> bool:
        """The engine has the sequence, and its first token has not come."""
        return self._sequence is not None and self.times is None

    def pulled(self, num_bytes: int, seconds: float) -> None:
        """Record the prefix that came from a peer."""
        self._pulled = num_bytes, seconds

    def run(self, sequence: TimedSequence) -> None:
        """Follow the prompt's sequence in the engine."""
        self._sequence = sequence

    def computed(self, output: StepOutput, now_s: float) -> PrefillTimes:
        """Record the first token and return the times."""
        started_s = now_s if self._started_s is None else self._started_s
        self.first_token_s = now_s
        if self._sequence is not None:
            self._prompt_s, self._preempted_s = self._sequence.computed_s, self._sequence.preempted_s
        self.times = PrefillTimes(
            self._request.request_id,
            self._request.attempt,
            waited_s=started_s - self._arrived_s,
            computed_s=now_s - started_s,
            num_new_tokens=self._request.num_tokens - output.num_cached_tokens,
            num_tokens=self._request.num_tokens,
            pulled_bytes=self._pulled[0],
            pulled_s=self._pulled[1],
            own_s=self._sequence.own_s if self._sequence is not None else 0.0,
        )
        return self.times

    def phases(
        self,
        sequence: TimedSequence | None = None,
        *,
        ended_s: float = 0.0,
        granted_s: float = 0.0,
        pages_s: float = 0.0,
        hidden_s: float = 0.0,
    ) -> WorkerTimes:
        """Return the phases of the attempt. sequence: has decoded. The other values: see WorkerTimes."""
        used_s = self._take_used_s(sequence or self._sequence)
        computed_s, preempted_s = self._prompt_s, self._preempted_s
        if sequence is not None:
            computed_s, preempted_s = sequence.computed_s, sequence.preempted_s
        return WorkerTimes(
            arrived_s=self._arrived_s,
            started_s=self._started_s or 0.0,
            first_token_s=0.0 if self.times is None else self.first_token_s,
            granted_s=granted_s,
            pages_s=pages_s,
            ended_s=ended_s,
            pulled_s=self._pulled[1],
            prompt_s=self._prompt_s,
            prompt_preempted_s=self._preempted_s,
            decode_s=computed_s - self._prompt_s,
            decode_preempted_s=preempted_s - self._preempted_s,
            hidden_s=hidden_s,
            used_s=used_s,
            num_draft_tokens=0 if sequence is None else sequence.num_draft_tokens,
            num_accepted_tokens=0 if sequence is None else sequence.num_accepted_tokens,
        )

    @property
    def _started_s(self) -> float | None:
        """The time at which the engine began to compute the prompt; None: not yet, or not here."""
        return None if self._sequence is None else self._sequence.started_s

    def _take_used_s(self, sequence: TimedSequence | None) -> float:
        told_s, self._told_s = self._told_s, self._told_s if sequence is None else sequence.used_s
        return max(0.0, self._told_s - told_s)


class WorkerReports:
    """Sends one worker's reports. All calls come from the worker's thread."""

    def __init__(self, peer_registry: PeerRegistry, clock: Clock) -> None:
        self.clock = clock
        self.times: defaultdict[str, Times] = defaultdict(Times)  # by name, for `with_times`
        self._peer_registry = peer_registry
        self._asked: tuple[Peer, ...] = ()  # routers that asked for KV events; some may have left
        self._must_tell_all = False
        self._next_event = 0
        self._prefills: deque[PrefillTimes] = deque(maxlen=MAX_KEPT)
        self._steps: deque[StepTimes] = deque(maxlen=MAX_KEPT)
        now_s = clock.now_s()
        self._next_beat_s = self._next_events_s = self._next_measured_s = self._next_sample_s = now_s

    def heartbeat(self, worker: ReportedWorker, *, at_once: bool = False) -> None:
        """Send a heartbeat when one is due, or at once. Call at least every BEAT_S.

        After a long step call it once the messages that came meanwhile are handled: an attempt that the
        heartbeat does not name counts as lost.
        """
        now_s = self.clock.now_s()
        if now_s < self._next_beat_s and not at_once:
            return
        routers = self._peer_registry.routers
        if not routers:
            return
        self._next_beat_s = now_s + BEAT_S
        attempts = worker.attempts[:MAX_EVENTS]
        beat = Heartbeat(load=worker.load(), is_draining=worker.is_draining, attempts=attempts)
        for router in routers:
            router.send(beat)

    def want(self, router: Peer) -> None:
        """Send this router, and those that asked before, all pages in the next `tell`."""
        self._asked = tuple(dict.fromkeys((*self._readers, router)))
        self._must_tell_all, self._next_events_s = True, self.clock.now_s()

    def step_ended(self, engine: ReportedEngine) -> None:
        """Sample the engine's last step. Call after each step."""
        now_s = self.clock.now_s()
        step = engine.last_step() if now_s >= self._next_sample_s and self._readers else None
        if step is not None:
            self._next_sample_s = now_s + SAMPLE_S
            self._steps.append(step)

    def computed(self, times: PrefillTimes) -> PrefillTimes:
        """Count the wait and the time of a prompt that has its first token, and return them."""
        self.times["queue"].observe(times.waited_s)
        self.times["prefill"].observe(times.computed_s)
        return times

    def with_times(self, load: Load) -> Load:
        """Return an engine's load with the histograms of its worker too."""
        return msgspec.structs.replace(load, times={**load.times, **snapshot(self.times)})

    def prefilled(self, times: PrefillTimes) -> None:
        """Keep the times of a computed prompt for the next `tell`."""
        self._prefills.append(times)

    def tell(self, engine: ReportedEngine) -> None:
        """Send the KV events and measured times that are due. Call after each step."""
        now_s, routers = self.clock.now_s(), self._readers
        if not routers:
            return
        if now_s >= self._next_events_s and self._tell_changes(routers, engine):
            self._next_events_s = now_s + EVENTS_S
        if now_s >= self._next_measured_s and (self._prefills or self._steps):
            self._next_measured_s = now_s + MEASURED_S
            measured = Measured(prefills=tuple(self._prefills), steps=tuple(self._steps))
            for router in routers:
                router.send(measured)
            self._prefills.clear()
            self._steps.clear()

    @property
    def _readers(self) -> list[Peer]:
        """The connected routers that asked for KV events."""
        return [router for router in self._asked if self._peer_registry.is_router(router)]

    def _tell_changes(self, routers: Sequence[Peer], engine: ReportedEngine) -> bool:
        """Return whether there was anything to send."""
        changes = engine.take_page_changes(is_snapshot=self._must_tell_all)
        self._must_tell_all = False
        if changes.is_snapshot:
            self._send(routers, KvEventBatch(first=self._next_event, keys=b"", is_snapshot=True))
        for tier, keys in changes.keys.items():
            for first in range(0, len(keys), PAGES_PER_MESSAGE):
                joined = short_keys(keys[first : first + PAGES_PER_MESSAGE])
                self._send(routers, KvEventBatch(first=self._next_event, keys=joined, tier=tier))
        return changes.is_snapshot or any(changes.keys.values())

    def _send(self, routers: Sequence[Peer], events: KvEventBatch) -> None:
        self._next_event += events.num_changes
        for router in routers:
            router.send(events)


class EndedAttempts:
    """Attempts that have ended here. A router that was suspended may still send Dispatch or Prefill for one.

    The end of an attempt is also the end of all earlier attempts of its request.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[str, int] = OrderedDict()  # request id -> attempt, oldest end first

    def add(self, request_id: str, attempt: int) -> None:
        self._last[request_id] = max(attempt, self._last.pop(request_id, 0))
        if len(self._last) > MAX_ENDED:
            self._last.popitem(last=False)

    def __contains__(self, key: AttemptKey) -> bool:
        return key[1] <= self._last.get(key[0], -1)


def check_one_choice(request: Request) -> None:
    """Raise InvalidRequest for a request of several choices: each choice is an attempt of its own."""
    if request.sampling.n != 1:
        raise InvalidRequest(f"an attempt has one choice, got n {request.sampling.n}")


def failure_of(output: StepOutput) -> tuple[Failure, str]:
    """Return the failure of an attempt that ends with this output, and the reason. output: has an error."""
    if output.is_invalid:
        return Failure.INVALID, (output.error or "")[:MAX_REASON_CHARS]
    return Failure.ERROR, "the model's output for it could not be sampled"


class PageLinks(Protocol):
    """Links to other workers that carry KV pages."""

    def keep_up(self, workers: Collection[Worker]) -> None:
        """Dial each of these workers that has no link yet."""


class WorkerNode(ABC):
    """A Node. All calls come from one thread."""

    def __init__(
        self, engine: ReportedEngine, peer_registry: PeerRegistry, links: PageLinks, reports: WorkerReports
    ) -> None:
        self.hello = peer_registry.hello
        self.orders = FollowedOrders(self.hello.worker)
        self.is_draining = False
        self.next_role: WorkerRole | None = None  # to be taken once the worker has drained
        self.sleep_level = 0  # of `Sleep`; the worker sleeps once it has drained
        self.is_dismissed = False  # by `Drain`: the worker ends once it has drained
        self._peer_registry = peer_registry
        self._links = links
        self._engine = engine
        self._reports = reports
        self._levels: dict[str, OverloadLevel] = {}  # router's id -> its overload level

    @property
    @abstractmethod
    def attempts(self) -> tuple[AttemptKey, ...]:
        """The attempts that the worker works on."""

    @abstractmethod
    def load(self) -> Load:
        """Return the worker's load for its heartbeat."""

    def drain(self) -> None:
        """Take no new attempts, finish the running ones."""
        self.is_draining = True
        self._reports.heartbeat(self, at_once=True)

    def joined(self, peer: Peer) -> None:
        self._peer_registry.joined(peer)
        self._peer_registry.report(self._reachable())

    def left(self, peer: Peer) -> None:
        if self._peer_registry.left(peer):
            if self._levels.pop(peer.hello.id, None) is not None:
                self._set_pressure()
            self._lost(peer)
            self._lost_workers(self._peer_registry.recount())
            self._peer_registry.report(self._reachable())

    def tick(self) -> None:
        self._peer_registry.tick()
        self._keep_up()

    def received(self, peer: Peer, message: AnyMessage) -> None:
        """See Node. Handles the messages that both roles share; the others go to `_heard`."""
        match message:
            case Members() if self._peer_registry.is_router(peer):
                self._lost_workers(self._peer_registry.changed(peer, message))
                self._peer_registry.keep_up()
                self._keep_up()
            case Drain() if self._peer_registry.is_router(peer):
                self.is_dismissed = True
                self.drain()
            case Flip() if self._peer_registry.is_router(peer):
                self.next_role = message.role
                self.drain()
            case Sleep() | Wake() if self._peer_registry.is_router(peer):
                self._take_order(message)
            case Pressure() if self._peer_registry.is_router(peer):
                self._levels[peer.hello.id] = message.level
                self._set_pressure()
            case KvEventsWanted() if self._peer_registry.is_router(peer):
                self._reports.want(peer)
            case _:
                self._heard(peer, message)

    def _take_order(self, order: Sleep | Wake) -> None:
        """Follow an order, unless it is known or a later one holds."""
        if self.orders.take(order) and isinstance(order, Sleep):
            self.sleep_level = order.level
            self.drain()

    def _keep_up(self) -> None:
        self._links.keep_up(self._peer_registry.with_pages())
        self._peer_registry.report(self._reachable())

    def _set_pressure(self) -> None:
        """Apply the highest overload level of any router."""
        level = max(self._levels.values(), default=OverloadLevel.CALM)
        self._engine.set_pressure(small_chunks=level.small_chunks, makes_room=level.makes_room)

    @abstractmethod
    def _reachable(self) -> list[str]:
        """Return the ids of the workers that this worker could work with now."""

    @abstractmethod
    def _lost(self, peer: Peer) -> None:
        """End the work for a process without a connection."""

    @abstractmethod
    def _lost_workers(self, ids: list[str]) -> None:
        """End the work with these workers, which no router lists any more; `ids` may be empty."""

    @abstractmethod
    def _heard(self, peer: Peer, message: AnyMessage) -> None:
        """Handle a message for this role alone; raise ProtocolError for any other message."""


class SleepingWorker:
    """The Node of a worker that sleeps, without an engine. All calls come from one thread."""

    def __init__(self, peer_registry: PeerRegistry) -> None:
        self.hello = peer_registry.hello
        self.orders = FollowedOrders(self.hello.worker)
        self.is_draining = False
        self._peer_registry = peer_registry

    def joined(self, peer: Peer) -> None:
        self._peer_registry.joined(peer)

    def left(self, peer: Peer) -> None:
        self._peer_registry.left(peer)

    def tick(self) -> None:
        self._peer_registry.tick()

    def received(self, peer: Peer, message: AnyMessage) -> None:
        """See Node. A sleeping worker ignores all messages but orders of routers to wake or to drain."""
        if self._peer_registry.is_router(peer):
            if isinstance(message, Sleep | Wake):
                self.orders.take(message)
            self.is_draining = self.is_draining or isinstance(message, Drain)
