"""What each tenant may have at one time and over time, in the whole cluster as far as this router knows.

1. A request is asked for: it is refused where its tenant has all that it may have, by that quota's name.
2. It is entered: it counts as one of the tenant's, and its work is taken out of the tenant's bucket.
3. It waits, unless it can be let out at once; where too many of its tenant wait, it is refused after all.
4. Let out to workers, it is active; a tenant with all its active ones is full, and its others wait.
5. It ends, or is let go: it counts no more. Its work is corrected to what was used.

A bucket of tokens fills at the quota's rate up to the burst. A request larger than the burst is let in when
the bucket is full, and leaves it in debt. So over any time t no more work is let in than rate * t and the
burst, or that one request, if it is larger.
"""

from typing import Final, NamedTuple

from baton.clock import Clock
from baton.tenancy import Quotas, Refusal

MAX_IDLE: Final = 4096  # tenants without a request, before those with a full bucket are forgotten
FULL_RETRY_S: Final = 1.0  # where nobody can tell when one of the tenant's requests ends


class Refused(NamedTuple):
    refusal: Refusal
    reason: str
    retry_after_s: float
    may_return: bool = True  # by itself, then; else only if somebody wants it
    is_overload: bool = True  # without others' work there would be room


class Bucket:
    """Of tokens."""

    __slots__ = ("_level", "_since_s", "burst", "rate")

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self.rate = rate
        self.burst = burst
        self._level = burst
        self._since_s = now_s

    def level(self, now_s: float) -> float:
        """A clock that goes back adds nothing."""
        if now_s > self._since_s:
            self._level = min(self.burst, self._level + (now_s - self._since_s) * self.rate)
            self._since_s = now_s
        return self._level

    def wait_s(self, work: float, now_s: float) -> float:
        """Until so much can be taken; 0: now."""
        missing = min(work, self.burst) - self.level(now_s)
        return missing / self.rate if missing > 0 else 0.0

    def take(self, work: float) -> None:
        """Of less than nothing: give back."""
        self._level = min(self.burst, self._level - work)

    def change(self, rate: float, burst: float, now_s: float) -> None:
        """What is there stays, as far as it fits."""
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
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tenants: dict[str, _Usage] = {}

    def refusal(self, tenant: str, quotas: Quotas, work: float) -> Refused | None:
        """Why one more request, of so much work, is not to be entered."""
        self._update(tenant, quotas)
        usage = self._tenants.get(tenant)
        if usage is None:
            return None
        most = quotas.max_concurrent_requests
        if most is not None and usage.num_requests >= most:
            return _full(Refusal.MAX_CONCURRENT_REQUESTS, most)
        wait_s = usage.bucket.wait_s(work, self._clock.now_s()) if usage.bucket is not None else 0.0
        if wait_s > 0:
            return Refused(Refusal.TOKENS_PER_S, f"{quotas.tokens_per_s:g} tokens a second", wait_s)
        return None

    def queue_refusal(self, tenant: str, quotas: Quotas, num_queued: int) -> Refused | None:
        """Why the last of so many that wait may not; by what makes them wait, where that is a quota."""
        if quotas.max_queued is None or num_queued <= quotas.max_queued:
            return None
        if self.is_full(tenant) and not quotas.max_queued:
            return _full(Refusal.MAX_ACTIVE_SEQUENCES, quotas.max_active_sequences or 0)
        return _full(Refusal.MAX_QUEUED, quotas.max_queued)

    def enter(self, tenant: str, quotas: Quotas, work: float) -> None:
        """Whatever its quotas: who asks before decides."""
        self._update(tenant, quotas)
        usage = self._tenants.setdefault(tenant, _Usage())
        usage.quotas = quotas
        usage.num_requests += 1
        self.correct(tenant, work)

    def activate(self, tenant: str) -> None:
        self._tenants[tenant].num_active += 1

    def leave(self, tenant: str, *, was_active: bool) -> None:
        """One that was entered."""
        usage = self._tenants[tenant]
        usage.num_requests -= 1
        usage.num_active -= was_active
        assert 0 <= usage.num_active <= usage.num_requests, tenant
        if not usage.num_requests and usage.bucket is None:
            del self._tenants[tenant]

    def correct(self, tenant: str, work: float) -> None:
        """So much more was used than was taken, or less."""
        usage = self._tenants.get(tenant)
        if usage is not None and usage.bucket is not None:
            usage.bucket.level(self._clock.now_s())
            usage.bucket.take(work)

    def is_full(self, tenant: str) -> bool:
        """Whether it has as many active ones as it may have."""
        usage = self._tenants.get(tenant)
        most = usage.quotas.max_active_sequences if usage is not None else None
        return usage is not None and most is not None and usage.num_active >= most

    def num_requests(self, tenant: str) -> int:
        usage = self._tenants.get(tenant)
        return usage.num_requests if usage is not None else 0

    def num_active(self, tenant: str) -> int:
        usage = self._tenants.get(tenant)
        return usage.num_active if usage is not None else 0

    def forget_idle(self) -> None:
        """Those that a new one would be like."""
        if len(self._tenants) > MAX_IDLE:
            now_s = self._clock.now_s()
            self._tenants = {
                tenant: usage
                for tenant, usage in self._tenants.items()
                if usage.num_requests or (usage.bucket and usage.bucket.level(now_s) < usage.bucket.burst)
            }

    def _update(self, tenant: str, quotas: Quotas) -> None:
        """The latest quotas hold."""
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


def _full(refusal: Refusal, most: int) -> Refused:
    return Refused(refusal, f"{most} at most", FULL_RETRY_S)
