"""The quotas of requests and tokens of each tenant, as far as this router knows, and the work of requests.

Quotas of KV pages belong to the workers.

1. A request is refused when its tenant has used up a quota; the refusal names the quota.
2. An entered request counts as one of its tenant's, and its expected work is taken from the tenant's token
   bucket.
3. The request waits unless it is dispatched at once. When too many requests of its tenant wait, it is refused
   after all.
4. A dispatched request is active. A tenant with as many active requests as it may have is full, and its other
   requests wait.
5. A request that has ended no longer counts, and its expected work is corrected to the work that it used.

A token bucket fills at the quota's rate up to the burst. A request larger than the burst is admitted when the
bucket is full, and leaves the bucket in debt. So over any time t at most rate * t + burst is admitted, or one
larger request.

Work is in tokens: those of the prompt that have to be computed, and those of the answer. The expected work
follows the tenant's earlier requests. The prompt of an attempt that continues a stream is free: its tenant
has paid for it.
"""

from collections import OrderedDict
from typing import Final, NamedTuple

from baton.clock import Clock
from baton.request import Request
from baton.router.in_flight import EXPECTED_OUTPUT_TOKENS
from baton.tenants import Quotas, Refusal

MAX_IDLE: Final = 4096  # tenants; with more, idle ones with a full bucket are forgotten
FULL_RETRY_S: Final = 1.0  # the end of a tenant's request cannot be predicted
MAX_TENANTS: Final = 4096  # with an estimate; the least recently seen is forgotten
LEAST_GAIN: Final = 0.05  # weight of a new figure in a mean
NO_ROOM_RETRY_S: Final = 1.0


class AttemptRefusal(NamedTuple):
    """The reason why an attempt is refused, and when it may come again."""

    refusal: Refusal
    reason: str
    retry_after_s: float
    should_retry: bool = True  # the client may retry by itself after `retry_after_s`
    is_overload: bool = True  # other tenants' work is the cause


def no_room(reason: str) -> AttemptRefusal:
    """The refusal of an attempt that no worker has room for now."""
    return AttemptRefusal(Refusal.NO_ROOM, reason, NO_ROOM_RETRY_S)


class Bucket:
    """A token bucket; it may be in debt."""

    __slots__ = ("_level", "_since_s", "burst", "rate")

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        """rate: tokens a second. burst: the level of a full bucket, and the first level."""
        self.rate = rate
        self.burst = burst
        self._level = burst
        self._since_s = now_s

    def level(self, now_s: float) -> float:
        """The present number of tokens. A clock that jumps back adds nothing."""
        if now_s > self._since_s:
            self._level = min(self.burst, self._level + (now_s - self._since_s) * self.rate)
            self._since_s = now_s
        return self._level

    def wait_s(self, work: float, now_s: float) -> float:
        """Seconds until `work` can be taken; 0: now."""
        missing = min(work, self.burst) - self.level(now_s)
        return missing / self.rate if missing > 0 else 0.0

    def take(self, work: float) -> None:
        """Take tokens; give back if negative."""
        self._level = min(self.burst, self._level - work)

    def change(self, rate: float, burst: float, now_s: float) -> None:
        """Set another rate and burst. The level stays, as far as it fits."""
        if (rate, burst) != (self.rate, self.burst):
            level = self.level(now_s)
            self.rate, self.burst, self._level = rate, burst, min(level, burst)


class _Usage:
    __slots__ = ("bucket", "num_active", "num_requests", "quotas")

    def __init__(self) -> None:
        self.quotas = Quotas()
        self.num_requests = 0
        self.num_active = 0
        self.bucket: Bucket | None = None


class TenantQuotas:
    """The usage of all tenants. The quotas of a tenant's latest request hold."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tenants: dict[str, _Usage] = {}

    def refusal(self, tenant: str, quotas: Quotas, work: float) -> AttemptRefusal | None:
        """The reason to refuse one more request of `work`; None when there is none."""
        self._update(tenant, quotas)
        usage = self._tenants.get(tenant)
        if usage is None:
            return None
        most = quotas.max_concurrent_requests
        if most is not None and usage.num_requests >= most:
            return _full(Refusal.MAX_CONCURRENT_REQUESTS, most)
        wait_s = usage.bucket.wait_s(work, self._clock.now_s()) if usage.bucket is not None else 0.0
        if wait_s > 0:
            return AttemptRefusal(Refusal.TOKENS_PER_S, f"{quotas.tokens_per_s:g} tokens a second", wait_s)
        return None

    def queue_refusal(self, tenant: str, quotas: Quotas, num_queued: int) -> AttemptRefusal | None:
        """The reason why the last of `num_queued` waiting requests may not wait; None when it may."""
        if quotas.max_queued is None or num_queued <= quotas.max_queued:
            return None
        if self.is_full(tenant) and not quotas.max_queued:
            return _full(Refusal.MAX_ACTIVE_SEQUENCES, quotas.max_active_sequences or 0)
        return _full(Refusal.MAX_QUEUED, quotas.max_queued)

    def enter(self, tenant: str, quotas: Quotas, work: float) -> None:
        """Count one more request, whatever the quotas say."""
        self._update(tenant, quotas)
        usage = self._tenants.setdefault(tenant, _Usage())
        usage.quotas = quotas
        usage.num_requests += 1
        self.correct(tenant, work)

    def activate(self, tenant: str) -> None:
        """An entered request was dispatched."""
        self._tenants[tenant].num_active += 1

    def leave(self, tenant: str, *, was_active: bool) -> None:
        """An entered request has ended."""
        usage = self._tenants[tenant]
        usage.num_requests -= 1
        usage.num_active -= was_active
        assert 0 <= usage.num_active <= usage.num_requests, tenant
        if not usage.num_requests and usage.bucket is None:
            del self._tenants[tenant]

    def correct(self, tenant: str, work: float) -> None:
        """Take `work` more from the tenant's bucket; give back if negative."""
        usage = self._tenants.get(tenant)
        if usage is not None and usage.bucket is not None:
            usage.bucket.level(self._clock.now_s())
            usage.bucket.take(work)

    def is_full(self, tenant: str) -> bool:
        """True when the tenant has all the active requests that it may have."""
        usage = self._tenants.get(tenant)
        most = usage.quotas.max_active_sequences if usage is not None else None
        return usage is not None and most is not None and usage.num_active >= most

    def num_requests(self, tenant: str) -> int:
        """The number of entered requests."""
        usage = self._tenants.get(tenant)
        return usage.num_requests if usage is not None else 0

    def num_active(self, tenant: str) -> int:
        """The number of dispatched requests."""
        usage = self._tenants.get(tenant)
        return usage.num_active if usage is not None else 0

    def forget_idle(self) -> None:
        """With more than MAX_IDLE tenants, drop those that have no request and a full bucket."""
        if len(self._tenants) > MAX_IDLE:
            now_s = self._clock.now_s()
            self._tenants = {
                tenant: usage
                for tenant, usage in self._tenants.items()
                if usage.num_requests or (usage.bucket and usage.bucket.level(now_s) < usage.bucket.burst)
            }

    def _update(self, tenant: str, quotas: Quotas) -> None:
        usage = self._tenants.get(tenant)
        if usage is None:
            if quotas.tokens_per_s is None:
                return
            usage = self._tenants[tenant] = _Usage()
        usage.quotas = quotas
        if quotas.tokens_per_s is None:
            usage.bucket = None
        elif usage.bucket is None:
            usage.bucket = Bucket(quotas.tokens_per_s, quotas.burst, self._clock.now_s())
        else:
            usage.bucket.change(quotas.tokens_per_s, quotas.burst, self._clock.now_s())


def _full(refusal: Refusal, most: int) -> AttemptRefusal:
    return AttemptRefusal(refusal, f"{most} at most", FULL_RETRY_S)


class RequestWork(NamedTuple):
    """The work of one request, in tokens."""

    prompt: float
    answer: float

    @property
    def total(self) -> float:
        """The sum of both."""
        return self.prompt + self.answer


class _TenantMeans:
    __slots__ = ("answer", "num_answers", "num_prompts", "share")

    def __init__(self) -> None:
        self.answer = float(EXPECTED_OUTPUT_TOKENS)
        self.share = 1.0  # of its prompts that has to be computed
        self.num_answers = 0
        self.num_prompts = 0


class WorkEstimator:
    """Estimates the work of requests from the means of their tenants' earlier requests."""

    def __init__(self) -> None:
        self._means: OrderedDict[str, _TenantMeans] = OrderedDict()

    def expect(self, request: Request, *, is_begun: bool = False) -> RequestWork:
        """The expected work. is_begun: the attempt continues a stream."""
        means = self._means_of(request.tenant)
        prompt = 0.0 if is_begun else request.num_tokens * means.share
        limit = request.sampling.max_tokens
        answer = means.answer
        if limit is not None:
            answer = min(answer, max(0, limit - len(request.generated_token_ids)))
        return RequestWork(prompt, answer)

    def learn_prompt(self, tenant: str, num_new_tokens: int, num_tokens: int) -> None:
        """A prompt of `num_tokens` had `num_new_tokens` to compute."""
        means = self._means_of(tenant)
        means.num_prompts += 1
        share = num_new_tokens / max(1, num_tokens)
        means.share += (min(1.0, share) - means.share) * max(LEAST_GAIN, 1 / means.num_prompts)

    def learn_answer(self, tenant: str, num_tokens: int) -> None:
        """An answer had `num_tokens`."""
        means = self._means_of(tenant)
        means.num_answers += 1
        means.answer += (num_tokens - means.answer) * max(LEAST_GAIN, 1 / means.num_answers)

    def _means_of(self, tenant: str) -> _TenantMeans:
        means = self._means.get(tenant)
        if means is None:
            means = self._means[tenant] = _TenantMeans()
            if len(self._means) > MAX_TENANTS:
                self._means.popitem(last=False)
        else:
            self._means.move_to_end(tenant)
        return means
