"""Who is let in to the workers, and when: from the moment that a request is submitted until it has ended.

1. `ask`: it is refused, by a quota of its tenant or because it has no hope; or it waits, for no time at all
   where there is room.
2. `first`: whose turn it is, if a worker could compute its prompt; the caller looks for workers.
3. `let_out`: it has some. Its tenant is charged what it is expected to take. Or `refuse`: it is not to wait.
4. `started`, `computed`, `ended`: what it took is made good. It ends once, and leaves the queue if it waits.

`tick` finds what has waited too long, and looks how overloaded the cluster is.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from math import inf
from typing import Final, NamedTuple

import msgspec

from baton.clock import Clock
from baton.messages.control import Submit
from baton.messages.status import OverloadLevel, QueueStatus
from baton.messages.workers import PrefillTimes
from baton.request import Request, SamplingParams
from baton.router.capacity import Capacity
from baton.router.in_flight import Key, scheduling_class_of
from baton.router.membership import Membership
from baton.router.policies.base import TenantClaim
from baton.router.policies.cost_model import CostModel
from baton.router.policies.forecast import Forecast
from baton.router.policies.prompts_ahead import Claim
from baton.router.queue.objectives import Ahead, ObjectiveChecker, objective_of
from baton.router.queue.overload import OverloadManager
from baton.router.queue.quotas import QuotaRefusal, RequestWork, TenantQuotas, WorkCharge, WorkLedger
from baton.router.queue.tallies import TenantTallies
from baton.router.queue.tenant_queues import Deadlines, TenantQueues, Waiting

# What is taken off requests when the cluster is overloaded, of tenants that allow it.

MAX_ALTERNATIVES = 1  # for each token, where log probabilities may be reduced


def degraded(request: Request) -> Request:
    """With a shorter answer and fewer alternatives, as far as its tenant allows; else the same object.

    What has begun to be answered goes on as it began.
    """
    if request.generated_token_ids:
        return request
    rights, sampling = request.scheduling_key.degradation, request.sampling
    changes: dict[str, int] = {}
    most = rights.clip_max_tokens_to
    if most is not None and (sampling.max_tokens is None or sampling.max_tokens > most):
        changes["max_tokens"] = most
        changes["min_tokens"] = min(sampling.min_tokens, most)
    if rights.may_reduce_logprobs:
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(sampling, name)
            if asked is not None and asked > MAX_ALTERNATIVES:
                changes[name] = MAX_ALTERNATIVES
    if not changes:
        return request
    narrower: SamplingParams = msgspec.structs.replace(sampling, **changes)
    return msgspec.structs.replace(request, sampling=narrower)


MAX_SHED: Final = 1024  # at a tick


class Record(NamedTuple):
    """One attempt, from `ask` to its end."""

    gateway: str
    request: Request
    work: RequestWork
    came_s: float  # to its gateway
    is_begun: bool  # workers have had an earlier attempt
    is_active: bool = False  # workers have it


class AdmissionQueue:
    def __init__(self, clock: Clock, members: Membership, capacity: Capacity, model: CostModel) -> None:
        self.queues = TenantQueues()
        self.quotas = TenantQuotas(clock)
        self.capacity = capacity
        self.in_flight = capacity.in_flight
        self.forecast = Forecast(clock, members, self.in_flight, model)
        self.admission = ObjectiveChecker(clock, self.forecast)
        self.overload = OverloadManager(members, self.forecast, clock.now_s())
        self.tallies = TenantTallies()
        self._clock = clock
        self._ledger = WorkLedger(self._correct)
        self._records: dict[Key, Record] = {}
        self._deadlines = Deadlines(self.queues)
        self._work_out = 0.0  # let out and not told to the forecast

    def __len__(self) -> int:
        """How many wait."""
        return len(self.queues)

    def __contains__(self, key: Key) -> bool:
        """Whether it waits."""
        return key in self.queues

    def ask(self, gateway: str, submit: Submit) -> QuotaRefusal | None:
        """None: it waits, and may be the first now. The key must be new."""
        request, is_begun = submit.request, submit.is_begun
        work = self._ledger.expect(request, is_begun=is_begun)
        if submit.sticky_worker:
            work = RequestWork(0.0, work.answer)  # its prompt is there
        objective, since_s = objective_of(request), self._clock.now_s() - submit.age_s
        due_s = since_s + (0.0 if is_begun else objective.due_s)
        waiting = Waiting(gateway, submit, since_s=since_s, due_s=due_s, work=work.total)
        refused = None if is_begun else self._refusal(waiting, work)
        if refused is not None:
            self.tallies.of(request.tenant).refused[refused.refusal] += 1
            return refused
        self.quotas.enter(request.tenant, request.scheduling_key.quotas, work.total)
        self.tallies.of(request.tenant).weight = request.scheduling_key.weight
        self._records[waiting.key] = Record(gateway, request, work, since_s, is_begun)
        self.overload.promises.add(request)
        self._hold_or_release(request.tenant)
        self.queues.add(waiting)
        ttft_s = objective.ttft_s if request.scheduling_key.degradation.may_shed else inf
        if not is_begun and (end_s := min(objective.deadline_s, ttft_s)) < inf:
            self._deadlines.add(since_s + end_s, waiting.key)
        return None

    def overflow(self, key: Key) -> QuotaRefusal | None:
        """Why what was asked for last is not to wait, if it does; it is refused then."""
        record = self._records.get(key)
        if record is None or record.is_active or record.is_begun:
            return None
        tenant, quotas = record.request.tenant, record.request.scheduling_key.quotas
        refused = self.quotas.queue_refusal(tenant, quotas, self.queues.num_of(tenant))
        if refused is not None:
            self.refuse(key, refused)
        return refused

    def first(self) -> Waiting | None:
        """Whose turn it is. None: nobody waits, or no worker has a place for the prompt."""
        waiting = self.queues.first()
        if waiting is None or self.overload.is_local(waiting.submit.request):
            return waiting
        return waiting if self.capacity.can_compute(self._claim(waiting)) else None

    def turn(self, waiting: Waiting, wanted: Collection[str] = ()) -> TenantClaim:
        """Where its prompt may go, and before whose. wanted: by others, who wait for a place there."""
        claim, has_place = self._claim(waiting), self.capacity.has_place
        needs_place = bool(wanted) or self.capacity.prefills_are_full(claim)
        return TenantClaim(claim.lead, claim.lead_of, partial(has_place, claim), needs_place, wanted)

    def waited_s(self, waiting: Waiting) -> float:
        """Since it came to its gateway: it may have waited at another router before."""
        return max(0.0, self._clock.now_s() - waiting.since_s)

    def pass_over(self, tenant: str) -> None:
        """Until `take_up` others are first, whose turn would be later."""
        self.queues.hold(tenant)

    def take_up(self, tenant: str) -> None:
        if not self.quotas.is_full(tenant):
            self.queues.release(tenant, was_away=False)

    def hopeless(self, waiting: Waiting) -> QuotaRefusal | None:
        """Why its turn comes too late; it is refused then."""
        waited_s, record = self.waited_s(waiting), self._records[waiting.key]
        has_waited = waited_s > waiting.submit.age_s + 1e-6  # else it has just been asked for
        if record.is_begun or not has_waited or not objective_of(record.request).is_promised:
            return None
        ahead = Ahead(lead=self.queues.lead_of(waiting), lead_of=self.queues.known_lead)
        prediction = self.admission.predict(record.request, record.work, ahead)
        refused = self.admission.refusal(record.request, record.work, waited_s, prediction)
        if refused is not None:
            self._count_hopeless(record.request, refused)
            self.refuse(waiting.key, refused)
        return refused

    def let_out(self, waiting: Waiting) -> Request:
        """As it is to be sent to its workers. It must be the first."""
        record, request = self._records[waiting.key], waiting.submit.request
        self.queues.take(waiting)
        self._work_out += waiting.work
        self.quotas.activate(waiting.tenant)
        self._hold_or_release(waiting.tenant)
        charge = WorkCharge(waiting.rank, waiting.tenant, record.work, request.num_tokens, record.is_begun)
        self._ledger.charge(waiting.key, charge)
        self._records[waiting.key] = record._replace(is_active=True)
        tally = self.tallies.of(waiting.tenant)
        tally.num_dispatched += 1
        tally.waited_s += waiting.queued_s(self._clock.now_s())
        is_clipped = self.overload.level >= OverloadLevel.CLIP and not record.is_begun
        narrower = degraded(request) if is_clipped else request
        tally.num_degraded += narrower is not request
        return narrower

    def refuse(self, key: Key, refused: QuotaRefusal) -> None:
        """It is not to wait any more."""
        record = self._records[key]
        assert not record.is_active, key
        self.tallies.of(record.request.tenant).refused[refused.refusal] += 1
        self._end(key, None)

    def settle(self) -> None:
        """All are let out that can be now."""
        self.forecast.rate.observe(self._clock.now_s(), self._work_out, is_busy=len(self.queues) > 0)
        self._work_out = 0.0

    # What becomes of them; unknown keys may be another router's.

    def started(self, key: Key) -> None:
        record = self._records.get(key)
        if record is not None and record.is_active and not record.is_begun:
            promised_s = objective_of(record.request).ttft_s
            taken_s = self._clock.now_s() - record.came_s
            self.tallies.of(record.request.tenant).count_first_token(taken_s, promised_s)

    def computed(self, prompts: Iterable[PrefillTimes]) -> None:
        for times in prompts:
            self._ledger.computed((times.request_id, times.attempt), times.num_new_tokens)

    def ended(self, key: Key, num_answered: int | None) -> None:
        """num_answered: tokens of this attempt; None: nobody knows."""
        if key in self._records:
            self._end(key, num_answered)

    def gateway_left(self, gateway: str) -> None:
        for key in [key for key, record in self._records.items() if record.gateway == gateway]:
            self.ended(key, None)

    def tick(self) -> Iterator[tuple[Record, QuotaRefusal]]:
        """Those that are not to wait any more; refused already."""
        yield from self._find_expired()
        self.queues.age()
        self.quotas.forget_idle()
        self.overload.look(self.queues, self._clock.now_s())
        yield from self._shed()

    def status(self) -> QueueStatus:
        waits_s = ((each.tenant, each.queued_s(self._clock.now_s())) for each in self.queues)
        return self.tallies.status(self.overload.overload_controller, waits_s, self.quotas.num_active)

    def check_integrity(self) -> None:
        """AssertionError when the parts do not agree on who is here."""
        self.queues.check_integrity()
        active = {key for key, record in self._records.items() if record.is_active}
        assert all(key in self._ledger for key in active) and len(self._ledger) == len(active)
        assert {each.key for each in self.queues} == self._records.keys() - active
        nums = Counter((each.request.tenant, each.is_active) for each in self._records.values())
        for tenant, _ in nums:
            assert self.quotas.num_active(tenant) == nums[tenant, True], tenant
            assert self.quotas.num_requests(tenant) == nums[tenant, True] + nums[tenant, False], tenant

    def _refusal(self, waiting: Waiting, work: RequestWork) -> QuotaRefusal | None:
        """Of a request that nobody has worked on."""
        request = waiting.submit.request
        refused = self.quotas.refusal(request.tenant, request.scheduling_key.quotas, work.total)
        if refused is not None:
            return refused
        is_shed = self.overload.is_to_be_shed(waiting)
        if not is_shed and not objective_of(request).is_promised:
            return None
        before = self.queues.work_before(waiting)
        mean_work = self.queues.work / max(1, len(self.queues))
        ahead = Ahead(before, mean_work, self.queues.lead_of(waiting), self.queues.known_lead)
        prediction = self.admission.predict(request, work, ahead)
        if is_shed:
            return self.admission.shed(work, prediction)
        refused = self.admission.refusal(request, work, waiting.submit.age_s, prediction)
        if before > 0:
            self._count_hopeless(request, refused)
        return refused

    def _count_hopeless(self, request: Request, refused: QuotaRefusal | None) -> None:
        if refused is not None and refused.is_overload and not request.scheduling_key.has_unpromised_sla:
            self.overload.count_hopeless()

    def _end(self, key: Key, num_answered: int | None) -> None:
        record = self._records.pop(key)
        request, tenant = record.request, record.request.tenant
        self.overload.promises.remove(request)
        if record.is_active:
            used = self._ledger.ended(key, num_answered)
            self.tallies.of(tenant).work += used.work.total if used is not None else 0.0
        else:
            self.queues.remove(key)
            self.quotas.correct(tenant, -record.work.total)
        self.quotas.leave(tenant, was_active=record.is_active)
        self._hold_or_release(tenant)

    def _claim(self, waiting: Waiting) -> Claim:
        submit, request = waiting.submit, waiting.submit.request
        num_tokens = round(self._records[waiting.key].work.prompt)
        if submit.is_begun and not submit.sticky_worker:
            num_tokens = request.num_tokens  # which is paid for, and has to be computed anew
        return Claim(
            scheduling_class_of(request), num_tokens, self.queues.lead_of(waiting), self.queues.known_lead
        )

    def _hold_or_release(self, tenant: str) -> None:
        if self.quotas.is_full(tenant):
            self.queues.hold(tenant)
        else:
            self.queues.release(tenant)

    def _correct(self, charge: WorkCharge, work: float) -> None:
        self.queues.correct(charge.rank, charge.tenant, work)
        self.quotas.correct(charge.tenant, work)

    def _find_expired(self) -> Iterator[tuple[Record, QuotaRefusal]]:
        now_s = self._clock.now_s()
        for key in self._deadlines.passed(now_s):
            record = self._records[key]
            is_over = record.came_s + objective_of(record.request).deadline_s <= now_s  # as it was added
            refused = self.admission.expired(record.work, is_over=is_over)
            self._count_hopeless(record.request, refused)
            self.refuse(key, refused)
            yield record, refused

    def _shed(self) -> Iterator[tuple[Record, QuotaRefusal]]:
        rank = self.queues.last_rank()
        if rank is None:
            return
        lowest = [waiting for waiting in self.queues.of_rank(rank) if self.overload.is_to_be_shed(waiting)]
        for waiting in lowest[-MAX_SHED:]:
            record = self._records[waiting.key]
            prediction = self.admission.predict(record.request, record.work, Ahead())
            refused = self.admission.shed(record.work, prediction)
            self.refuse(waiting.key, refused)
            yield record, refused
