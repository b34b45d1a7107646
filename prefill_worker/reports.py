"""The times of a prefill worker's prompts, reported to the router.

A prompt arrives, its first step begins, its first token is there, and the decode worker has verified its last
page. Prompts that end otherwise are not reported.
"""

from dataclasses import dataclass

from baton.clock import Clock
from baton.engine.scheduler.sequence import SequenceStatus
from baton.kvtransfer.prefixes import PrefixPull
from baton.kvtransfer.protocol.handoff import HandoffOutcome, TransferEnded
from baton.messages.workers import PrefillTimes
from baton.prefill_worker.prefill_job import PrefillJob
from baton.request import StepOutput
from baton.rpc.peers import PeerRegistry
from baton.rpc.reports import WorkerReports

_QUEUED = (SequenceStatus.WAITING, SequenceStatus.SWAPPED)


@dataclass(slots=True)
class _Stamps:
    arrived_s: float
    started_s: float | None = None
    computed_s: float | None = None  # it took
    num_cached_tokens: int = 0
    own_s: float = 0.0
    pulled_bytes: int = 0
    pulled_s: float = 0.0


class PrefillReports(WorkerReports):
    """Measures prompts between their order and the end of their transfer."""

    def __init__(self, peer_registry: PeerRegistry, clock: Clock) -> None:
        super().__init__(peer_registry, clock)
        self._stamps: dict[bytes, _Stamps] = {}  # by transfer

    def arrived(self, job: PrefillJob) -> None:
        self._stamps[job.transfer] = _Stamps(self.clock.now_s())

    def pulled(self, job: PrefillJob, pull: PrefixPull) -> None:
        stamps = self._stamps[job.transfer]
        stamps.pulled_bytes, stamps.pulled_s = pull.num_bytes if pull.pages else 0, pull.seconds

    def computing(self, job: PrefillJob) -> None:
        """A step has ended, and it is not computed yet."""
        stamps = self._stamps[job.transfer]
        if stamps.started_s is None and job.progress and job.progress.status not in _QUEUED:
            stamps.started_s = self.step_began_s

    def computed(self, job: PrefillJob, output: StepOutput) -> None:
        stamps = self._stamps[job.transfer]
        if stamps.started_s is None:
            stamps.started_s = self.step_began_s
        stamps.computed_s = self.clock.now_s() - stamps.started_s
        stamps.num_cached_tokens = output.num_cached_tokens
        stamps.own_s = job.progress.own_s if job.progress else 0.0

    def ended(self, job: PrefillJob, ended: TransferEnded) -> None:
        """Its transfer, one way or another; what is left of it is forgotten."""
        stamps = self._stamps.pop(job.transfer, None)
        times, is_handed_over = ended.times, ended.outcome is HandoffOutcome.HANDED_OVER
        if stamps is None or stamps.started_s is None or stamps.computed_s is None or not is_handed_over:
            return
        request = job.request
        self.prefilled(
            PrefillTimes(
                request.request_id,
                request.attempt,
                waited_s=stamps.started_s - stamps.arrived_s,
                computed_s=stamps.computed_s,
                num_new_tokens=job.num_tokens - stamps.num_cached_tokens,
                num_tokens=job.num_tokens,
                pulled_bytes=stamps.pulled_bytes,
                pulled_s=stamps.pulled_s,
                moved_bytes=times.num_bytes if times is not None else 0,
                exposed_s=times.exposed_s if times is not None else 0.0,
                own_s=stamps.own_s,
            )
        )

    def forget(self, job: PrefillJob) -> None:
        self._stamps.pop(job.transfer, None)
