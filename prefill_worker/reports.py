"""What this worker's prompts took, told to the router.

The times of a prompt: it arrives; its first step begins; its first token is there; the decode worker has
taken its last page. They are told once that has happened, of no prompt that ended otherwise.
"""

from dataclasses import dataclass

from baton.clock import Clock
from baton.colleagues import Colleagues
from baton.engine.sequence import SequenceStatus
from baton.kvtransfer.ended import Ended
from baton.kvtransfer.handoff import Outcome
from baton.kvtransfer.pulls import Pull
from baton.prefill_worker.departure import Departure
from baton.reports import WorkerReports
from baton.request import StepOutput
from baton.times import PrefillTimes

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


class Reports(WorkerReports):
    def __init__(self, colleagues: Colleagues, clock: Clock) -> None:
        super().__init__(colleagues, clock)
        self._stamps: dict[bytes, _Stamps] = {}  # by transfer

    def arrived(self, departure: Departure) -> None:
        self._stamps[departure.transfer] = _Stamps(self.clock.now_s())

    def pulled(self, departure: Departure, pull: Pull) -> None:
        stamps = self._stamps[departure.transfer]
        stamps.pulled_bytes, stamps.pulled_s = pull.num_bytes if pull.pages else 0, pull.seconds

    def computing(self, departure: Departure) -> None:
        """A step has ended, and it is not computed yet."""
        stamps = self._stamps[departure.transfer]
        if stamps.started_s is None and departure.progress and departure.progress.status not in _QUEUED:
            stamps.started_s = self.step_began_s

    def computed(self, departure: Departure, output: StepOutput) -> None:
        stamps = self._stamps[departure.transfer]
        if stamps.started_s is None:
            stamps.started_s = self.step_began_s
        stamps.computed_s = self.clock.now_s() - stamps.started_s
        stamps.num_cached_tokens = output.num_cached_tokens
        stamps.own_s = departure.progress.own_s if departure.progress else 0.0

    def ended(self, departure: Departure, ended: Ended) -> None:
        """Its transfer, one way or another; what is left of it is forgotten."""
        stamps = self._stamps.pop(departure.transfer, None)
        times, is_handed_over = ended.times, ended.outcome is Outcome.HANDED_OVER
        if stamps is None or stamps.started_s is None or stamps.computed_s is None or not is_handed_over:
            return
        request = departure.request
        self.measurements.prefilled(
            PrefillTimes(
                request.request_id,
                request.attempt,
                waited_s=stamps.started_s - stamps.arrived_s,
                computed_s=stamps.computed_s,
                num_new_tokens=departure.num_tokens - stamps.num_cached_tokens,
                num_tokens=departure.num_tokens,
                pulled_bytes=stamps.pulled_bytes,
                pulled_s=stamps.pulled_s,
                moved_bytes=times.num_bytes if times is not None else 0,
                exposed_s=times.exposed_s if times is not None else 0.0,
                own_s=stamps.own_s,
            )
        )

    def forget(self, departure: Departure) -> None:
        self._stamps.pop(departure.transfer, None)
