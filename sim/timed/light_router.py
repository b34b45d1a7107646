"""The routing of a fast rehearsal: the choice of the policy `cost`, without messages.

The production router learns what workers hold, and when prompts start and end, from messages; encoding and
applying them takes most of the time of a rehearsal. This router is told both by the simulation. It keeps the
rules: requests wait at the router, in their order, until a decode worker has room and a worker has a slot for
the prompt (router/queue/admission.py); then the pair with the least cost in seconds is chosen
(router/policies/candidates.py), by times that the production cost model learns from the workers' measured
steps and prompts. There are no tenants' shares and no refusals.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from operator import attrgetter
from random import Random
from typing import Final, NamedTuple, Protocol

from baton.clock import Clock
from baton.messages.control import Measured, PullSource
from baton.messages.workers import Worker, WorkerRole
from baton.request import Request
from baton.router.in_flight import EXPECTED_OUTPUT_TOKENS, WorkerInFlight
from baton.router.policies.candidates import (
    DecodeCandidate,
    PairCandidate,
    PrefillCandidate,
    PullCandidate,
    cheapest,
    local_pair,
    prompt_costs,
    remote_pair,
)
from baton.router.policies.cost import (
    BALANCE_S,
    MAX_COMBINED,
    MAX_COMPARED,
    MAX_HOLDERS,
    MAX_SOURCES,
    NUM_DRAWN,
    NUM_KEPT,
    Arrivals,
    DecayedSum,
)
from baton.router.policies.cost_model import (
    HANDOFF_PRIOR,
    PREFILL_PRIOR,
    PULL_PRIOR,
    STEP_PRIOR,
    Fit,
    Speeds,
    StepFit,
)
from baton.router.queue.admission import AHEAD_S, MIN_COMPUTING, OVERCOMMIT, STEP_TOKENS

_TOTAL_S: Final = attrgetter("total_s")


class LightWorker(Protocol):
    """A worker that takes prompts."""

    worker: Worker

    def take(self, request: Request, decode: str, source: PullSource | None) -> None:
        """Compute a prompt, and hand it to `decode` unless that is this worker. source: of a prefix."""
        ...


class Account(WorkerInFlight):
    """The load of one worker, as the router counts it, and the worker's times, as the router learns them."""

    __slots__ = (
        *("bit", "computing_tokens", "given", "handoffs", "id", "num_decoding", "num_output_tokens"),
        *("peer", "pulls", "slots", "speeds", "worker"),
    )

    def __init__(self, peer: LightWorker, bit: int, now_s: float, step: StepFit) -> None:
        """step: of all workers of the role."""
        super().__init__()
        self.peer, self.bit, self.worker, self.id = peer, bit, peer.worker, peer.worker.id
        self.speeds = Speeds(Fit(PREFILL_PRIOR), step)
        self.handoffs: dict[str, Fit] = {}  # by decode worker
        self.pulls: dict[str, Fit] = {}  # by the worker that pulls from this one
        self.given = DecayedSum(BALANCE_S, now_s)  # tokens of prompts
        self.slots = max(1, self.worker.num_pages * self.worker.page_size)
        self.computing_tokens = self.num_decoding = self.num_output_tokens = 0

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


def _transfer_s(fit: Fit | None, prior: tuple[float, ...], num_bytes: float) -> float:
    fixed_s, byte_s = prior if fit is None else fit.coefficients
    return fixed_s + byte_s * num_bytes


class _Entry(NamedTuple):
    computed_by: Account
    decode: Account
    num_tokens: int
    num_output: int
    chosen: PairCandidate


class LightRouter:
    """Chooses the workers of each request of one tenant."""

    def __init__(
        self,
        clock: Clock,
        keys_of: Callable[[Request], Sequence[bytes]],
        page_size: int,
        token_bytes: float,
        seed: int,
    ) -> None:
        """keys_of: returns the keys of a prompt's pages. token_bytes: of pages."""
        self._clock = clock
        self._token_bytes = token_bytes
        self._keys_of = keys_of
        self._page_size = page_size
        self._holders: dict[bytes, int] = {}  # key of a page -> bits of the workers that keep it
        self._random = Random(seed)
        self._steps = {role: StepFit(Fit(STEP_PRIOR)) for role in WorkerRole}
        self._arrivals = Arrivals(clock.now_s())
        self._prefills: list[Account] = []
        self._decodes: list[Account] = []
        self._queue: deque[Request] = deque()
        self._entries: dict[str, _Entry] = {}
        self._chosen: dict[str, PairCandidate] = {}  # until the prompt's times are known
        self._accounts: dict[str, Account] = {}
        self._by_bit: dict[int, Account] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def join(self, peer: LightWorker) -> int:
        """Add a worker; return its bit."""
        role = peer.worker.role
        account = Account(peer, 1 << len(self._by_bit), self._clock.now_s(), self._steps[role])
        self._accounts[account.id] = self._by_bit[account.bit] = account
        (self._prefills if role is WorkerRole.PREFILL else self._decodes).append(account)
        return account.bit

    def submit(self, request: Request) -> None:
        """Dispatch a request, or queue it."""
        self._queue.append(request)
        self._dispatch()

    def measured(self, bit: int, measured: Measured) -> None:
        """Learn from a worker's measurements."""
        account = self._by_bit[bit]
        for step in measured.steps:
            account.speeds.learn_step(step)
        for prefill in measured.prefills:
            account.speeds.learn_prefill(prefill)
            chosen = self._chosen.pop(prefill.request_id)
            if chosen.prefill:
                fit = account.handoffs.setdefault(chosen.decode, Fit(HANDOFF_PRIOR))
                fit.learn(prefill.exposed_s, 1.0, prefill.moved_bytes)
            if prefill.pulled_bytes:
                fit = self._accounts[chosen.source].pulls.setdefault(account.id, Fit(PULL_PRIOR))
                fit.learn(prefill.pulled_s, 1.0, prefill.pulled_bytes)
                fit.settle()
        for fit in (account.speeds.prefill, *account.handoffs.values()):
            fit.settle()

    def kept(self, changes: Sequence[tuple[bytes, int]], bit: int) -> None:
        """Note pages that a worker keeps, or no longer: see `PageStore.keep`."""
        holders = self._holders
        for key, page in changes:
            if page >= 0:
                holders[key] = holders.get(key, 0) | bit
            else:
                holders[key] &= ~bit

    def started(self, request_id: str) -> None:
        """Take the first token of a request."""
        entry = self._entries[request_id]
        account, decode = entry.computed_by, entry.decode
        account.num_computing -= 1
        account.since_s = self._clock.now_s()
        compute_s = entry.chosen.prompt_cost.compute_s
        account.work_s = max(0.0, account.work_s - compute_s) if account.num_computing else 0.0
        account.computing_tokens -= entry.chosen.num_new_tokens
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
            entry.computed_by.peer.take(request, entry.decode.id, self._source(entry.chosen))

    def _enter(self, request: Request, entry: _Entry, now_s: float) -> None:
        account, decode, compute_s = entry.computed_by, entry.decode, entry.chosen.prompt_cost.compute_s
        self._entries[request.request_id], self._chosen[request.request_id] = entry, entry.chosen
        decode.num_attempts += 1
        decode.num_tokens += entry.num_tokens
        if account is not decode:
            account.num_attempts += 1
        if not account.num_computing:
            account.since_s = now_s
        account.num_computing += 1
        account.work_s += compute_s
        account.computing_tokens += entry.chosen.num_new_tokens
        account.given.add(request.num_tokens, now_s)
        self._arrivals.add(account.id, compute_s, now_s)

    def _choose(self, request: Request, now_s: float, *, needs_slot: bool) -> _Entry | None:
        """Return the cheapest pair; None where no decode worker has room, or the best has no slot.

        needs_slot: the prompt waits for a slot, since no prefill worker has one.
        """
        num_tokens = request.num_tokens
        num_output = min(EXPECTED_OUTPUT_TOKENS, request.sampling.max_tokens or EXPECTED_OUTPUT_TOKENS)
        held, num_kv = self._num_held(self._keys_of(request)), num_tokens + num_output
        accounts = [each for each in self._compared(self._decodes, held) if each.has_room(num_kv)]
        if not accounts:
            return None
        prefills = [_prefill(each, held, now_s) for each in self._compared(self._prefills, held)]
        decodes = [_decode(each, _prefill(each, held, now_s), num_tokens, num_output) for each in accounts]
        candidates = self._candidates(decodes, prefills, num_tokens, now_s)
        placed = [each for each in candidates if each.prefill or self._accounts[each.decode].has_slot(now_s)]
        random = self._random.getrandbits(32)
        chosen = cheapest(placed or candidates, random, lambda id_: self._accounts[id_].given.at(now_s))
        computed_by = self._accounts[chosen.computed_by]
        if needs_slot and not computed_by.has_slot(now_s):
            return None
        return _Entry(computed_by, self._accounts[chosen.decode], num_kv, num_output, chosen)

    def _candidates(
        self,
        decodes: Sequence[DecodeCandidate],
        prefills: Sequence[PrefillCandidate],
        num_tokens: int,
        now_s: float,
    ) -> list[PairCandidate]:
        """See CostPolicy."""
        rate, locals_ = self._arrivals.rate(now_s), [each.as_prefill for each in decodes]
        sources = self._sources([*locals_, *prefills])
        local_costs = prompt_costs(locals_, num_tokens, sources, rate)
        candidates = sorted(map(local_pair, local_costs, decodes), key=_TOTAL_S)[:MAX_COMBINED]
        best = sorted(prompt_costs(prefills, num_tokens, sources, rate), key=_TOTAL_S)[:MAX_COMBINED]
        for decode in sorted(decodes, key=_TOTAL_S)[:MAX_COMBINED] if best else ():
            num_bytes = max(0, num_tokens - decode.as_prefill.num_held_tokens) * self._token_bytes
            for cost in best:
                fit = self._accounts[cost.candidate.worker].handoffs.get(decode.as_prefill.worker)
                handoff_s = _transfer_s(fit, HANDOFF_PRIOR, num_bytes)
                candidates.append(remote_pair(cost, decode, handoff_s))
        return candidates

    def _sources(self, prefills: Sequence[PrefillCandidate]) -> list[PullCandidate]:
        """See `PromptScorer.sources`."""
        least = min([each.num_held_tokens for each in prefills])
        able = [each for each in prefills if each.num_held_tokens > least]
        able.sort(key=lambda each: (each.num_held_tokens, each.worker), reverse=True)
        return [
            PullCandidate(each.worker, each.num_held_tokens, partial(self._pull_s, each.worker))
            for each in able[:MAX_SOURCES]
        ]

    def _pull_s(self, source: str, worker: str, num_tokens: int) -> float:
        fit = self._accounts[source].pulls.get(worker)
        return _transfer_s(fit, PULL_PRIOR, num_tokens * self._token_bytes)

    def _source(self, chosen: PairCandidate) -> PullSource | None:
        """Return where a worker pulls a prefix from."""
        if not chosen.source:
            return None
        return PullSource.by_keys(self._accounts[chosen.source].worker, chosen.num_held_tokens)

    def _num_held(self, keys: Sequence[bytes]) -> dict[int, int]:
        """Return the leading tokens that workers hold, by the bits of those that hold any."""
        found: dict[int, int] = {}
        before = -1
        for number, key in enumerate((*keys, b"")):
            holders = self._holders.get(key, 0) & before
            if holders != before and number:
                left = before ^ holders
                while left:
                    bit = left & -left
                    found[bit] = number * self._page_size
                    left ^= bit
            if not holders:
                break
            before = holders
        return found

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


def _prefill(account: Account, held: Mapping[int, int], now_s: float) -> PrefillCandidate:
    num_held, coefficients = held.get(account.bit, 0), account.speeds.prefill.coefficients
    return PrefillCandidate(account.id, account.wait_s(now_s), num_held, coefficients)


def _decode(account: Account, prefill: PrefillCandidate, num_tokens: int, num_output: int) -> DecodeCandidate:
    """See `PromptScorer.decode_candidates`. prefill: the same worker."""
    fixed_s, sequence_s, context_s, token_s = account.speeds.step.coefficients
    step_s = fixed_s + sequence_s * account.num_attempts + context_s * account.num_tokens
    room_s = account.room_s(num_tokens + num_output, step_s)
    delay_s = account.num_attempts * num_output * (sequence_s + context_s * num_tokens)
    patience_s = inf
    if account.num_decoding:
        longest_s = step_s + token_s * account.worker.max_num_batched_tokens
        mean_left = 0.5 * account.num_output_tokens / account.num_decoding
        patience_s = max(0.0, mean_left * longest_s - prefill.wait_s)
    return DecodeCandidate(prefill, account.num_decoding, room_s, room_s + 0.5 * step_s, delay_s, patience_s)
