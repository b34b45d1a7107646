"""In-flight load: the attempts that routers have dispatched to each worker.

1. An attempt is entered when it is dispatched. Its prompt is load of the worker that computes it until the
   first token; its tokens are load of the decode worker until the attempt ends.
2. Attempts that other routers dispatched are entered too (router/cluster_state.py tells of them), with
   `OTHERS` as their gateway.
3. Attempts that a worker reports and no entry names, such as those of an earlier router, count by the
   worker's own figures, which are a second old.

Workers order prompts of several tenants by fair shares, so `WaitingPrompts` also says how much of a worker's
prompts would be computed before a new one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from typing import Final, NamedTuple, TypeAlias

from baton.clock import Clock
from baton.messages.control import Heartbeat
from baton.messages.workers import Worker
from baton.request import AttemptKey, Request

OTHERS: Final = ""  # the gateway of an attempt that another router dispatched
SILENCE_S: Final = 5.0  # an attempt that its decode worker has not reported for so long has ended there
EXPECTED_OUTPUT_TOKENS: Final = 256  # most answers end before their limit


class SchedulingClass(NamedTuple):
    """A tenant with its weight and priority rank; rank 0 comes first."""

    tenant: str = ""
    weight: float = 1.0
    rank: int = 0


# A tenant's virtual-time lag: tokens, divided by its weight, that the tenant has had less than the tenant
# of its rank that was served last. Positive: the tenant has a deficit. None: it was charged nothing.
LagOf: TypeAlias = Callable[[SchedulingClass], float | None]


class NewPrompt(NamedTuple):
    """A prompt that could be sent to a worker.

    lag: of its tenant; None: as if the tenant had been charged only for its prompts at the same worker.
    lag_of: the lags of other tenants, which already include their prompts at the worker; None: as if
    unknown.
    """

    scheduling_class: SchedulingClass
    num_tokens: int
    lag: float | None = None
    lag_of: LagOf | None = None


@dataclass(slots=True)
class _ClassPrompts:
    """The waiting prompts of one scheduling class."""

    num: int = 0
    num_tokens: int = 0
    charged: float = 0.0  # work that the tenant was charged for them


_NO_PROMPTS: Final = _ClassPrompts()


class WaitingPrompts:
    """The prompts of one worker that have no first token yet, summed by scheduling class."""

    __slots__ = ("_by_class", "total")

    def __init__(self) -> None:
        self._by_class: dict[SchedulingClass, _ClassPrompts] = {}
        self.total = 0  # tokens

    def add(self, scheduling_class: SchedulingClass, num_tokens: int, charged: float = 0.0) -> None:
        """charged: work that the tenant was charged for the prompt and its answer."""
        prompts = self._by_class.get(scheduling_class)
        if prompts is None:
            prompts = self._by_class[scheduling_class] = _ClassPrompts()
        prompts.num += 1
        prompts.num_tokens += num_tokens
        prompts.charged += charged
        self.total += num_tokens

    def remove(self, scheduling_class: SchedulingClass, num_tokens: int, charged: float = 0.0) -> None:
        """Remove a prompt that was added with the same arguments."""
        prompts = self._by_class[scheduling_class]
        prompts.num -= 1
        prompts.num_tokens -= num_tokens
        prompts.charged -= charged
        self.total -= num_tokens
        if not prompts.num:
            del self._by_class[scheduling_class]

    def ahead_of(self, prompt: NewPrompt) -> tuple[int, float]:
        """Return the numbers of prompts and of tokens that the worker computes before `prompt`.

        A prompt of which only a part comes first counts as one. All prompts of higher ranks and of the same
        class come first, none of lower ranks. Another tenant of the same rank comes first with at most its
        share of the time until `prompt` is computed, minus the work that the tenant has had.
        """
        scheduling_class, num_tokens, lag, lag_of = prompt
        own = self._by_class.get(scheduling_class, _NO_PROMPTS)
        num, ahead = own.num, float(own.num_tokens)
        # The virtual time at which `prompt` is computed.
        finish = (own.num_tokens if lag is None else -lag * scheduling_class.weight) + num_tokens
        finish /= scheduling_class.weight
        for other, prompts in self._by_class.items():
            if other.rank < scheduling_class.rank:
                ahead += prompts.num_tokens
                num += prompts.num
            elif other.rank == scheduling_class.rank and other != scheduling_class:
                tokens_ahead = finish * other.weight
                others_lag = lag_of(other) if lag_of is not None else None
                if others_lag is not None:
                    tokens_ahead += prompts.charged + others_lag * other.weight
                if tokens_ahead >= prompts.num_tokens:
                    ahead += prompts.num_tokens
                    num += prompts.num
                elif tokens_ahead > 0.0:
                    ahead += tokens_ahead
                    num += ceil(prompts.num * tokens_ahead / prompts.num_tokens)
        return num, ahead

    def share_ahead_of(self, prompt: NewPrompt) -> float:
        """The share, 0 to 1, of all tokens here that is computed before `prompt`."""
        if self.total <= 0 or (len(self._by_class) == 1 and prompt.scheduling_class in self._by_class):
            return 1.0
        return self.ahead_of(prompt)[1] / self.total


class InFlightAttempt(NamedTuple):
    """One dispatched attempt and the load that it puts on its workers."""

    gateway: str
    decode: str
    prefill: str  # "": the decode worker computes the prompt
    num_prompt_tokens: int  # expected to be computed, not found in a prefix cache
    num_tokens: int  # expected in its KV at the end
    compute_s: float = 0.0  # expected time to compute the prompt
    scheduling_class: SchedulingClass = SchedulingClass()
    num_output_tokens: int = EXPECTED_OUTPUT_TOKENS
    charged: float = 0.0  # work that its tenant was charged; see router/queue/quotas.py

    @property
    def computed_by(self) -> str:
        """The worker that computes the prompt."""
        return self.prefill or self.decode


class Decoding(NamedTuple):
    """Attempts of one scheduling class that a worker decodes."""

    num: int
    num_output_tokens: int  # expected in their answers


_NONE_DECODING: Final = Decoding(0, 0)


class WorkerInFlight:
    """The in-flight load of one worker."""

    __slots__ = (
        *("num_attempts", "num_tokens", "num_unknown", "num_unknown_tokens"),
        *("num_computing", "decoding", "work_s", "since_s", "prompts"),
    )

    def __init__(self) -> None:
        self.prompts = WaitingPrompts()
        self.num_computing = 0  # prompts here without a first token
        self.work_s = 0.0  # expected time to compute all of them
        self.since_s = 0.0  # the present first of them has been the first since then
        self.num_attempts = 0
        # Attempts that are decoded here and have their first token, by class.
        self.decoding: dict[SchedulingClass, Decoding] = {}
        self.num_tokens = 0
        self.num_unknown = 0  # attempts that the worker reports and no entry names
        self.num_unknown_tokens = 0

    def wait_s(self, now_s: float) -> float:
        """Seconds until a new prompt would begin, first come first served, less what the first has had."""
        if not self.num_computing:
            return 0.0
        return self.work_s - min(now_s - self.since_s, self.work_s / self.num_computing)

    def share_of(self, worker: Worker) -> float:
        """The used share of its KV pages or of its batch, whichever is larger."""
        num_slots = max(1, worker.num_pages * worker.page_size)
        num_attempts = self.num_attempts + self.num_unknown
        return max(
            (self.num_tokens + self.num_unknown_tokens) / num_slots,
            num_attempts / max(1, worker.max_num_seqs),
        )


class InFlight:
    """All dispatched attempts, and the load of each worker as their sum."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[AttemptKey, InFlightAttempt] = {}
        self.num_others = 0  # attempts that other routers dispatched
        self._accounts: defaultdict[str, WorkerInFlight] = defaultdict(WorkerInFlight)
        self._waiting: set[AttemptKey] = set()  # without a first token
        self._reported_s: defaultdict[str, dict[AttemptKey, float]] = defaultdict(dict)  # by decode worker

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_own(self) -> int:
        """Attempts that this router dispatched."""
        return len(self._entries) - self.num_others

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._entries

    def account(self, worker_id: str) -> WorkerInFlight:
        """The load of a worker; empty for an unknown one."""
        return self._accounts[worker_id]

    def enter(self, key: AttemptKey, entry: InFlightAttempt) -> None:
        """Add the load of a dispatched attempt. The key must be new."""
        assert key not in self._entries, key
        self._entries[key] = entry
        self._reported_s[entry.decode][key] = self._clock.now_s()
        self.num_others += entry.gateway == OTHERS
        decode = self._accounts[entry.decode]
        decode.num_attempts += 1
        decode.num_tokens += entry.num_tokens
        if entry.prefill:
            self._accounts[entry.prefill].num_attempts += 1
        self._waiting.add(key)
        account = self._accounts[entry.computed_by]
        if not account.num_computing:
            account.since_s = self._clock.now_s()
        account.num_computing += 1
        account.work_s += entry.compute_s
        account.prompts.add(entry.scheduling_class, entry.num_prompt_tokens, entry.charged)

    def started(self, key: AttemptKey) -> bool:
        """Move an attempt with its first token from the prefill to the decode load.

        Returns whether it moved: once. Unknown keys are ignored, here and below: the attempt may be another
        router's.
        """
        if key not in self._waiting:
            return False
        self._waiting.remove(key)
        entry = self._entries[key]
        decode = self._accounts[entry.decode]
        num, num_tokens = decode.decoding.get(entry.scheduling_class, _NONE_DECODING)
        decode.decoding[entry.scheduling_class] = Decoding(num + 1, num_tokens + entry.num_output_tokens)
        account = self._accounts[entry.computed_by]
        account.num_computing -= 1
        account.since_s = self._clock.now_s()
        account.work_s = account.work_s - entry.compute_s if account.num_computing else 0.0
        account.prompts.remove(entry.scheduling_class, entry.num_prompt_tokens, entry.charged)
        if entry.prefill:
            self._accounts[entry.prefill].num_attempts -= 1
        return True

    def ended(self, key: AttemptKey) -> None:
        """Remove an attempt."""
        self.started(key)
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        del self._reported_s[entry.decode][key]
        self.num_others -= entry.gateway == OTHERS
        decode = self._accounts[entry.decode]
        decode.num_attempts -= 1
        num, num_tokens = decode.decoding.pop(entry.scheduling_class)
        if num > 1:
            decode.decoding[entry.scheduling_class] = Decoding(num - 1, num_tokens - entry.num_output_tokens)
        decode.num_tokens -= entry.num_tokens

    def is_anothers(self, key: AttemptKey) -> bool:
        """True for an attempt that another router dispatched."""
        entry = self._entries.get(key)
        return entry is not None and entry.gateway == OTHERS

    def wait_s(self, worker_id: str) -> float:
        """`WorkerInFlight.wait_s` at the present time."""
        return self._accounts[worker_id].wait_s(self._clock.now_s())

    def decoded_at(self, worker: str) -> list[tuple[AttemptKey, InFlightAttempt]]:
        """The attempts of a decode worker, sorted by key."""
        return sorted((key, self._entries[key]) for key in self._reported_s.get(worker, ()))

    def beat(self, worker: Worker, beat: Heartbeat) -> list[tuple[AttemptKey, InFlightAttempt]]:
        """Count the attempts of a heartbeat that no entry names; return those that the worker has dropped.

        A dropped attempt has an entry, and its decode worker has not reported the attempt for SILENCE_S.
        Earlier, the gateway may still report the end with the number of tokens.
        """
        account = self._accounts[worker.id]
        account.num_unknown = sum(key not in self._entries for key in beat.attempts)
        num_active_tokens = beat.load.pages.get("active", 0) * worker.page_size
        account.num_unknown_tokens = num_active_tokens * account.num_unknown // max(1, len(beat.attempts))
        now_s, reported_s = self._clock.now_s(), self._reported_s.get(worker.id, {})
        reported_s.update(dict.fromkeys(reported_s.keys() & set(beat.attempts), now_s))
        dropped = [key for key, at_s in reported_s.items() if at_s < now_s - SILENCE_S]
        return [(key, self._entries[key]) for key in dropped]

    def forget(self, worker_ids: Iterable[str]) -> None:
        """Drop the load of workers that have left, and the attempts of other routers there.

        Own attempts stay until they end.
        """
        left = dict.fromkeys(worker_ids)
        for worker_id in left:
            for key in [key for key in self._reported_s.get(worker_id, ()) if self.is_anothers(key)]:
                self.ended(key)
            if not self._reported_s.get(worker_id):
                self._reported_s.pop(worker_id, None)
        named = {name for entry in self._entries.values() for name in (entry.decode, entry.prefill)}
        for worker_id in left.keys() - named:
            self._accounts.pop(worker_id, None)

    def workers(self) -> Iterable[str]:
        """Ids of the workers with an account."""
        return self._accounts.keys()

    def check_integrity(self) -> None:
        """Raise AssertionError when an account is not the sum of its entries."""
        for worker_id, account in self._accounts.items():
            decoded = {key: each for key, each in self._entries.items() if each.decode == worker_id}
            computed = [
                each for key in self._waiting if (each := self._entries[key]).computed_by == worker_id
            ]
            assert account.num_attempts == len(decoded) + sum(bool(each.prefill) for each in computed), (
                worker_id
            )
            assert account.num_tokens == sum(entry.num_tokens for entry in decoded.values()), worker_id
            assert account.num_computing == len(computed), worker_id
            begun = [entry for key, entry in decoded.items() if key not in self._waiting]
            num_output_tokens = defaultdict[SchedulingClass, list[int]](list)
            for entry in begun:
                num_output_tokens[entry.scheduling_class].append(entry.num_output_tokens)
            decoding = {each: Decoding(len(nums), sum(nums)) for each, nums in num_output_tokens.items()}
            assert account.decoding == decoding, worker_id
        assert self.num_others == sum(entry.gateway == OTHERS for entry in self._entries.values())
        assert sum(map(len, self._reported_s.values())) == len(self._entries)


def scheduling_class_of(request: Request) -> SchedulingClass:
    """The scheduling class of the request's tenant."""
    return SchedulingClass(request.tenant, request.scheduling_key.weight, request.scheduling_key.rank)


def num_output_tokens(request: Request) -> int:
    """Return the number of tokens that the request is expected to generate from here."""
    limit = request.sampling.max_tokens
    if limit is None:
        return EXPECTED_OUTPUT_TOKENS
    return min(EXPECTED_OUTPUT_TOKENS, max(0, limit - len(request.generated_token_ids)))


def num_kv_tokens(request: Request) -> int:
    """Return the number of tokens that the request's KV is expected to hold at its end."""
    return request.num_tokens + num_output_tokens(request)
