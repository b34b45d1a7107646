"""The admission queue: which requests are dispatched to workers, and when.

1. `submit`: a request is refused, by a quota of its tenant or because it would miss its objective; or it
   waits, for no time at all where there is room.
2. `first`: the next request in turn, if a worker has a slot for its prompt. The caller looks for workers.
3. `dispatch`: the request has workers, and its tenant is charged its expected work. Or `refuse`: it waits no
   more.
4. `started`, `computed`, `ended`: the charge is corrected to the used work. A request ends once.

A cluster of several models has one admission queue a model. `SharedAdmission` has what they share: the quotas
of tenants, which bound a tenant's requests over all models.

`tick` refuses requests that have waited too long, and updates the overload level. `TenantTallies` counts for
operators what happened to the requests of each tenant.

`Capacity` says whether workers have room for one more attempt. Other attempts wait at the router, where
their order can still change, and where a worker is chosen with later knowledge. Workers get only as many
attempts as keep them busy until the router hears of a free slot:

- A decode worker takes attempts up to OVERCOMMIT times its limits, because some attempts have no token yet
  and not all grow as long as expected.
- A worker has a slot for a prompt when less than MIN_COMPUTING prompts, or than one step computes, or than
  AHEAD_S of work comes before the prompt. Prompts that the new prompt overtakes take no slot. Where decode
  workers may compute any prompt, they have slots too.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from math import inf
from typing import Final

import msgspec

from baton.clock import Clock
from baton.messages.bounds import MAX_EVENTS, MAX_SECONDS
from baton.messages.control import Submit
from baton.messages.status import MAX_TENANTS, OverloadLevel, QueueStatus, TenantStatus, Times
from baton.messages.workers import PrefillTimes, WorkerRole
from baton.request import AttemptKey, Request, SamplingParams
from baton.router.checkpoint import attributes_of
from baton.router.in_flight import InFlight, NewPrompt, scheduling_class_of
from baton.router.membership import Member, MemberView
from baton.router.policies.base import TenantClaim
from baton.router.policies.cost_model import CostModel
from baton.router.queue.objectives import OUTLOOK_AGE_S, Forecast, ObjectiveChecker, Prediction, objective_of
from baton.router.queue.overload import OverloadManager
from baton.router.queue.quotas import AttemptRefusal, RequestWork, TenantQuotas, WorkEstimator, no_room
from baton.router.queue.tenant_queues import Deadlines, QueuedAttempt, TenantQueues

OVERCOMMIT: Final = 1.25  # of a decode worker's limits
MIN_COMPUTING: Final = 2  # prompts at a worker: the next prompt is there when the first is computed
AHEAD_S: Final = 0.1
STEP_TOKENS: Final = 2048  # computed by one step
MAX_ASKED: Final = 32  # workers that one call looks at in detail
MAX_KEPT: Final = 4096  # tenants with counts; the first that came is forgotten
MAX_ALTERNATIVES: Final = 1  # for each token, where log probabilities may be reduced
MAX_SHED: Final = 1024  # at a tick


class Capacity:
    """The room that workers have for one more attempt, by their in-flight load and limits."""

    def __init__(self, members: MemberView, in_flight: InFlight, *, decoders_compute: bool = False) -> None:
        """decoders_compute: decode workers may compute prompts of any length."""
        self._members = members
        self.in_flight = in_flight
        # A decode worker was full, so full workers are computed before the choice of a pair, not after.
        self.is_any_full = False
        self._decoders_compute = decoders_compute
        self._first_asked: Counter[WorkerRole] = Counter()
        self._taking: dict[WorkerRole, Sequence[Member]] = {}
        self._version = -1

    def __getstate__(self) -> dict[str, object]:
        """Everything but the cached lists, which may name workers that have left."""
        return attributes_of(self) | {"_taking": {}, "_version": -1}

    def serves(self, model: str) -> bool:
        """True when there are workers for the model, though none may take work now."""
        return any(member.worker.serves(model) for member in self._members.all())

    def can_decode(self, member: Member, num_tokens: int) -> bool:
        """True when a decode worker has room for an attempt with KV of `num_tokens`.

        An idle worker always has. No worker has more attempts than one heartbeat names: the others would
        count as lost.
        """
        account, worker = self.in_flight.account(member.id), member.worker
        num_attempts = account.num_attempts + account.num_unknown
        if not num_attempts:
            return True
        if num_attempts >= min(max(1, worker.max_num_seqs) * OVERCOMMIT, MAX_EVENTS):
            return False
        num_slots = worker.num_pages * worker.page_size * OVERCOMMIT
        return account.num_tokens + account.num_unknown_tokens + num_tokens <= num_slots

    def full(self, num_tokens: int) -> frozenset[str]:
        """The decode workers without room for an attempt with KV of `num_tokens`."""
        decoders = self._members.of_role(WorkerRole.DECODE)
        return frozenset(each.id for each in decoders if not self.can_decode(each, num_tokens))

    def takes(self, worker_id: str) -> bool:
        """True for a decode worker that takes work."""
        return any(each.id == worker_id for each in self._workers()[WorkerRole.DECODE])

    def roomiest(self, reached: frozenset[str], avoid: Collection[str] = ()) -> str:
        """The reached decode worker with the most room; "" when there is none.

        A worker of `avoid` is returned only when there is no other.
        """
        decoders = [each for each in self._workers()[WorkerRole.DECODE] if each.id in reached]
        decoders = [each for each in decoders if each.id not in avoid] or decoders
        in_flight = self.in_flight
        shares = {each.id: in_flight.account(each.id).share_of(each.worker) for each in decoders}
        return min(shares, key=lambda worker: shares[worker], default="")

    def can_compute(self, prompt: NewPrompt) -> bool:
        """True when any worker has a slot for the prompt."""
        if not self.prefills_are_full(prompt):
            return True
        return self._decoders_compute and self._any_has_slot(prompt, WorkerRole.DECODE)

    def prefills_are_full(self, prompt: NewPrompt) -> bool:
        """True when no prefill worker has a slot; decode workers count where there are no prefill workers."""
        workers = self._workers()
        role = WorkerRole.PREFILL if workers[WorkerRole.PREFILL] else WorkerRole.DECODE
        return bool(workers[role]) and not self._any_has_slot(prompt, role)

    def has_slot(self, prompt: NewPrompt, worker_id: str) -> bool:
        """True when the worker would compute the prompt at once, or nearly so."""
        return self._has_slot_for_any(worker_id) or self._overtakes(prompt, worker_id)

    def _any_has_slot(self, prompt: NewPrompt, role: WorkerRole) -> bool:
        workers = self._workers()[role]
        if any(self._has_slot_for_any(each.id) for each in workers):
            return True
        # All are full. Ask some of them, in turn, whether the prompt would overtake others.
        num = min(len(workers), MAX_ASKED)
        first = self._first_asked[role]
        asked = islice(cycle(workers), first, first + num)
        self._first_asked[role] = (first + num) % max(1, len(workers))
        return any(self._overtakes(prompt, each.id) for each in asked)

    def _has_slot_for_any(self, worker_id: str) -> bool:
        """True when a prompt behind all others there would still be computed nearly at once."""
        account = self.in_flight.account(worker_id)
        if account.num_computing < MIN_COMPUTING or account.prompts.total < STEP_TOKENS:
            return True
        return self.in_flight.wait_s(worker_id) < AHEAD_S

    def _overtakes(self, prompt: NewPrompt, worker_id: str) -> bool:
        prompts = self.in_flight.account(worker_id).prompts
        num, num_tokens = prompts.ahead_of(prompt)
        if num < MIN_COMPUTING or num_tokens < STEP_TOKENS:
            return True
        return self.in_flight.wait_s(worker_id) * num_tokens / prompts.total < AHEAD_S

    def _workers(self) -> dict[WorkerRole, Sequence[Member]]:
        if self._version != self._members.version:
            self._version = self._members.version
            self._taking = {
                role: [member for member in self._members.of_role(role) if not member.is_draining]
                for role in WorkerRole
            }
        return self._taking


class TenantTallies:
    """The counts of all tenants since the router's start."""

    def __init__(self) -> None:
        self._tallies: dict[str, TenantStatus] = {}

    def of(self, tenant: str) -> TenantStatus:
        """The counts of a tenant; new ones for an unknown tenant."""
        tally = self._tallies.get(tenant)
        if tally is None:
            tally = self._tallies[tenant] = TenantStatus(tenant=tenant[:128])
            if len(self._tallies) > MAX_KEPT:
                del self._tallies[next(iter(self._tallies))]
        return tally

    def statuses(
        self, waits_s: Mapping[str, Sequence[float]], num_active: Callable[[str], int]
    ) -> tuple[TenantStatus, ...]:
        """The statuses of the busiest MAX_TENANTS. waits_s: tenant -> the waits of its queued requests."""
        found = [
            msgspec.structs.replace(
                tally,
                num_queued=len(waits_s.get(tenant, ())),
                num_active=num_active(tenant),
                oldest_wait_s=min(MAX_SECONDS, max(waits_s.get(tenant, ()), default=0.0)),
                refused=tally.refused.copy(),
            )
            for tenant, tally in self._tallies.items()
        ]
        found.sort(key=lambda status: (-status.num_queued, -status.work_tokens, status.tenant))
        return tuple(found[:MAX_TENANTS])


def degraded(request: Request) -> Request:
    """The request with a shorter answer and fewer log probabilities, as far as its tenant allows.

    The same object when nothing changes. An answer that has begun is not changed.
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


class SharedAdmission:
    """The state that the admission queues of all models share."""

    def __init__(self, clock: Clock) -> None:
        self.quotas = TenantQuotas(clock)
        self.waits = Times()  # of dispatched attempts in their queue
        self.admission_queues: list[AdmissionQueue] = []

    def hold_or_release(self, tenant: str) -> None:
        """Let a tenant's requests wait in every queue while the tenant has all its active requests."""
        is_full = self.quotas.is_full(tenant)
        for each in self.admission_queues:
            if is_full:
                each.queues.hold(tenant)
            else:
                each.queues.release(tenant)

    def num_queued(self, tenant: str) -> int:
        """The number of a tenant's waiting requests, of all models."""
        return sum(each.queues.num_of(tenant) for each in self.admission_queues)

    def check_integrity(self) -> None:
        """Raise AssertionError when the quotas and the queues disagree about the open requests."""
        nums = sum((each.num_open() for each in self.admission_queues), Counter[tuple[str, bool]]())
        for tenant, _ in nums:
            assert self.quotas.num_active(tenant) == nums[tenant, True], tenant
            assert self.quotas.num_requests(tenant) == nums[tenant, True] + nums[tenant, False], tenant


class AdmissionQueue:
    """All attempts of one model from submission to end, ordered by quotas, shares and objectives."""

    def __init__(
        self,
        clock: Clock,
        members: MemberView,
        capacity: Capacity,
        model: CostModel,
        shared: SharedAdmission,
    ) -> None:
        """members: the workers of the model."""
        shared.admission_queues.append(self)
        self.queues = TenantQueues()
        self.quotas = shared.quotas
        self.capacity = capacity
        self.in_flight = capacity.in_flight
        self.forecast = Forecast(clock, members, self.in_flight, model)
        self.objectives = ObjectiveChecker(clock, self.forecast)
        self.overload = OverloadManager(members, self.forecast, clock.now_s())
        self.tallies = TenantTallies()
        self._shared = shared
        self._clock = clock
        self._estimator = WorkEstimator()
        self._attempts: dict[AttemptKey, QueuedAttempt] = {}
        self._deadlines = Deadlines(self.queues)
        self._work_out = 0.0  # dispatched since the forecast was last told

    def __len__(self) -> int:
        """The number of waiting attempts."""
        return len(self.queues)

    def __contains__(self, key: AttemptKey) -> bool:
        """True when the attempt waits."""
        return key in self.queues

    def submit(self, gateway: str, submit: Submit) -> AttemptRefusal | None:
        """Queue an attempt and return None, or return why it is refused. The key must be new."""
        request, is_begun = submit.request, submit.is_begun
        work = self._estimator.expect(request, is_begun=is_begun)
        if submit.sticky_worker:
            work = RequestWork(0.0, work.answer)  # that worker holds the prompt
        objective, since_s = objective_of(request), self._clock.now_s() - submit.age_s
        due_s = since_s + (0.0 if is_begun else objective.due_s)
        attempt = QueuedAttempt(gateway, submit, since_s=since_s, due_s=due_s, work=work)
        refused = None if is_begun else self._refusal(attempt)
        if refused is None and not self.capacity.serves(request.model):
            refused = no_room("no worker serves the model")
        if refused is not None:
            self.tallies.of(request.tenant).count_refused(refused.refusal)
            return refused
        self.quotas.enter(request.tenant, request.scheduling_key.quotas, work.total)
        self.tallies.of(request.tenant).weight = request.scheduling_key.weight
        self._attempts[attempt.key] = attempt
        self.overload.opened(request)
        self._shared.hold_or_release(request.tenant)
        self.queues.add(attempt)
        ttft_s = objective.ttft_s if request.scheduling_key.degradation.may_shed else inf
        if not is_begun and (end_s := min(objective.deadline_s, ttft_s)) < inf:
            self._deadlines.add(since_s + end_s, attempt.key)
        return None

    def overflow(self, key: AttemptKey) -> AttemptRefusal | None:
        """Refuse a queued attempt when too many of its tenant wait, and return why; the latest first."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.is_dispatched or attempt.submit.is_begun:
            return None
        tenant, quotas = attempt.tenant, attempt.scheduling_key.quotas
        refused = self.quotas.queue_refusal(tenant, quotas, self._shared.num_queued(tenant))
        if refused is not None:
            self.refuse(key, refused)
        return refused

    def first(self) -> QueuedAttempt | None:
        """The next attempt in turn; None when none waits, or no worker has a slot for its prompt."""
        waiting = self.queues.first()
        if waiting is None or self.overload.is_local(waiting.request):
            return waiting
        return waiting if self.capacity.can_compute(self._prompt(waiting)) else None

    def claim(self, waiting: QueuedAttempt, wanted: Collection[str] = ()) -> TenantClaim:
        """The claim of a waiting attempt. wanted: workers where earlier attempts wait for a slot."""
        prompt = self._prompt(waiting)
        needs_slot = bool(wanted) or self.capacity.prefills_are_full(prompt)
        has_slot = partial(self.capacity.has_slot, prompt)
        return TenantClaim(prompt.lag, prompt.lag_of, has_slot, needs_slot, wanted)

    def waited_s(self, waiting: QueuedAttempt) -> float:
        """Seconds since the request came to its gateway; waits at other routers count too."""
        return max(0.0, self._clock.now_s() - waiting.since_s)

    def skip(self, tenant: str) -> None:
        """Let later turns come first until `resume`."""
        self.queues.hold(tenant)

    def resume(self, tenant: str) -> None:
        """End `skip`."""
        if not self.quotas.is_full(tenant):
            self.queues.release(tenant, was_away=False)

    def refuse_hopeless(self, waiting: QueuedAttempt) -> AttemptRefusal | None:
        """Refuse an attempt that gets its turn too late for its objective, and return why."""
        waited_s = self.waited_s(waiting)
        # The prediction for an attempt that was submitted just now would be that of its submission.
        has_waited = waited_s > waiting.submit.age_s + OUTLOOK_AGE_S
        if waiting.submit.is_begun or not has_waited or not objective_of(waiting.request).is_promised:
            return None
        prediction = self._predict(waiting)
        refused = self.objectives.refusal(waiting.request, waiting.charged, waited_s, prediction)
        if refused is not None:
            self._count_hopeless(waiting, refused)
            self.refuse(waiting.key, refused)
        return refused

    def dispatch(self, waiting: QueuedAttempt) -> Request:
        """Take the first attempt out of the queue, and return the request as it is to be sent."""
        self.queues.take(waiting)
        self._work_out += waiting.work
        self.quotas.activate(waiting.tenant)
        self._shared.hold_or_release(waiting.tenant)
        waiting.is_dispatched = True
        tally = self.tallies.of(waiting.tenant)
        tally.num_dispatched += 1
        queued_s = waiting.queued_s(self._clock.now_s())
        tally.waited_s += queued_s
        self._shared.waits.observe(queued_s)
        is_clipped = self.overload.level >= OverloadLevel.CLIP and not waiting.submit.is_begun
        request = degraded(waiting.request) if is_clipped else waiting.request
        tally.num_degraded += request is not waiting.request
        return request

    def bypass(self, gateway: str, submit: Submit) -> QueuedAttempt:
        """Enter an attempt that is dispatched without a turn: a migration, or a health check.

        Its tenant is charged for its tokens when it ends. The key must be new.
        """
        request, since_s = submit.request, self._clock.now_s() - submit.age_s
        attempt = QueuedAttempt(gateway, submit, since_s=since_s, due_s=since_s, work=RequestWork(0.0, 0.0))
        attempt.is_dispatched = attempt.is_computed = True
        self._attempts[attempt.key] = attempt
        self.quotas.enter(request.tenant, request.scheduling_key.quotas, 0.0)
        self.quotas.activate(request.tenant)
        self.overload.opened(request)
        self._shared.hold_or_release(request.tenant)
        return attempt

    def refuse(self, key: AttemptKey, refused: AttemptRefusal) -> None:
        """Take a waiting attempt out of the queue, and count the refusal."""
        attempt = self._attempts[key]
        assert not attempt.is_dispatched, key
        self.tallies.of(attempt.tenant).count_refused(refused.refusal)
        self._end(attempt, None)

    def settle(self) -> None:
        """Tell the forecast the dispatched work, after all attempts that workers have room for."""
        self.forecast.rate.observe(self._clock.now_s(), self._work_out, is_busy=len(self.queues) > 0)
        self._work_out = 0.0

    # Reports on attempts. Unknown keys are ignored: the attempt may be another router's.

    def started(self, key: AttemptKey) -> None:
        """The attempt has its first token."""
        attempt = self._attempts.get(key)
        if attempt is not None and attempt.is_dispatched and not attempt.submit.is_begun:
            promised_s = objective_of(attempt.request).ttft_s
            taken_s = self._clock.now_s() - attempt.since_s
            if promised_s < inf:
                tally = self.tallies.of(attempt.tenant)
                tally.num_met += taken_s <= promised_s
                tally.num_missed += taken_s > promised_s

    def computed(self, prompts: Iterable[PrefillTimes]) -> None:
        """These prompts were computed: their tenants are charged the computed tokens."""
        for times in prompts:
            attempt = self._attempts.get((times.request_id, times.attempt))
            if attempt is None or not attempt.is_dispatched or attempt.is_computed:
                continue
            attempt.is_computed = True
            expected, used = attempt.charged, float(times.num_new_tokens)
            if attempt.submit.is_begun:  # its tenant has paid for the prompt before
                used = min(expected.prompt, used)
            attempt.charged = RequestWork(used, expected.answer)
            if not attempt.request.is_health_check:
                num_tokens = attempt.request.num_tokens
                self._estimator.learn_prompt(attempt.tenant, times.num_new_tokens, num_tokens)
            self._correct(attempt, used - expected.prompt)

    def ended(self, key: AttemptKey, num_answered: int | None) -> None:
        """The attempt has ended. num_answered: tokens of its answer; None: unknown, the charge stands."""
        if key in self._attempts:
            self._end(self._attempts[key], num_answered)

    def attempts_of(self, gateway: str) -> list[AttemptKey]:
        """The open attempts of a gateway, waiting or dispatched."""
        return [key for key, attempt in self._attempts.items() if attempt.gateway == gateway]

    def tick(self) -> Iterator[tuple[QueuedAttempt, AttemptRefusal]]:
        """Refuse attempts that have waited too long or are shed, and yield them."""
        yield from self._expire()
        self.queues.age()
        self.quotas.forget_idle()
        self.overload.update(self.queues, self._clock.now_s())
        yield from self._shed()

    def status(self) -> QueueStatus:
        """The state of the queue, for operators."""
        now_s = self._clock.now_s()
        waits_s: defaultdict[str, list[float]] = defaultdict(list)
        for waiting in self.queues:
            waits_s[waiting.tenant].append(waiting.queued_s(now_s))
        num_open = self.num_open()
        escalations = self.overload.controller.escalations
        return QueueStatus(
            level=self.overload.level,
            escalations={level.name.lower(): count for level, count in escalations.items()},
            num_queued=len(self.queues),
            oldest_wait_s=min(MAX_SECONDS, max(map(max, waits_s.values()), default=0.0)),
            tenants=self.tallies.statuses(waits_s, lambda tenant: num_open[tenant, True]),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when the parts do not agree on the open attempts."""
        self.queues.check_integrity()
        waiting = {key for key, attempt in self._attempts.items() if not attempt.is_dispatched}
        assert {each.key for each in self.queues} == waiting
        self._shared.check_integrity()

    def num_open(self) -> "Counter[tuple[str, bool]]":
        """The number of open attempts by tenant and by whether they are dispatched."""
        return Counter((each.tenant, each.is_dispatched) for each in self._attempts.values())

    def _refusal(self, attempt: QueuedAttempt) -> AttemptRefusal | None:
        """The reason to refuse a new request at its submission."""
        request = attempt.request
        refused = self.quotas.refusal(request.tenant, request.scheduling_key.quotas, attempt.work)
        if refused is not None:
            return refused
        is_shed = self.overload.is_to_be_shed(attempt)
        if not is_shed and not objective_of(request).is_promised:
            return None
        before = self.queues.work_before(attempt)
        prediction = self._predict(attempt, before)
        if is_shed:
            return self.objectives.shed(attempt.charged, prediction.queue_s)
        refused = self.objectives.refusal(request, attempt.charged, attempt.submit.age_s, prediction)
        if before > 0 and refused is not None:
            self._count_hopeless(attempt, refused)
        return refused

    def _predict(self, attempt: QueuedAttempt, work_before: float = 0.0) -> Prediction:
        mean_work = self.queues.work / max(1, len(self.queues))
        lag = self.queues.lag_of(attempt) - work_before / attempt.scheduling_key.weight
        prompt = self._prompt(attempt)._replace(lag=lag)
        num_before = work_before / max(1.0, mean_work)
        return self.forecast.predict(prompt, attempt.charged.answer, work_before, num_before)

    def _count_hopeless(self, attempt: QueuedAttempt, refused: AttemptRefusal) -> None:
        if refused.is_overload and not attempt.scheduling_key.has_unpromised_sla:
            self.overload.count_hopeless()

    def _end(self, attempt: QueuedAttempt, num_answered: int | None) -> None:
        del self._attempts[attempt.key]
        tenant, charged = attempt.tenant, attempt.charged
        self.overload.closed(attempt.request)
        if not attempt.is_dispatched:
            self.queues.remove(attempt)
            self.quotas.correct(tenant, -charged.total)
        else:
            if num_answered is not None:
                self._correct(attempt, num_answered - charged.answer)
                charged = RequestWork(charged.prompt, num_answered)
            if num_answered and not attempt.request.is_health_check:
                self._estimator.learn_answer(tenant, num_answered)
            self.tallies.of(tenant).work_tokens += max(0, round(charged.total))
        self.quotas.leave(tenant, was_active=attempt.is_dispatched)
        self._shared.hold_or_release(tenant)

    def _prompt(self, waiting: QueuedAttempt) -> NewPrompt:
        submit, num_tokens = waiting.submit, round(waiting.charged.prompt)
        if submit.is_begun and not submit.sticky_worker:
            num_tokens = waiting.request.num_tokens  # paid for, and has to be computed again
        lag = self.queues.lag_of(waiting)
        return NewPrompt(scheduling_class_of(waiting.request), num_tokens, lag, self.queues.known_lag)

    def _correct(self, attempt: QueuedAttempt, work: float) -> None:
        self.queues.correct(attempt.rank, attempt.tenant, work)
        self.quotas.correct(attempt.tenant, work)

    def _expire(self) -> Iterator[tuple[QueuedAttempt, AttemptRefusal]]:
        now_s = self._clock.now_s()
        for key in self._deadlines.passed(now_s):
            attempt = self._attempts[key]
            is_over = attempt.since_s + objective_of(attempt.request).deadline_s <= now_s  # as it was added
            refused = self.objectives.expired(attempt.charged, is_over=is_over)
            self._count_hopeless(attempt, refused)
            self.refuse(key, refused)
            yield attempt, refused

    def _shed(self) -> Iterator[tuple[QueuedAttempt, AttemptRefusal]]:
        rank = self.queues.last_rank()
        if rank is None:
            return
        lowest = [waiting for waiting in self.queues.of_rank(rank) if self.overload.is_to_be_shed(waiting)]
        for waiting in lowest[-MAX_SHED:]:
            refused = self.objectives.shed(waiting.charged, 0.0)
            self.refuse(waiting.key, refused)
            yield waiting, refused
