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

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from baton.clock import Clock
from baton.request import Request
from baton.router.in_flight import EXPECTED_OUTPUT_TOKENS, Key
from baton.tenants import Quotas, Refusal

MAX_IDLE: Final = 4096  # tenants without a request, before those with a full bucket are forgotten
FULL_RETRY_S: Final = 1.0  # where nobody can tell when one of the tenant's requests ends


class QuotaRefusal(NamedTuple):
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

    def refusal(self, tenant: str, quotas: Quotas, work: float) -> QuotaRefusal | None:
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
            return QuotaRefusal(Refusal.TOKENS_PER_S, f"{quotas.tokens_per_s:g} tokens a second", wait_s)
        return None

    def queue_refusal(self, tenant: str, quotas: Quotas, num_queued: int) -> QuotaRefusal | None:
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


def _full(refusal: Refusal, most: int) -> QuotaRefusal:
    return QuotaRefusal(refusal, f"{most} at most", FULL_RETRY_S)


# How much work requests are, in tokens: what is expected of one, and what it has used in the end.
#
# Work is the prompt's tokens that have to be computed and the tokens of the answer. What is expected follows
# what the same tenant's requests have been: how long its answers, how much of its prompts was there already.
# An attempt at what workers have begun with has its prompt for nothing: its tenant has paid for it once.

MAX_TENANTS: Final = 4096  # whose habits are remembered; the least lately seen is forgotten
LEAST_GAIN: Final = 0.05  # of a new figure, in a mean


class RequestWork(NamedTuple):
    """Tokens."""

    prompt: float
    answer: float

    @property
    def total(self) -> float:
        return self.prompt + self.answer


class WorkCharge(NamedTuple):
    """What an attempt was charged, until it has ended."""

    rank: int
    tenant: str
    work: RequestWork
    num_tokens: int  # of the whole prompt
    is_begun: bool = False  # workers have had an earlier attempt
    is_computed: bool = False  # the prompt's work is known by now


class _Habit:
    __slots__ = ("answer", "num_answers", "num_prompts", "share")

    def __init__(self) -> None:
        self.answer = float(EXPECTED_OUTPUT_TOKENS)
        self.share = 1.0  # of its prompts that has to be computed
        self.num_answers = 0
        self.num_prompts = 0


class WorkLedger:
    def __init__(self, correct: Callable[[WorkCharge, float], None]) -> None:
        """`correct(charge, work)`: an attempt has used so much more than it was charged, or less."""
        self._correct = correct
        self._charges: dict[Key, WorkCharge] = {}
        self._habits: OrderedDict[str, _Habit] = OrderedDict()

    def __len__(self) -> int:
        return len(self._charges)

    def __contains__(self, key: Key) -> bool:
        return key in self._charges

    def expect(self, request: Request, *, is_begun: bool = False) -> RequestWork:
        habit = self._habit(request.tenant)
        prompt = 0.0 if is_begun else request.num_tokens * habit.share
        limit = request.sampling.max_tokens
        answer = habit.answer
        if limit is not None:
            answer = min(answer, max(0, limit - len(request.generated_token_ids)))
        return RequestWork(prompt, answer)

    def charge(self, key: Key, charge: WorkCharge) -> None:
        """It is let out; the key must be new."""
        assert key not in self._charges, key
        self._charges[key] = charge

    def get(self, key: Key) -> WorkCharge | None:
        return self._charges.get(key)

    def computed(self, key: Key, num_new_tokens: int) -> None:
        """So much of its prompt had to be computed. What is unknown, or known already, changes nothing."""
        charge = self._charges.get(key)
        if charge is None or charge.is_computed:
            return
        habit = self._habit(charge.tenant)
        habit.num_prompts += 1
        share = num_new_tokens / max(1, charge.num_tokens)
        habit.share += (min(1.0, share) - habit.share) * max(LEAST_GAIN, 1 / habit.num_prompts)
        used = min(charge.work.prompt, float(num_new_tokens)) if charge.is_begun else float(num_new_tokens)
        self._charges[key] = charge._replace(work=RequestWork(used, charge.work.answer), is_computed=True)
        self._correct(charge, used - charge.work.prompt)

    def ended(self, key: Key, num_answered: int | None) -> WorkCharge | None:
        """num_answered: tokens of this attempt; None: nobody knows, what was expected stands."""
        charge = self._charges.pop(key, None)
        if charge is None or num_answered is None:
            return charge
        self._correct(charge, num_answered - charge.work.answer)
        if num_answered:
            habit = self._habit(charge.tenant)
            habit.num_answers += 1
            habit.answer += (num_answered - habit.answer) * max(LEAST_GAIN, 1 / habit.num_answers)
        return charge._replace(work=RequestWork(charge.work.prompt, num_answered))

    def answer_of(self, tenant: str) -> float:
        """Tokens that its answers have, by the way."""
        return self._habit(tenant).answer

    def _habit(self, tenant: str) -> _Habit:
        habit = self._habits.get(tenant)
        if habit is None:
            habit = self._habits[tenant] = _Habit()
            if len(self._habits) > MAX_TENANTS:
                self._habits.popitem(last=False)
        else:
            self._habits.move_to_end(tenant)
        return habit
