"""Which requests are refused, as they come or later, because what they should keep can't be kept; and when
it is worth while to ask again.

1. One comes with an objective. It is predicted when its first token would come, and how fast the others:
   one that would miss it is refused at once, before anything is spent on it.
2. Its turn has come, and it is predicted again. What has become hopeless meanwhile is refused then.
3. Its deadline passes while it waits: it is not begun any more.

Only who may be shed is refused for an objective, and nobody asks for what workers have begun with. Where idle
workers could not keep it either, one is let in now and then all the same: predictions are learnt from what
was tried.

Who is refused is told when there should be room: after the work that is there, and after that of all who were
told so before, a part of the cluster's time being kept for them; and not before it may be over: what has gone
on for so long will go on for as long again. So they come back one after the other, and find what they were
promised. Of more than fit into PROMISED_S the others are asked not to come by themselves: they would only be
refused again, and be in the way of others when it is over.
"""

from functools import lru_cache
from math import inf
from typing import Final, NamedTuple

from baton.clock import Clock
from baton.request import Request
from baton.router.in_flight import scheduling_class_of
from baton.router.policies.forecast import Asked, Forecast, Prediction
from baton.router.policies.prompts_ahead import Claim, LeadOf
from baton.router.queue.quotas import QuotaRefusal, RequestWork
from baton.tenants import Refusal, Sla

HEADROOM: Final = 0.9  # of a time that was promised, what is predicted may take
LEAST_RETRY_S: Final = 0.5
MOST_RETRY_S: Final = 60.0
PROMISED_S: Final = 15.0
OVER_S: Final = 5.0  # without a refusal, and what went on is over
KEPT: Final = 0.25  # of the cluster's time, for those that come back
SPREAD: Final = 0.618034  # of the golden ratio: its multiples, less their whole parts, are spread evenly
PROBE_S: Final = 2.0  # between two that are let in against what is predicted
DEFAULT_DELAY_S: Final = 60.0  # of a request with no objective at all


class Objective(NamedTuple):
    """Of one request. Seconds from its arrival; inf: none was promised."""

    ttft_s: float
    tpot_s: float
    deadline_s: float
    delay_s: float  # that it should be let out within

    @property
    def is_promised(self) -> bool:
        return min(self) < inf

    @property
    def due_s(self) -> float:
        first_s = min(self.ttft_s, self.deadline_s)
        return first_s if first_s < inf else min(self.delay_s, DEFAULT_DELAY_S)


def objective_of(request: Request) -> Objective:
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


class Returns:
    """When who is refused should come again."""

    def __init__(self, clock: Clock, forecast: Forecast) -> None:
        self._clock = clock
        self._forecast = forecast
        self._promised_s = -inf  # until when there is no room that was promised to nobody
        self._began_s = self._refused_s = -inf  # what goes on; the latest refusal of it
        self._num = 0

    def invite(self, refusal: Refusal, reason: str, work: float, excess_s: float) -> QuotaRefusal:
        """excess_s: that the request would come too late by now."""
        now_s = self._clock.now_s()
        if now_s - self._refused_s > OVER_S:
            self._began_s = now_s
        self._refused_s = now_s
        lasting_s = 2 * (now_s - self._began_s)
        room_s = max(self._promised_s, now_s + max(LEAST_RETRY_S, excess_s, lasting_s))
        rate = self._forecast.rate.work_per_s
        if room_s - now_s <= PROMISED_S:
            self._promised_s = room_s + (work / (KEPT * rate) if rate else 0.0)
            return QuotaRefusal(refusal, reason, room_s - now_s)
        self._num += 1
        spread_s = (MOST_RETRY_S - PROMISED_S) * (self._num * SPREAD % 1.0)
        return QuotaRefusal(refusal, reason, PROMISED_S + spread_s, may_return=False)


class Ahead(NamedTuple):
    """Of a request at the router."""

    work: float = 0.0  # that is let out before it
    mean_work: float = 1.0  # of one request
    lead: float | None = None  # of its tenant now; see router/policies/prompts_ahead.py
    lead_of: LeadOf | None = None  # the same


class ObjectiveChecker:
    def __init__(self, clock: Clock, forecast: Forecast) -> None:
        self.returns = Returns(clock, forecast)
        self._clock = clock
        self._forecast = forecast
        self._probed_s = -inf

    def predict(self, request: Request, work: RequestWork, ahead: Ahead) -> Prediction:
        lead = None if ahead.lead is None else ahead.lead + ahead.work / request.scheduling_key.weight
        asked = Asked(
            Claim(scheduling_class_of(request), round(work.prompt), lead, ahead.lead_of), work.answer
        )
        return self._forecast.predict(asked, ahead.work, ahead.work / max(1.0, ahead.mean_work))

    def refusal(
        self, request: Request, work: RequestWork, waited_s: float, found: Prediction
    ) -> QuotaRefusal | None:
        """Why a request that has waited so long has no hope, by what was found."""
        objective = objective_of(request)
        if not objective.is_promised or not request.scheduling_key.degradation.may_shed:
            return None
        late = _lateness(objective, waited_s, found)
        if late is None or (late.is_never and self._may_probe()):
            return None
        return self._refuse(late, work, found)

    def shed(self, work: RequestWork, prediction: Prediction) -> QuotaRefusal:
        return self.returns.invite(Refusal.SHED, "the cluster is overloaded", work.total, prediction.queue_s)

    def expired(self, work: RequestWork, *, is_over: bool) -> QuotaRefusal:
        """Of one that has waited in vain; is_over: its deadline has passed, else its first token's time."""
        if is_over:  # its client is told that it is over, and does not come again
            reason = "its deadline_ms has passed while it waited"
            return QuotaRefusal(Refusal.DEADLINE, reason, LEAST_RETRY_S, may_return=False)
        return self.returns.invite(Refusal.SLO, "its ttft_ms has passed while it waited", work.total, 0.0)

    def _refuse(self, late: "_Late", work: RequestWork, found: Prediction) -> QuotaRefusal:
        told = f"a first token in {found.ttft_s:.3g} s, then one every {1e3 * found.tpot_s:.3g} ms"
        reason = f"{late.objective} can't be kept: predicted is {told}"
        if late.is_never:  # by workers with nothing else to do neither
            return QuotaRefusal(late.refusal, reason, MOST_RETRY_S, may_return=False, is_overload=False)
        return self.returns.invite(late.refusal, reason, work.total, late.excess_s)

    def _may_probe(self) -> bool:
        now_s = self._clock.now_s()
        if 0 <= now_s - self._probed_s < PROBE_S:
            return False
        self._probed_s = now_s
        return True


class _Late(NamedTuple):
    refusal: Refusal
    objective: str
    excess_s: float
    is_never: bool


def _lateness(objective: Objective, waited_s: float, found: Prediction) -> _Late | None:
    """What it would be late for, if anything."""
    ttft_s = waited_s + found.ttft_s
    firsts = (
        (Refusal.DEADLINE, "deadline_ms", objective.deadline_s),
        (Refusal.SLO, "ttft_ms", objective.ttft_s),
    )
    for refusal, name, most_s in firsts:
        if ttft_s > HEADROOM * most_s:
            return _Late(refusal, name, ttft_s - HEADROOM * most_s, found.alone_s > HEADROOM * most_s)
    if found.tpot_s > objective.tpot_s:
        return _Late(Refusal.SLO, "tpot_ms", 0.0, found.alone_tpot_s > objective.tpot_s)
    return None
