"""What the router is told of this worker beside its beats: the pages it knows, and what its prompts took.

The times of a prompt: it arrives; its first step begins; its first token is there; the decode worker has
taken its last page. They are told once that has happened, of no prompt that ended otherwise.
"""

from dataclasses import dataclass

from baton.clock import Clock
from baton.colleagues import Colleagues
from baton.control import PrefillTimes
from baton.engine.replica import Replica
from baton.engine.sequence import SequenceStatus
from baton.kvtransfer.ended import Ended
from baton.kvtransfer.handoff import Outcome
from baton.kvtransfer.pulls import Pull
from baton.measurements import Measurements
from baton.node import Peer
from baton.page_news import PageNews
from baton.prefill_worker.departure import Departure
from baton.request import StepOutput

_QUEUED = (SequenceStatus.WAITING, SequenceStatus.SWAPPED)


@dataclass(slots=True)
class _Stamps:
    arrived_s: float
    started_s: float | None = None
    computed_s: float | None = None  # it took
    num_cached_tokens: int = 0
    pulled_bytes: int = 0
    pulled_s: float = 0.0


class Reports:
    def __init__(self, colleagues: Colleagues, clock: Clock) -> None:
        self._clock = clock
        self._news = PageNews(colleagues, clock)
        self._measurements = Measurements(self._news, clock)
        self._stamps: dict[bytes, _Stamps] = {}  # by transfer
        self._step_began_s = 0.0

    def want(self, router: Peer) -> None:
        self._news.want(router)

    def tell(self, engine: Replica) -> None:
        """What is due; to be called after each step."""
        self._news.tell(engine)
        self._measurements.tell()

    def arrived(self, departure: Departure) -> None:
        self._stamps[departure.transfer] = _Stamps(self._clock.now_s())

    def pulled(self, departure: Departure, pull: Pull) -> None:
        stamps = self._stamps[departure.transfer]
        stamps.pulled_bytes, stamps.pulled_s = pull.num_bytes if pull.pages else 0, pull.seconds

    def step_begins(self) -> None:
        self._step_began_s = self._clock.now_s()

    def step_ended(self, engine: Replica) -> None:
        self._measurements.stepped(engine)

    def computing(self, departure: Departure) -> None:
        """A step has ended, and it is not computed yet."""
        stamps = self._stamps[departure.transfer]
        if stamps.started_s is None and departure.progress and departure.progress.status not in _QUEUED:
            stamps.started_s = self._step_began_s

    def computed(self, departure: Departure, output: StepOutput) -> None:
        stamps = self._stamps[departure.transfer]
        if stamps.started_s is None:
            stamps.started_s = self._step_began_s
        stamps.computed_s = self._clock.now_s() - stamps.started_s
        stamps.num_cached_tokens = output.num_cached_tokens

    def ended(self, departure: Departure, ended: Ended) -> None:
        """Its transfer, one way or another; what is left of it is forgotten."""
        stamps = self._stamps.pop(departure.transfer, None)
        times, is_handed_over = ended.times, ended.outcome is Outcome.HANDED_OVER
        if stamps is None or stamps.started_s is None or stamps.computed_s is None or not is_handed_over:
            return
        request = departure.request
        self._measurements.prefilled(
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
            )
        )

    def forget(self, departure: Departure) -> None:
        self._stamps.pop(departure.transfer, None)
