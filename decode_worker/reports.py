"""The times of prompts that a decode worker computed itself, reported to the router.

A prompt arrives, its first step begins, and its first token is there.
"""

from dataclasses import dataclass

from baton.clock import Clock
from baton.decode_worker.attempt import Attempt
from baton.engine.scheduler.sequence import SequenceProgress, SequenceStatus
from baton.messages.workers import PrefillTimes
from baton.request import StepOutput
from baton.rpc.peers import PeerRegistry
from baton.rpc.reports import ReportedEngine, WorkerReports

_QUEUED = (SequenceStatus.WAITING, SequenceStatus.SWAPPED)


@dataclass(slots=True)
class _Stamps:
    arrived_s: float
    progress: SequenceProgress | None = None  # of one that is computed here
    started_s: float | None = None


class DecodeReports(WorkerReports):
    """Measures prompts between their Dispatch and their first token."""

    def __init__(self, peer_registry: PeerRegistry, clock: Clock) -> None:
        super().__init__(peer_registry, clock)
        self._stamps: dict[str, _Stamps] = {}  # by engine id, of attempts without a token
        self._computing: dict[str, _Stamps] = {}  # those that the engine has not started

    def arrived(self, attempt: Attempt) -> None:
        self._stamps[attempt.engine_id] = _Stamps(self.clock.now_s())

    def begun(self, attempt: Attempt, progress: SequenceProgress) -> None:
        """Start to measure an attempt that the engine has; one with a first token was computed elsewhere."""
        if attempt.first is not None:
            self.forget(attempt)
            return
        stamps = self._stamps[attempt.engine_id]
        stamps.progress = progress
        self._computing[attempt.engine_id] = stamps

    def step_ended(self, engine: ReportedEngine) -> None:
        super().step_ended(engine)
        for engine_id, stamps in list(self._computing.items()):
            if stamps.progress is not None and stamps.progress.status not in _QUEUED:
                stamps.started_s = self.step_began_s
                del self._computing[engine_id]

    def said(self, attempt: Attempt, output: StepOutput) -> None:
        """Report the prompt's times at its first token."""
        stamps = self._stamps.pop(attempt.engine_id, None)
        if stamps is None:
            return
        self._computing.pop(attempt.engine_id, None)
        pull = attempt.pull
        started_s = self.step_began_s if stamps.started_s is None else stamps.started_s
        self.prefilled(
            PrefillTimes(
                attempt.request_id,
                attempt.number,
                waited_s=started_s - stamps.arrived_s,
                computed_s=self.clock.now_s() - started_s,
                num_new_tokens=len(attempt.token_ids) - output.num_cached_tokens,
                num_tokens=len(attempt.token_ids),
                pulled_bytes=pull.num_bytes if pull is not None and pull.pages else 0,
                pulled_s=pull.seconds if pull is not None else 0.0,
                own_s=stamps.progress.own_s if stamps.progress is not None else 0.0,
            )
        )

    def forget(self, attempt: Attempt) -> None:
        self._stamps.pop(attempt.engine_id, None)
        self._computing.pop(attempt.engine_id, None)
