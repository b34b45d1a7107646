"""Latency objectives: predictions for new requests, and the refusal of requests that would miss theirs.

1. A request arrives with an objective. The forecast predicts its first token and its tokens' pace; a request
   that would miss its objective is refused at once, before any work is spent on it.
2. At its turn the prediction is repeated. A request that has become hopeless meanwhile is refused then.
3. A request that waits past its deadline is refused.

Only tenants that may be shed are refused for an objective, and never an attempt that continues a stream. An
objective that even idle workers could not keep is refused too, except for a trial now and then: predictions
are learnt from dispatched requests. A request on trial is not refused at its turn either.

A refusal has a time to retry, the latest of three: when the clients of earlier refusals have had their turns,
for which the share KEPT of the cluster's time is reserved; when the request would no longer be late; and the
expected end of the overload, which is expected to go on for twice as long as it has lasted. So clients return
one after another and find room. Beyond PROMISED_S a refusal tells its client not to retry automatically.

    time to the first token = wait for the work before it at the router, at the rate of recently dispatched
    work + wait at the worker, and computing: the least of any prefill worker

The time of a later token is predicted for the batch that the request will join: the present requests, without
the share that usually ends before its prompt is computed, and the requests that wait before it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from heapq import nsmallest
from math import exp, inf
from typing import Final, NamedTuple

from baton.clock import Clock
from baton.messages.workers import Worker, WorkerRole
from baton.request import AttemptKey, Request
from baton.router.in_flight import InFlight, NewPrompt
from baton.router.membership import MemberView
from baton.router.policies.cost_model import CostModel
from baton.router.queue.quotas import AttemptRefusal, RequestWork
from baton.tenants import Refusal, Sla

MEMORY_S: Final = 10.0  # decay time of the service rate; counts only while requests wait
KNOWN: Final = 4  # measurements before a fit is worth a refusal
KNOWN_S: Final = 1.0  # in which requests waited, before the service rate is known
OUTLOOK_AGE_S: Final = 0.05  # for which a view of the workers is kept: there may be a thousand
MAX_COMPARED: Final = 16  # workers that each prediction compares
LEAST_STEP_S: Final = 1e-6
HEADROOM: Final = 0.9  # share of a promised time that a prediction may take
LEAST_RETRY_S: Final = 0.5
MOST_RETRY_S: Final = 60.0
PROMISED_S: Final = 15.0
OVER_S: Final = 5.0  # without a refusal, an overload is over
KEPT: Final = 0.25  # share of the service rate that is reserved for clients that retry
SPREAD: Final = 0.618034  # golden ratio - 1: the fractional parts of its multiples are spread evenly
TRIAL_S: Final = 2.0  # between two requests that are admitted against the prediction
MAX_TRIALS: Final = 64
DEFAULT_DELAY_S: Final = 60.0  # of a request without any objective


class Objective(NamedTuple):
    """The objective of one request, in seconds from its arrival; inf: none was promised."""

    ttft_s: float
    tpot_s: float
    deadline_s: float
    delay_s: float  # within which it should be dispatched

    @property
    def is_promised(self) -> bool:
        """True when any objective was promised."""
        return min(self) < inf

    @property
    def due_s(self) -> float:
        """When it should be dispatched, for the order within its tenant."""
        first_s = min(self.ttft_s, self.deadline_s)
        return first_s if first_s < inf else min(self.delay_s, DEFAULT_DELAY_S)


def objective_of(request: Request) -> Objective:
    """The objective of a request."""
    return _objective(request.sla, request.scheduling_key.max_queue_delay_ms)


@lru_cache(maxsize=256)  # most requests of a tenant have the same
def _objective(sla: Sla, max_queue_delay_ms: float | None) -> Objective:
    return Objective(
        ttft_s=_seconds(sla.ttft_ms),
        tpot_s=_seconds(sla.tpot_ms),
        deadline_s=_seconds(sla.deadline_ms),
        delay_s=_seconds(max_queue_delay_ms),
    )


def _seconds(milliseconds: float | None) -> float:
    return inf if milliseconds is None else milliseconds / 1e3


class Prediction(NamedTuple):
    """The latency that a new request would have."""

    ttft_s: float
    tpot_s: float
    queue_s: float  # part of `ttft_s`, at the router
    alone_s: float  # to the first token, with idle workers
    alone_tpot_s: float


class ServiceRate:
    """The work a second that leaves the queue while requests wait."""

    def __init__(self, now_s: float) -> None:
        self._work = 0.0  # decayed
        self._busy_s = 0.0  # decayed
        self._since_s = now_s
        self._is_busy = False

    def observe(self, now_s: float, work: float, *, is_busy: bool) -> None:
        """Take the work that has left the queue since the last call. is_busy: requests wait from now on."""
        if self._is_busy:
            passed_s = max(0.0, now_s - self._since_s)
            decay = exp(-passed_s / MEMORY_S)
            self._work = self._work * decay + work
            self._busy_s = self._busy_s * decay + passed_s
        self._since_s = now_s
        self._is_busy = is_busy

    @property
    def work_per_s(self) -> float | None:
        """The rate; None while it is unknown."""
        return self._work / self._busy_s if self._busy_s >= KNOWN_S and self._work > 0 else None


class _Outlook(NamedTuple):
    """The workers at one time."""

    at_s: float
    least_busy: Sequence[str]  # ids of workers that compute prompts
    num_prompt_workers: int  # all of them, at least 1
    decoder: Worker | None  # with the least load
    num_decoders: int


class Forecast:
    """Predicts the latency of new requests from the in-flight load and the measured speeds."""

    def __init__(self, clock: Clock, members: MemberView, in_flight: InFlight, model: CostModel) -> None:
        self.rate = ServiceRate(clock.now_s())
        self._clock = clock
        self._members = members
        self._in_flight = in_flight
        self._model = model
        self._outlook: _Outlook | None = None

    def predict(
        self, prompt: NewPrompt, num_answer_tokens: float, work_before: float, num_before: float
    ) -> Prediction:
        """Predict the latency of a request behind `num_before` others, which have `work_before` together.

        prompt: the tokens that have to be computed. Work of which nothing was measured takes no time.
        """
        outlook = self._current_outlook()
        waits = [(self._wait_s(worker_id, prompt), worker_id) for worker_id in outlook.least_busy]
        wait_s, worker_id = min(waits, default=(0.0, ""))
        num_tokens = prompt.num_tokens
        compute_s = self._compute_s(worker_id, num_tokens)
        queue_s = self._queue_s(work_before, num_tokens, compute_s, outlook)
        ttft_s = queue_s + wait_s + compute_s
        return Prediction(
            ttft_s=ttft_s,
            tpot_s=self._step_s(outlook, num_answer_tokens, ttft_s, num_before),
            queue_s=queue_s,
            alone_s=compute_s,
            alone_tpot_s=self._alone_s(outlook.decoder, num_tokens),
        )

    def step_s(self) -> float:
        """The time of a step of the decode worker with the least load, now."""
        return self._step_s(self._current_outlook(), 1.0, 0.0, 0.0)

    def _wait_s(self, worker_id: str, prompt: NewPrompt) -> float:
        prompts = self._in_flight.account(worker_id).prompts
        return self._in_flight.wait_s(worker_id) * prompts.share_ahead_of(prompt)

    def _compute_s(self, worker_id: str, num_tokens: int) -> float:
        speeds = self._model.of(worker_id) if worker_id else None
        if speeds is None or speeds.prefill.num_measured < KNOWN:
            return 0.0
        return speeds.compute_s(num_tokens, num_tokens)

    def _alone_s(self, decoder: Worker | None, num_tokens: int) -> float:
        fit = self._model.of(decoder.id).step if decoder is not None else None
        return 0.0 if fit is None or fit.num_measured < KNOWN else fit.predict(1.0, 1.0, num_tokens, 0.0)

    def _queue_s(self, work: float, num_tokens: int, compute_s: float, outlook: _Outlook) -> float:
        if work <= 0:
            return 0.0
        rate = self.rate.work_per_s
        if rate is None:  # as if all of the work were prompts like this one
            return work * compute_s / (outlook.num_prompt_workers * max(1, num_tokens))
        return work / rate

    def _step_s(self, outlook: _Outlook, num_answer_tokens: float, in_s: float, num_before: float) -> float:
        decoder = outlook.decoder
        if decoder is None:
            return 0.0
        account, fit = self._in_flight.account(decoder.id), self._model.of(decoder.id).step
        if fit.num_measured < KNOWN:
            return 0.0
        num_now = account.num_attempts + account.num_unknown
        tokens_each = (account.num_tokens + account.num_unknown_tokens) / max(1, num_now)
        now_s = max(LEAST_STEP_S, fit.predict(1.0, num_now, num_now * tokens_each, 0.0))
        num_left = num_now * max(0.0, 1.0 - in_s / (max(1.0, num_answer_tokens) * now_s))
        num_then = num_left + num_before / outlook.num_decoders + 1
        num_then = min(num_then, float(max(1, decoder.max_num_seqs)))
        return fit.predict(1.0, num_then, num_then * tokens_each, 0.0)

    def _current_outlook(self) -> _Outlook:
        now_s = self._clock.now_s()
        if self._outlook is None or not 0 <= now_s - self._outlook.at_s < OUTLOOK_AGE_S:
            self._outlook = self._new_outlook(now_s)
        return self._outlook

    def _new_outlook(self, now_s: float) -> _Outlook:
        members = [member for member in self._members.all() if not member.is_draining]
        decoders = [member for member in members if member.worker.role is WorkerRole.DECODE]
        prefills = [member for member in members if member.worker.role is WorkerRole.PREFILL]
        prompt_workers = prefills or decoders
        waits = {member.id: self._in_flight.wait_s(member.id) for member in prompt_workers}
        least = nsmallest(MAX_COMPARED, waits, key=lambda id: waits[id])
        decoder = min(
            (member.worker for member in decoders),
            key=lambda worker: self._in_flight.account(worker.id).share_of(worker),
            default=None,
        )
        return _Outlook(now_s, least, max(1, len(prompt_workers)), decoder, max(1, len(decoders)))


class _Miss(NamedTuple):
    """An objective that a request would miss."""

    refusal: Refusal
    objective: str
    excess_s: float
    is_never: bool  # idle workers would miss it too


class ObjectiveChecker:
    """Refuses requests that would miss their objectives, and schedules their retries."""

    def __init__(self, clock: Clock, forecast: Forecast) -> None:
        self._clock = clock
        self._forecast = forecast
        self._trials: OrderedDict[AttemptKey, None] = OrderedDict()  # the latest MAX_TRIALS, oldest first
        self._trial_s = -inf
        self._promised_s = -inf  # all room until then was promised to earlier refusals
        self._began_s = self._refused_s = -inf  # the present overload; its latest refusal
        self._num_not_returning = 0

    def refusal(
        self, request: Request, work: RequestWork, waited_s: float, prediction: Prediction
    ) -> AttemptRefusal | None:
        """The reason why a request that has waited `waited_s` has no hope; None when it may go on."""
        objective = objective_of(request)
        if not objective.is_promised or not request.scheduling_key.degradation.may_shed:
            return None
        miss = _miss(objective, waited_s, prediction)
        if miss is None or (miss.is_never and self._may_try(request)):
            return None
        predicted = (
            f"a first token in {prediction.ttft_s:.3g} s, then one every {1e3 * prediction.tpot_s:.3g} ms"
        )
        reason = f"{miss.objective} can't be kept: predicted is {predicted}"
        if miss.is_never:
            return AttemptRefusal(miss.refusal, reason, MOST_RETRY_S, should_retry=False, is_overload=False)
        return self.invite(miss.refusal, reason, work.total, miss.excess_s)

    def shed(self, work: RequestWork, excess_s: float) -> AttemptRefusal:
        """The refusal of a request that is shed for requests of higher classes."""
        return self.invite(Refusal.SHED, "the cluster is overloaded", work.total, excess_s)

    def expired(self, work: RequestWork, *, is_over: bool) -> AttemptRefusal:
        """The refusal of a request that waited too long: for its deadline (`is_over`), or its first token."""
        if is_over:  # the client is told that the request is over, and does not return
            reason = "its deadline_ms has passed while it waited"
            return AttemptRefusal(Refusal.DEADLINE, reason, LEAST_RETRY_S, should_retry=False)
        return self.invite(Refusal.SLO, "its ttft_ms has passed while it waited", work.total, 0.0)

    def invite(self, refusal: Refusal, reason: str, work: float, excess_s: float) -> AttemptRefusal:
        """A refusal with a time to retry. excess_s: by how much the request would be late now."""
        now_s = self._clock.now_s()
        if now_s - self._refused_s > OVER_S:
            self._began_s = now_s
        self._refused_s = now_s
        lasting_s = 2 * (now_s - self._began_s)
        room_s = max(self._promised_s, now_s + max(LEAST_RETRY_S, excess_s, lasting_s))
        rate = self._forecast.rate.work_per_s
        if room_s - now_s <= PROMISED_S:
            self._promised_s = room_s + (work / (KEPT * rate) if rate else 0.0)
            return AttemptRefusal(refusal, reason, room_s - now_s)
        self._num_not_returning += 1
        spread_s = (MOST_RETRY_S - PROMISED_S) * (self._num_not_returning * SPREAD % 1.0)
        return AttemptRefusal(refusal, reason, PROMISED_S + spread_s, should_retry=False)

    def _may_try(self, request: Request) -> bool:
        key, now_s = request.key, self._clock.now_s()
        if key in self._trials:
            return True
        if 0 <= now_s - self._trial_s < TRIAL_S:
            return False
        self._trials[key], self._trial_s = None, now_s
        if len(self._trials) > MAX_TRIALS:
            self._trials.popitem(last=False)
        return True


def _miss(objective: Objective, waited_s: float, prediction: Prediction) -> _Miss | None:
    ttft_s = waited_s + prediction.ttft_s
    firsts = (
        (Refusal.DEADLINE, "deadline_ms", objective.deadline_s),
        (Refusal.SLO, "ttft_ms", objective.ttft_s),
    )
    for refusal, name, most_s in firsts:
        if ttft_s > HEADROOM * most_s:
            excess_s = ttft_s - HEADROOM * most_s
            return _Miss(refusal, name, excess_s, prediction.alone_s > HEADROOM * most_s)
    if prediction.tpot_s > objective.tpot_s:
        return _Miss(Refusal.SLO, "tpot_ms", 0.0, prediction.alone_tpot_s > objective.tpot_s)
    return None
