"""The reports of a worker to its routers: heartbeats, KV events and measured times.

1. `heartbeat`: the worker's load, every BEAT_S, between two steps of the engine.
2. `SignsOfLife`: the age of the current step, every BEAT_S, from a thread that no step delays.
3. KV events, for routers that have asked (KvEventsWanted): first all pages that the worker holds, then the
   changes, at most every EVENTS_S, numbered through the worker's whole life. When a router asks, all routers
   that have asked get all pages again: every router gets the same messages.
4. Measured times, at most every MEASURED_S, for the same routers. Of steps a sample is sent: one each
   SAMPLE_S. Without a router the newest MAX_KEPT times are kept.
"""

import contextlib
import faulthandler
import logging
import sys
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from baton.clock import Clock, SystemClock
from baton.messages.bounds import MAX_EVENTS
from baton.messages.control import Alive, Heartbeat, KvEventBatch, Measured
from baton.messages.workers import Load, PrefillTimes, RunningStep, StepTimes, Tier
from baton.rpc.liveness import StepWatchdog
from baton.rpc.peers import Peer, PeerRegistry

BEAT_S: Final = 1.0
EVENTS_S: Final = 0.05
PAGES_PER_MESSAGE: Final = 8192  # a fifth of a frame
MEASURED_S: Final = 1.0
SAMPLE_S: Final = 1 / 32
MAX_KEPT: Final = 1024  # as many as a message holds

logger = logging.getLogger(__name__)


class ChangedPages(Protocol):
    """Changes of an engine's pages since the last call: (key, page, generation) each."""

    @property
    def is_afresh(self) -> bool: ...
    @property
    def device(self) -> Sequence[tuple[bytes, int, int]]: ...
    @property
    def host(self) -> Sequence[tuple[bytes, int, int]]: ...


class LastStep(Protocol):
    """Figures of an engine's last step."""

    @property
    def num_sequences(self) -> int: ...
    @property
    def num_new_tokens(self) -> int: ...
    @property
    def num_context_tokens(self) -> int: ...
    @property
    def step_s(self) -> float: ...


class ReportedEngine(Protocol):
    """The part of an engine that reports read: see engine/replica.py."""

    def take_page_changes(self, *, is_afresh: bool = False) -> ChangedPages: ...
    def last_step(self) -> LastStep | None: ...


class ReportedWorker(Protocol):
    """The part of a worker that heartbeats read."""

    @property
    def is_draining(self) -> bool: ...
    @property
    def attempts(self) -> tuple[tuple[str, int], ...]: ...
    def load(self) -> Load: ...


class WorkerReports:
    """Sends one worker's reports. All calls come from the worker's thread."""

    def __init__(self, peer_registry: PeerRegistry, clock: Clock) -> None:
        self.clock = clock
        self.step_began_s = 0.0
        self._peer_registry = peer_registry
        self._asked: tuple[Peer, ...] = ()  # routers that asked for KV events; some may have left
        self._must_tell_all = False
        self._next_event = 0
        self._prefills: deque[PrefillTimes] = deque(maxlen=MAX_KEPT)
        self._steps: deque[StepTimes] = deque(maxlen=MAX_KEPT)
        now_s = clock.now_s()
        self._next_beat_s = self._next_events_s = self._next_measured_s = self._next_sample_s = now_s

    def heartbeat(self, worker: ReportedWorker, *, at_once: bool = False) -> None:
        """Send a heartbeat when one is due, or at once. Call at least every BEAT_S."""
        routers, now_s = self._peer_registry.routers, self.clock.now_s()
        if not routers or (now_s < self._next_beat_s and not at_once):
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

    def step_begins(self) -> None:
        """Note the time at which a step of the engine begins."""
        self.step_began_s = self.clock.now_s()

    def step_ended(self, engine: ReportedEngine) -> None:
        """Sample the engine's last step. Call after each step."""
        now_s = self.clock.now_s()
        step = engine.last_step() if now_s >= self._next_sample_s and self._readers else None
        if step is not None:
            self._next_sample_s = now_s + SAMPLE_S
            figures = step.num_sequences, step.num_new_tokens, step.num_context_tokens
            self._steps.append(StepTimes(*figures, step.step_s))

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
        changes = engine.take_page_changes(is_afresh=self._must_tell_all)
        self._must_tell_all = False
        if changes.is_afresh or changes.device:
            self._send(routers, Tier.DEVICE, changes.device, is_afresh=changes.is_afresh)
        if changes.host:
            self._send(routers, Tier.HOST, changes.host, is_afresh=False)
        return bool(changes.is_afresh or changes.device or changes.host)

    def _send(
        self,
        routers: Sequence[Peer],
        tier: Tier,
        changes: Sequence[tuple[bytes, int, int]],
        *,
        is_afresh: bool,
    ) -> None:
        for first in range(0, max(1, len(changes)), PAGES_PER_MESSAGE):
            part = changes[first : first + PAGES_PER_MESSAGE]
            events = KvEventBatch(
                first=self._next_event,
                keys=b"".join([key for key, _, _ in part]),
                pages=tuple([page for _, page, _ in part]),
                generations=tuple([generation for _, _, generation in part]),
                tier=tier,
                is_afresh=is_afresh and not first,
            )
            for router in routers:
                router.send(events)
            self._next_event += len(part)


class SignsOfLife:
    """Sends routers a sign of life with the age of the current step, from a thread that no step delays."""

    def __init__(self, steps: StepWatchdog, clock: Clock | None = None) -> None:
        self._steps = steps
        self._clock = clock or SystemClock()
        self._next_s = self._clock.now_s()
        self._was_overdue = False

    def give(self, routers: Sequence[Peer]) -> None:
        """Send a sign of life every BEAT_S, and when the step becomes overdue; call it in every tick."""
        now_s, step = self._clock.now_s(), self._steps.present
        has_become_overdue = step.is_overdue and not self._was_overdue
        self._was_overdue = step.is_overdue
        if has_become_overdue:
            _show_threads(step)
        if now_s < self._next_s and not has_become_overdue:
            return
        self._next_s = now_s + BEAT_S
        for router in routers:
            router.send(Alive(step=step))


def _show_threads(step: RunningStep) -> None:
    """Log the stacks of all threads, so that the cause can be found after the process was killed."""
    logger.error("%s; its threads are in:", step.complaint)
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):  # there may be no stderr
        faulthandler.dump_traceback(sys.__stderr__)  # type: ignore[arg-type]


class EngineFigures(Protocol):
    """The statistics of an engine that a load contains: see engine/replica.py."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_free_pages(self) -> int: ...
    @property
    def num_active_pages(self) -> int: ...
    @property
    def num_cached_pages(self) -> int: ...
    @property
    def num_leased_pages(self) -> int: ...
    @property
    def num_quarantined_pages(self) -> int: ...
    @property
    def total_queried_tokens(self) -> int: ...
    @property
    def total_hit_tokens(self) -> int: ...
    @property
    def total_preemptions(self) -> int: ...


def load_of(figures: EngineFigures) -> Load:
    """Return the engine's part of a worker's load; the worker adds its own figures."""
    pages = {
        "free": figures.num_free_pages,
        "active": figures.num_active_pages,
        "cached": figures.num_cached_pages,
        "leased": figures.num_leased_pages,
        "quarantined": figures.num_quarantined_pages,
    }
    return Load(
        num_running=figures.num_running,
        num_waiting=figures.num_waiting,
        pages=pages,
        prefix_queries_tokens=figures.total_queried_tokens,
        prefix_hits_tokens=figures.total_hit_tokens,
        num_preemptions=figures.total_preemptions,
    )
