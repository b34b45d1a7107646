"""Heartbeats of a worker: a sign of life every second, and its load between two steps of the engine."""

import contextlib
import faulthandler
import logging
import sys
from collections.abc import Sequence
from typing import Final, Protocol

from baton.clock import Clock, SystemClock
from baton.messages.bounds import MAX_EVENTS
from baton.messages.control import Alive, Heartbeat
from baton.messages.workers import Load
from baton.rpc.liveness import RunningStep, StepWatchdog
from baton.rpc.peers import Peer, PeerRegistry

BEAT_S: Final = 1.0

logger = logging.getLogger(__name__)


class Stats(Protocol):
    """Of an engine: see engine/replica.py."""

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


class HeartbeatThread(Protocol):
    """A worker, as far as its beats tell."""

    @property
    def is_draining(self) -> bool: ...
    @property
    def attempts(self) -> tuple[tuple[str, int], ...]: ...
    def load(self) -> Load: ...


class HeartbeatSender:
    def __init__(self, peer_registry: PeerRegistry, clock: Clock) -> None:
        self._peer_registry = peer_registry
        self.clock = clock
        self._next_s = clock.now_s()

    def give(self, worker: HeartbeatThread, *, at_once: bool = False) -> None:
        """To be called at least every BEAT_S; says nothing where it was said a moment ago."""
        routers, now_s = self._peer_registry.routers, self.clock.now_s()
        if not routers or (now_s < self._next_s and not at_once):
            return
        self._next_s = now_s + BEAT_S
        attempts = worker.attempts[:MAX_EVENTS]
        beat = Heartbeat(load=worker.load(), is_draining=worker.is_draining, attempts=attempts)
        for router in routers:
            router.send(beat)


class SignsOfLife:
    """Sends routers a sign of life with the age of the current step, from a thread that no step delays."""

    def __init__(self, steps: StepWatchdog, clock: Clock | None = None) -> None:
        self._steps = steps
        self._clock = clock or SystemClock()
        self._next_s = self._clock.now_s()
        self._was_overdue = False

    def give(self, routers: Sequence[Peer]) -> None:
        """Send a sign of life every BEAT_S, and when the step becomes overdue; called in every tick."""
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


def load_of(stats: Stats) -> Load:
    """What an engine tells of itself; the worker adds what it knows."""
    pages = {
        "free": stats.num_free_pages,
        "active": stats.num_active_pages,
        "cached": stats.num_cached_pages,
        "leased": stats.num_leased_pages,
        "quarantined": stats.num_quarantined_pages,
    }
    return Load(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        pages=pages,
        prefix_queries_tokens=stats.total_queried_tokens,
        prefix_hits_tokens=stats.total_hit_tokens,
        num_preemptions=stats.total_preemptions,
    )
