"""What the router has given to whom, by its own count; workers' counts are a second old.

An attempt is entered when it is dispatched. Its prompt weighs on the prefill worker until its first token,
its tokens weigh on the decode worker until its end. What a worker works on and no book knows of, such as what
an earlier router dispatched, weighs by the worker's own count.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final, NamedTuple, TypeAlias

from baton.clock import Clock, ManualClock
from baton.messages.control import Heartbeat
from baton.messages.workers import Worker
from baton.request import Request
from baton.router.policies.prompts_ahead import PromptsAhead, SchedulingClass

Key: TypeAlias = tuple[str, int]  # request id, attempt

OTHERS: Final = ""  # the gateway of an attempt that another router has sent out
SILENCE_S: Final = 5.0  # after which a worker that does not name another's attempt does not work on it
EXPECTED_OUTPUT_TOKENS: Final = 256  # of an answer that may be longer: most end before their limit


class InFlightAttempt(NamedTuple):
    gateway: str
    decode: str
    prefill: str  # "": the decode worker computes the prompt
    num_prompt_tokens: int  # that have to be computed, as far as is known
    num_tokens: int  # that its KV will hold
    compute_s: float = 0.0  # that the prompt is expected to take
    scheduling_class: SchedulingClass = SchedulingClass()
    num_output_tokens: int = EXPECTED_OUTPUT_TOKENS  # of its answer, as expected
    charged: float = 0.0  # work that its tenant was charged; see router/queue/quotas.py

    @property
    def computer(self) -> str:
        """The worker that computes the prompt."""
        return self.prefill or self.decode


class Decoding(NamedTuple):
    """What one party has of it."""

    num: int
    num_output_tokens: int  # of their answers, as expected


NOBODY: Final = Decoding(0, 0)


class WorkerInFlight:
    """One worker's."""

    __slots__ = (
        *("num_attempts", "num_prompt_tokens", "num_tokens", "num_unknown", "num_unknown_tokens"),
        *("num_computing", "num_decoding", "decoding", "work_s", "since_s", "prompts"),
    )

    def __init__(self) -> None:
        self.prompts = PromptsAhead()
        self.num_computing = 0  # prompts that wait for their first token here
        self.work_s = 0.0  # that these are expected to take, together
        self.since_s = 0.0  # when the first of them came to be it
        self.num_attempts = 0
        self.num_decoding = 0  # of these: they have their first token, and are decoded here
        self.decoding: dict[SchedulingClass, Decoding] = {}  # whose they are
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self.num_unknown = 0  # attempts that it works on and no entry names
        self.num_unknown_tokens = 0

    def wait_s(self, now_s: float) -> float:
        """Until a new prompt's turn, if they are computed in order: of what is begun a part is done."""
        if not self.num_computing:
            return 0.0
        return self.work_s - min(now_s - self.since_s, self.work_s / self.num_computing)

    def share_of(self, worker: Worker) -> float:
        """Of its KV pages or of its places in the batch, whichever is scarcer."""
        num_slots = max(1, worker.num_pages * worker.page_size)
        num_attempts = self.num_attempts + self.num_unknown
        return max(
            (self.num_tokens + self.num_unknown_tokens) / num_slots,
            num_attempts / max(1, worker.max_num_seqs),
        )


class InFlight:
    def __init__(self, clock: Clock | None = None) -> None:
        """clock: none: no time passes."""
        self._clock = clock or ManualClock()
        self._entries: dict[Key, InFlightAttempt] = {}
        self._by_gateway: defaultdict[str, set[Key]] = defaultdict(set)
        self._accounts: defaultdict[str, WorkerInFlight] = defaultdict(WorkerInFlight)
        self._waiting: set[Key] = set()  # for their first token
        self._named_s: defaultdict[str, dict[Key, float]] = defaultdict(dict)  # by decode worker
        self.num_others = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_own(self) -> int:
        """Without those that other routers have sent out."""
        return len(self._entries) - self.num_others

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def account(self, worker_id: str) -> WorkerInFlight:
        return self._accounts[worker_id]

    def enter(self, key: Key, entry: InFlightAttempt) -> None:
        """The key must be new."""
        assert key not in self._entries, key
        self._entries[key] = entry
        self._named_s[entry.decode][key] = self._clock.now_s()
        self.num_others += entry.gateway == OTHERS
        self._by_gateway[entry.gateway].add(key)
        decode = self._accounts[entry.decode]
        decode.num_attempts += 1
        decode.num_tokens += entry.num_tokens
        if entry.prefill:
            prefill = self._accounts[entry.prefill]
            prefill.num_attempts += 1
            prefill.num_prompt_tokens += entry.num_prompt_tokens
        self._waiting.add(key)
        computer = self._accounts[entry.computer]
        if not computer.num_computing:
            computer.since_s = self._clock.now_s()
        computer.num_computing += 1
        computer.work_s += entry.compute_s
        computer.prompts.add(entry.scheduling_class, entry.num_prompt_tokens, entry.charged)

    def started(self, key: Key) -> None:
        """Unknown keys are no offence, here and below: they may be another router's."""
        if key not in self._waiting:
            return
        self._waiting.remove(key)
        entry = self._entries[key]
        decode = self._accounts[entry.decode]
        decode.num_decoding += 1
        num, num_tokens = decode.decoding.get(entry.scheduling_class, NOBODY)
        decode.decoding[entry.scheduling_class] = Decoding(num + 1, num_tokens + entry.num_output_tokens)
        computer = self._accounts[entry.computer]
        computer.num_computing -= 1
        computer.since_s = self._clock.now_s()
        computer.work_s = computer.work_s - entry.compute_s if computer.num_computing else 0.0
        computer.prompts.remove(entry.scheduling_class, entry.num_prompt_tokens, entry.charged)
        if not entry.prefill:
            return
        prefill = self._accounts[entry.prefill]
        prefill.num_attempts -= 1
        prefill.num_prompt_tokens -= entry.num_prompt_tokens

    def ended(self, key: Key) -> InFlightAttempt | None:
        """What it was; None: it is unknown."""
        self.started(key)
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        del self._named_s[entry.decode][key]
        self.num_others -= entry.gateway == OTHERS
        self._by_gateway[entry.gateway].discard(key)
        decode = self._accounts[entry.decode]
        decode.num_attempts -= 1
        decode.num_decoding -= 1
        num, num_tokens = decode.decoding.pop(entry.scheduling_class)
        if num > 1:
            decode.decoding[entry.scheduling_class] = Decoding(num - 1, num_tokens - entry.num_output_tokens)
        decode.num_tokens -= entry.num_tokens
        return entry

    def is_anothers(self, key: Key) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.gateway == OTHERS

    def wait_s(self, worker_id: str) -> float:
        return self._accounts[worker_id].wait_s(self._clock.now_s())

    def waiting_at(self, decode: str) -> list[tuple[Key, InFlightAttempt]]:
        """What this decode worker was given and has not begun to answer, as far as is known."""
        waiting = [(key, self._entries[key]) for key in self._waiting]
        return sorted((key, entry) for key, entry in waiting if entry.decode == decode)

    def gateway_left(self, gateway_id: str) -> None:
        """What it has under way is ended by the workers, or counted by them until then."""
        for key in list(self._by_gateway.pop(gateway_id, ())):
            self.ended(key)
        self._by_gateway.pop(gateway_id, None)

    def beat(self, worker: Worker, beat: Heartbeat) -> list[Key]:
        """Count what the worker works on that is in no entry. Returns what is here and it does not work on.

        Such an attempt has ended, and who should say so may have been cut off meanwhile. Until the worker has
        not named it for SILENCE_S its gateway may still tell of its end, and of its tokens.
        """
        account = self._accounts[worker.id]
        account.num_unknown = sum(key not in self._entries for key in beat.attempts)
        num_active_tokens = beat.load.pages.get("active", 0) * worker.page_size
        account.num_unknown_tokens = num_active_tokens * account.num_unknown // max(1, len(beat.attempts))
        now_s, named_s = self._clock.now_s(), self._named_s.get(worker.id, {})
        named_s.update(dict.fromkeys(named_s.keys() & set(beat.attempts), now_s))
        return [key for key, at_s in named_s.items() if at_s < now_s - SILENCE_S]

    def forget(self, worker_ids: Iterable[str]) -> None:
        """They are gone: so are other routers' attempts there, and accounts that no entry names."""
        gone = set(worker_ids)
        for worker_id in gone:
            for key in [key for key in self._named_s.get(worker_id, ()) if self.is_anothers(key)]:
                self.ended(key)
            if not self._named_s.get(worker_id):
                self._named_s.pop(worker_id, None)
        named = {name for entry in self._entries.values() for name in (entry.decode, entry.prefill)}
        for worker_id in gone:
            if worker_id not in named:
                self._accounts.pop(worker_id, None)

    def workers(self) -> Iterable[str]:
        return self._accounts.keys()

    def check_integrity(self) -> None:
        """AssertionError when the accounts are not the sums of the entries."""
        for worker_id, account in self._accounts.items():
            decoded = [entry for entry in self._entries.values() if entry.decode == worker_id]
            filled = [self._entries[key] for key in self._waiting if self._entries[key].prefill == worker_id]
            assert account.num_attempts == len(decoded) + len(filled), worker_id
            assert account.num_tokens == sum(entry.num_tokens for entry in decoded), worker_id
            assert account.num_prompt_tokens == sum(entry.num_prompt_tokens for entry in filled), worker_id
            computed = [key for key in self._waiting if self._entries[key].computer == worker_id]
            assert account.num_computing == len(computed), worker_id
            waiting = [key for key in self._waiting if self._entries[key].decode == worker_id]
            assert account.num_decoding == len(decoded) - len(waiting), worker_id
            begun = [each for key, each in self._entries.items() if key not in self._waiting]
            decoding = defaultdict[SchedulingClass, list[int]](list)
            for entry in begun:
                if entry.decode == worker_id:
                    decoding[entry.scheduling_class].append(entry.num_output_tokens)
            found = {
                scheduling_class: Decoding(len(each), sum(each))
                for scheduling_class, each in decoding.items()
            }
            assert account.decoding == found, worker_id
        assert sum(map(len, self._by_gateway.values())) == len(self._entries)
        assert sum(map(len, self._named_s.values())) == len(self._entries)
        assert sum(entry.gateway == OTHERS for entry in self._entries.values()) == self.num_others


def scheduling_class_of(request: Request) -> SchedulingClass:
    return SchedulingClass(request.tenant, request.scheduling_key.weight, request.scheduling_key.rank)


def num_kv_tokens(request: Request) -> int:
    """How many tokens' KV the request is expected to need in the end."""
    num_generated = len(request.generated_token_ids)
    limit = request.sampling.max_tokens
    num_left = EXPECTED_OUTPUT_TOKENS
    if limit is not None:
        num_left = min(num_left, max(0, limit - num_generated))
    return len(request.token_ids) + num_generated + num_left
