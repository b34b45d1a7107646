"""When a request that came now would have its first token, and how fast its others would come.

    wait for those before it at the router   their work, by the work that was let out a second
    + wait at the worker, and computing      the least of any prefill worker (router/policies/cost_model.py)

The batch that it will join is that of the time when its prompt is done: of those that are there now, as many
have ended by then as usually do; those that wait before it have come.
"""

from collections.abc import Sequence
from heapq import nsmallest
from math import exp
from typing import Final, NamedTuple

from baton.clock import Clock
from baton.messages.workers import WorkerRole
from baton.router.in_flight import InFlight
from baton.router.membership import Member, Membership
from baton.router.policies.cost_model import CostModel
from baton.router.policies.prompts_ahead import Claim

MEMORY_S: Final = 10.0  # of the time in which anybody waited
KNOWN: Final = 4  # measurements, before what they teach is worth a refusal
KNOWN_S: Final = 1.0  # of such time before it says anything
MAX_AGE_S: Final = 0.05  # of what is known of the workers: there may be a thousand
MAX_COMPUTERS: Final = 16  # that are asked for each prediction
LEAST_STEP_S: Final = 1e-6


class Prediction(NamedTuple):
    ttft_s: float
    tpot_s: float
    queue_s: float  # of the former, at the router
    alone_s: float  # to the first token, of workers with nothing else to do
    alone_tpot_s: float


class ServiceRate:
    """Work a second that leaves the queue while there is one."""

    def __init__(self, now_s: float) -> None:
        self._work = 0.0  # fading
        self._busy_s = 0.0  # fading
        self._since_s = now_s
        self._is_busy = False

    def observe(self, now_s: float, work: float, *, is_busy: bool) -> None:
        """So much has left; is_busy: whether anybody waits from now on."""
        if self._is_busy:
            passed_s = max(0.0, now_s - self._since_s)
            faded = exp(-passed_s / MEMORY_S)
            self._work = self._work * faded + work
            self._busy_s = self._busy_s * faded + passed_s
        self._since_s = now_s
        self._is_busy = is_busy

    @property
    def work_per_s(self) -> float | None:
        """None: it is not known."""
        return self._work / self._busy_s if self._busy_s >= KNOWN_S and self._work > 0 else None


class Asked(NamedTuple):
    """What is to be predicted of."""

    prompt: Claim  # of the tokens that have to be computed
    answer: float  # tokens


class _Outlook(NamedTuple):
    """Of all workers, at one time. `computers`: ids of those with the least work."""

    at_s: float
    computers: Sequence[str]
    num_computers: int
    decoder: Member | None  # the one with the least load
    num_decoders: int


class Forecast:
    def __init__(self, clock: Clock, members: Membership, in_flight: InFlight, model: CostModel) -> None:
        self.rate = ServiceRate(clock.now_s())
        self._clock = clock
        self._members = members
        self._in_flight = in_flight
        self._model = model
        self._outlook: _Outlook | None = None

    def predict(self, asked: Asked, work_before: float, num_before: float) -> Prediction:
        """What nobody has measured yet takes no time."""
        outlook = self._look()
        computer, wait_s = self._wait(outlook, asked)
        num_tokens = asked.prompt.num_tokens
        compute_s = self._compute_s(computer, num_tokens)
        queue_s = self._queue_s(work_before, num_tokens, compute_s, outlook)
        ttft_s = queue_s + wait_s + compute_s
        return Prediction(
            ttft_s=ttft_s,
            tpot_s=self._step_s(outlook, asked.answer, ttft_s, num_before),
            queue_s=queue_s,
            alone_s=compute_s,
            alone_tpot_s=self._alone_s(outlook.decoder, num_tokens),
        )

    def _wait(self, outlook: _Outlook, asked: Asked) -> tuple[str, float]:
        """The worker where its turn would come first, and when; "": there is none."""
        waits = [(self._wait_s(computer, asked), computer) for computer in outlook.computers]
        wait_s, computer = min(waits, default=(0.0, ""))
        return computer, wait_s

    def _wait_s(self, computer: str, asked: Asked) -> float:
        prompts = self._in_flight.account(computer).prompts
        return self._in_flight.wait_s(computer) * prompts.part_before(asked.prompt)

    def step_s(self) -> float:
        """Of the decode worker with the least load, now."""
        return self._step_s(self._look(), 1.0, 0.0, 0.0)

    def _compute_s(self, computer: str, num_tokens: int) -> float:
        speeds = self._model.of(computer) if computer else None
        if speeds is None or speeds.prefill.num_measured < KNOWN:
            return 0.0
        return speeds.compute_s(num_tokens, num_tokens)

    def _alone_s(self, decoder: Member | None, num_tokens: int) -> float:
        fit = self._model.of(decoder.id).step if decoder is not None else None
        return 0.0 if fit is None or fit.num_measured < KNOWN else fit.predict(1.0, 1.0, num_tokens, 0.0)

    def _queue_s(self, work: float, num_tokens: int, compute_s: float, outlook: _Outlook) -> float:
        if work <= 0:
            return 0.0
        rate = self.rate.work_per_s
        if rate is None:  # as if all of it were prompts like this one
            return work * compute_s / (outlook.num_computers * max(1, num_tokens))
        return work / rate

    def _step_s(self, outlook: _Outlook, answer: float, in_s: float, num_before: float) -> float:
        decoder = outlook.decoder
        if decoder is None:
            return 0.0
        account, fit = self._in_flight.account(decoder.id), self._model.of(decoder.id).step
        if fit.num_measured < KNOWN:
            return 0.0
        num_now = account.num_attempts + account.num_unknown
        tokens_each = (account.num_tokens + account.num_unknown_tokens) / max(1, num_now)
        now_s = max(LEAST_STEP_S, fit.predict(1.0, num_now, num_now * tokens_each, 0.0))
        num_left = num_now * max(0.0, 1.0 - in_s / (max(1.0, answer) * now_s))
        num_then = num_left + num_before / outlook.num_decoders + 1
        num_then = min(num_then, float(max(1, decoder.worker.max_num_seqs)))
        return fit.predict(1.0, num_then, num_then * tokens_each, 0.0)

    def _look(self) -> _Outlook:
        now_s = self._clock.now_s()
        if self._outlook is None or not 0 <= now_s - self._outlook.at_s < MAX_AGE_S:
            self._outlook = self._look_again(now_s)
        return self._outlook

    def _look_again(self, now_s: float) -> _Outlook:
        members = [member for member in self._members.all() if not member.is_draining]
        decoders = [member for member in members if member.worker.role is WorkerRole.DECODE]
        computers = [member for member in members if member.worker.role is WorkerRole.PREFILL] or decoders
        waits = {member.id: self._in_flight.wait_s(member.id) for member in computers}
        least = nsmallest(MAX_COMPUTERS, waits, key=lambda id: waits[id])
        decoder = min(
            decoders, key=lambda each: self._in_flight.account(each.id).share_of(each.worker), default=None
        )
        return _Outlook(now_s, least, max(1, len(computers)), decoder, max(1, len(decoders)))
