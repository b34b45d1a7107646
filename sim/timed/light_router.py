"""The routing of a fast rehearsal: the choice of the policy `cost`, without messages.

The production router learns what workers hold, and when prompts start and end, from messages; encoding and
applying them takes most of the time of a rehearsal. This router is told both by the simulation. It keeps the
rules: requests wait at the router, in their order, until a decode worker has room and a worker has a slot for
the prompt (router/queue/admission.py); then the pair with the least cost in seconds is chosen
(router/policies/candidates.py), by times that the production cost model learns from the workers' measured
steps and prompts. There are no tenants' shares, no refusals and no pulls from peers.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from operator import itemgetter
from random import Random
from typing import Final, NamedTuple, Protocol

from baton.clock import Clock
from baton.messages.control import Measured
from baton.messages.workers import PrefillTimes, Worker, WorkerRole
from baton.request import Request
from baton.router.in_flight import EXPECTED_OUTPUT_TOKENS
from baton.router.policies.candidates import TIE
from baton.router.policies.cost import (
    BALANCE_S,
    MAX_COMBINED,
    MAX_COMPARED,
    MAX_HOLDERS,
    NUM_DRAWN,
    NUM_KEPT,
    Arrivals,
    DecayedSum,
)
from baton.router.policies.cost_model import (
    HANDOFF_PRIOR,
    PREFILL_PRIOR,
    STEP_PRIOR,
    Fit,
    StepFit,
)
from baton.router.queue.admission import AHEAD_S, MIN_COMPUTING, OVERCOMMIT, STEP_TOKENS

_TOTAL: Final = itemgetter(0)


class LightWorker(Protocol):
    """A worker that takes prompts."""

    worker: Worker

    def take(self, request: Request, decode: "LightWorker") -> None:
        """Compute a prompt, and hand it over unless `decode` is this worker."""
        ...


class LightSpeeds:
    """The times of one worker as the production router learns them: see CostModel."""

    __slots__ = ("_handoffs", "prefill", "step")

    def __init__(self, step: StepFit) -> None:
        """step: of all workers of the role."""
        self.prefill, self.step = Fit(PREFILL_PRIOR), step
        self._handoffs: dict[str, Fit] = {}  # by decode worker

    def handoff(self, decode: str) -> tuple[float, ...]:
        """Return the seconds of a hand-off: fixed, and of a byte."""
        fit = self._handoffs.get(decode)
        return HANDOFF_PRIOR if fit is None else fit.coefficients

    def learn(self, measured: Measured, handoffs: Sequence[tuple[str, PrefillTimes]]) -> None:
        """Learn from the worker's measurements. handoffs: of its prompts, with the decode workers."""
        for times in measured.prefills:
            num_new = times.num_new_tokens
            self.prefill.learn(times.used_s, 1.0, num_new, num_new * (times.num_tokens - 0.5 * num_new))
        for each in measured.steps:
            quantities = each.num_sequences, each.num_context_tokens, each.num_new_tokens
            self.step.learn(each.step_s, 1.0, *quantities)
        for decode, times in handoffs:
            if decode not in self._handoffs:
                self._handoffs[decode] = Fit(HANDOFF_PRIOR)
            self._handoffs[decode].learn(times.exposed_s, 1.0, times.moved_bytes)
        for fit in (self.prefill, *self._handoffs.values()):
            fit.settle()


class Account:
    """The load of one worker, as the router counts it: see WorkerInFlight."""

    __slots__ = (
        *("bit", "computing_tokens", "given", "id", "num_attempts", "num_computing", "num_decoding"),
        *("num_output_tokens", "num_tokens", "peer", "since_s", "slots", "speeds", "work_s", "worker"),
    )

    def __init__(self, peer: LightWorker, bit: int, now_s: float, speeds: LightSpeeds) -> None:
        self.peer, self.bit, self.worker, self.id = peer, bit, peer.worker, peer.worker.id
        self.speeds = speeds
        self.given = DecayedSum(BALANCE_S, now_s)  # tokens of prompts
        self.slots = max(1, self.worker.num_pages * self.worker.page_size)
        self.num_attempts = self.num_tokens = self.num_computing = self.computing_tokens = 0
        self.num_decoding = self.num_output_tokens = 0
        self.work_s = self.since_s = 0.0

    def wait_s(self, now_s: float) -> float:
        """See WorkerInFlight."""
        if not self.num_computing:
            return 0.0
        return self.work_s - min(now_s - self.since_s, self.work_s / self.num_computing)

    def has_slot(self, now_s: float) -> bool:
        """See Capacity in router/queue/admission.py."""
        if self.num_computing < MIN_COMPUTING or self.computing_tokens < STEP_TOKENS:
            return True
        return self.wait_s(now_s) < AHEAD_S

    def has_room(self, num_tokens: int) -> bool:
        """See Capacity."""
        if not self.num_attempts:
            return True
        if self.num_attempts >= self.worker.max_num_seqs * OVERCOMMIT:
            return False
        return self.num_tokens + num_tokens <= self.slots * OVERCOMMIT

    def room_s(self, num_tokens: int, step_s: float) -> float:
        """Seconds until there is room for so many tokens: see `PromptScorer.decode_candidates`."""
        share = (self.num_tokens + num_tokens) / self.slots
        excess = max(share, (self.num_attempts + 1) / max(1, self.worker.max_num_seqs)) - 1.0
        return excess * EXPECTED_OUTPUT_TOKENS * step_s if excess > 0.0 else 0.0


class _Prompt(NamedTuple):
    total_s: float
    compute_s: float
    num_new: int
    account: Account


class _Decode(NamedTuple):
    """Seconds of decoding: with the prompt from elsewhere, and what a prompt computed here costs beside."""

    total_s: float
    account: Account
    room_s: float
    delay_s: float
    patience_s: float


_Candidate = tuple[float, _Prompt, Account]


class _Entry(NamedTuple):
    computed_by: Account
    decode: Account
    num_tokens: int
    num_output: int
    num_new: int
    compute_s: float


class LightRouter:
    """Chooses the workers of each request of one tenant."""

    def __init__(
        self, clock: Clock, num_held: Callable[[Request], Mapping[int, int]], token_bytes: float, seed: int
    ) -> None:
        """num_held: tokens of a prompt that workers hold, by the workers' bits. token_bytes: of pages."""
        self._clock = clock
        self._token_bytes = token_bytes
        self._num_held = num_held
        self._random = Random(seed)
        self._steps = {role: StepFit(Fit(STEP_PRIOR)) for role in WorkerRole}
        self._arrivals = Arrivals(clock.now_s())
        self._prefills: list[Account] = []
        self._decodes: list[Account] = []
        self._queue: deque[Request] = deque()
        self._entries: dict[str, _Entry] = {}
        self._by_bit: dict[int, Account] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def join(self, peer: LightWorker) -> int:
        """Add a worker; return its bit."""
        role = peer.worker.role
        account = Account(peer, 1 << len(self._by_bit), self._clock.now_s(), LightSpeeds(self._steps[role]))
        self._by_bit[account.bit] = account
        (self._prefills if role is WorkerRole.PREFILL else self._decodes).append(account)
        return account.bit

    def submit(self, request: Request) -> None:
        """Dispatch a request, or queue it."""
        self._queue.append(request)
        self._dispatch()

    def measured(self, bit: int, measured: Measured, handoffs: Sequence[tuple[str, PrefillTimes]]) -> None:
        """Learn from a worker's measurements. handoffs: of its prompts, with the decode workers."""
        self._by_bit[bit].speeds.learn(measured, handoffs)

    def started(self, request_id: str) -> None:
        """Take the first token of a request."""
        entry = self._entries[request_id]
        account, decode = entry.computed_by, entry.decode
        account.num_computing -= 1
        account.since_s = self._clock.now_s()
        account.work_s = max(0.0, account.work_s - entry.compute_s) if account.num_computing else 0.0
        account.computing_tokens -= entry.num_new
        if account is not decode:
            account.num_attempts -= 1
        decode.num_decoding += 1
        decode.num_output_tokens += entry.num_output
        if self._queue:
            self._dispatch()

    def ended(self, request_id: str) -> None:
        """Take the end of a request."""
        entry = self._entries.pop(request_id)
        decode = entry.decode
        decode.num_attempts -= 1
        decode.num_tokens -= entry.num_tokens
        decode.num_decoding -= 1
        decode.num_output_tokens -= entry.num_output
        if self._queue:
            self._dispatch()

    def _dispatch(self) -> None:
        now_s = self._clock.now_s()
        while self._queue:
            is_full = not any(each.has_slot(now_s) for each in self._prefills or self._decodes)
            if is_full and not any(each.has_slot(now_s) for each in self._decodes):
                return
            request = self._queue[0]
            entry = self._choose(request, now_s, needs_slot=is_full)
            if entry is None:
                return
            self._queue.popleft()
            self._enter(request, entry, now_s)
            entry.computed_by.peer.take(request, entry.decode.peer)

    def _enter(self, request: Request, entry: _Entry, now_s: float) -> None:
        account, decode = entry.computed_by, entry.decode
        self._entries[request.request_id] = entry
        decode.num_attempts += 1
        decode.num_tokens += entry.num_tokens
        if account is not decode:
            account.num_attempts += 1
        if not account.num_computing:
            account.since_s = now_s
        account.num_computing += 1
        account.work_s += entry.compute_s
        account.computing_tokens += entry.num_new
        account.given.add(request.num_tokens, now_s)
        self._arrivals.add(account.id, entry.compute_s, now_s)

    def _choose(self, request: Request, now_s: float, *, needs_slot: bool) -> _Entry | None:
        """Return the cheapest pair; None where no decode worker has room, or the best has no slot.

        needs_slot: the prompt waits for a slot, since no prefill worker has one.
        """
        num_tokens = request.num_tokens
        num_output = min(EXPECTED_OUTPUT_TOKENS, request.sampling.max_tokens or EXPECTED_OUTPUT_TOKENS)
        held, rate = self._num_held(request), self._arrivals.rate(now_s)
        num_kv = num_tokens + num_output
        accounts = [each for each in self._compared(self._decodes, held) if each.has_room(num_kv)]
        if not accounts:
            return None
        prefills = self._compared(self._prefills, held)
        prompts = [self._prompt(each, num_tokens, held, rate, now_s) for each in prefills]
        decodes = [self._decode(each, num_tokens, num_output, now_s) for each in accounts]
        candidates = self._local_candidates(decodes, num_tokens, held, rate, now_s)
        candidates += self._remote_candidates(prompts, decodes, num_tokens, held)
        placed = [each for each in candidates if each[1].account is not each[2] or each[2].has_slot(now_s)]
        _, prompt, decode = self._cheapest(placed or candidates, now_s)
        if needs_slot and not prompt.account.has_slot(now_s):
            return None
        return _Entry(prompt.account, decode, num_kv, num_output, prompt.num_new, prompt.compute_s)

    def _local_candidates(
        self, decodes: Sequence[_Decode], num_tokens: int, held: Mapping[int, int], rate: float, now_s: float
    ) -> list[_Candidate]:
        """See `local_pair` in router/policies/candidates.py."""
        found: list[_Candidate] = []
        for _, account, room_s, delay_s, patience_s in decodes:
            prompt = self._prompt(account, num_tokens, held, rate, now_s)
            stalled_s = account.num_decoding * min(prompt.compute_s, patience_s)
            found.append((prompt.total_s + room_s + delay_s + stalled_s, prompt, account))
        found.sort(key=_TOTAL)
        return found[:MAX_COMBINED]

    def _remote_candidates(
        self, prompts: list[_Prompt], decodes: list[_Decode], num_tokens: int, held: Mapping[int, int]
    ) -> list[_Candidate]:
        """See `remote_pair` in router/policies/candidates.py."""
        if not prompts:
            return []
        best = sorted(prompts, key=_TOTAL)[:MAX_COMBINED]
        found: list[_Candidate] = []
        for decode in sorted(decodes, key=_TOTAL)[:MAX_COMBINED]:
            account = decode.account
            num_bytes = max(0, num_tokens - held.get(account.bit, 0)) * self._token_bytes
            for prompt in best:
                fixed_s, byte_s = prompt.account.speeds.handoff(account.id)
                total_s = prompt.total_s + fixed_s + byte_s * num_bytes + decode.total_s
                found.append((total_s, prompt, account))
        return found

    def _cheapest(self, candidates: Sequence[_Candidate], now_s: float) -> _Candidate:
        """See `cheapest` in router/policies/candidates.py."""
        least_s = min([each[0] for each in candidates])
        tie_s = least_s * TIE
        equals = [each for each in candidates if each[0] <= least_s + tie_s]
        if len(equals) > 1:
            most_s = min([each[1].compute_s for each in equals]) + tie_s
            equals = [each for each in equals if each[1].compute_s <= most_s]
        if len(equals) == 1:
            return equals[0]
        random = self._random.getrandbits(32)
        one, other = equals[random % len(equals)], equals[random // len(equals) % len(equals)]
        if one is other:
            return one
        is_less = other[1].account.given.at(now_s) < one[1].account.given.at(now_s)
        return other if is_less else one

    def _prompt(
        self, account: Account, num_tokens: int, held: Mapping[int, int], rate: float, now_s: float
    ) -> _Prompt:
        """See `prompt_costs` in router/policies/candidates.py."""
        fixed_s, token_s, pair_s = account.speeds.prefill.coefficients
        num_new = max(1, num_tokens - held.get(account.bit, 0))
        compute_s = fixed_s + num_new * (token_s + pair_s * (num_tokens - 0.5 * num_new))
        wait_s = account.wait_s(now_s)
        total_s = wait_s + compute_s + compute_s * (wait_s + compute_s) * rate
        return _Prompt(total_s, compute_s, num_new, account)

    def _decode(self, account: Account, num_tokens: int, num_output: int, now_s: float) -> _Decode:
        """See `PromptScorer.decode_candidates`."""
        fixed_s, sequence_s, context_s, token_s = account.speeds.step.coefficients
        step_s = fixed_s + sequence_s * account.num_attempts + context_s * account.num_tokens
        room_s = account.room_s(num_tokens + num_output, step_s)
        delay_s = account.num_attempts * num_output * (sequence_s + context_s * num_tokens)
        patience_s = inf
        if account.num_decoding:
            longest_s = step_s + token_s * account.worker.max_num_batched_tokens
            mean_left = 0.5 * account.num_output_tokens / account.num_decoding
            patience_s = max(0.0, mean_left * longest_s - account.wait_s(now_s))
        return _Decode(room_s + 0.5 * step_s + delay_s, account, room_s, delay_s, patience_s)

    def _compared(self, accounts: Sequence[Account], held: Mapping[int, int]) -> Sequence[Account]:
        """See CostPolicy: all in an order that begins at random; of very many, those that hold most and some
        drawn at random.
        """
        number = len(accounts)
        first = int(self._random.random() * number)
        if number <= MAX_COMPARED:
            return [*accounts[first:], *accounts[:first]]
        most = sorted(held.items(), key=lambda each: -each[1])[: 2 * MAX_HOLDERS]
        role = accounts[0].worker.role
        found = [each for bit, _ in most if (each := self._by_bit[bit]).worker.role is role][:MAX_HOLDERS]
        drawn = [accounts[int(self._random.random() * number)] for _ in range(NUM_DRAWN)]
        drawn.sort(key=lambda each: (each.work_s, each.num_attempts))
        found += drawn[: MAX_HOLDERS + NUM_KEPT - len(found)]
        return list({each.bit: each for each in found}.values())
