"""The routing of a fast rehearsal: the choice of the policy `cost`, from what the simulation knows.

The production router learns the speeds of workers, and what they hold, from messages; that takes most of the
time of a rehearsal. This router reads both from the simulation itself. It keeps the rules: requests wait at
the router, in their order, until a decode worker has room and a worker has a slot for the prompt
(router/queue/admission.py); then the pair with the least cost in seconds is chosen
(router/policies/candidates.py). There are no tenants' shares, no refusals and no pulls from peers.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from random import Random
from typing import Final, NamedTuple, Protocol

import numpy as np

from baton.clock import Clock
from baton.messages.workers import Worker, WorkerRole
from baton.request import Request
from baton.router.in_flight import EXPECTED_OUTPUT_TOKENS
from baton.router.policies.candidates import TIE
from baton.router.policies.cost import MAX_COMBINED, MAX_COMPARED, MAX_HOLDERS, MEMORY_S, MOST_BUSY, NUM_DRAWN
from baton.router.policies.cost_model import solve_nonnegative
from baton.router.queue.admission import AHEAD_S, MIN_COMPUTING, OVERCOMMIT, STEP_TOKENS
from baton.sim.timed.times import StepWork, WorkTimes

LOOKS: Final = 1.5  # steps of a busy decode worker until it has noticed and verified pages
LINEAR_TOKENS: Final = (16, 64, 256, 1024)  # where a time model is made linear


class Speed(NamedTuple):
    """Linear times of a worker: see PREFILL_PRIOR and STEP_PRIOR in router/policies/cost_model.py."""

    prefill_s: float
    token_s: float
    pair_s: float
    step_s: float
    sequence_s: float
    context_s: float
    handoff_s: float


def speed_of(times: WorkTimes, most_tokens: float) -> Speed:
    """Return the linear times that are nearest to a time model, within a step of so many tokens."""
    sizes = [each for each in LINEAR_TOKENS if each <= most_tokens] or [max(1, int(most_tokens))]
    prompts = [(each, each * (start + each / 2)) for each in sizes for start in (0, 1024)]
    prompt_s = [times.step_s(StepWork(1, 0, num_new, pairs)) for num_new, pairs in prompts]
    batches = [(number, number * context) for number in (1, 4, 16, 48) for context in (64, 512)]
    batch_s = [times.step_s(StepWork(number, context, 0, 0.0)) for number, context in batches]
    prompt, step = _linear(prompts, prompt_s), _linear(batches, batch_s)
    return Speed(*prompt, *step, times.handoff_s(sizes[-1]))


def _linear(points: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float, float]:
    columns = np.array([(1.0, *point) for point in points]) / np.array(seconds)[:, None]
    scales = np.maximum(columns.max(axis=0), 1e-12)
    squares = (columns / scales).T @ (columns / scales)
    squares += 1e-9 * np.eye(len(squares))
    solved = solve_nonnegative(squares, (columns / scales).sum(axis=0))
    fixed, first, second = (float(each) for each in solved / scales)
    return fixed, first, second


class LightWorker(Protocol):
    """A worker that takes prompts."""

    worker: Worker

    def take(self, request: Request, decode: "LightWorker") -> None:
        """Compute a prompt, and hand it over unless `decode` is this worker."""
        ...


class Account:
    """The load of one worker, as the router counts it: see WorkerInFlight."""

    __slots__ = (
        *("bit", "computing_tokens", "num_attempts", "num_computing", "num_decoding", "num_tokens"),
        *("num_output_tokens", "peer", "since_s", "slots", "speed", "work_s", "worker"),
    )

    def __init__(self, peer: LightWorker, speed: Speed, bit: int) -> None:
        self.peer, self.speed, self.bit, self.worker = peer, speed, bit, peer.worker
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

    def step_s(self) -> float:
        """Seconds of a step of the present batch."""
        speed = self.speed
        return speed.step_s + speed.sequence_s * self.num_attempts + speed.context_s * self.num_tokens


class _Prompt(NamedTuple):
    total_s: float
    compute_s: float
    num_new: int
    account: Account


class _Entry(NamedTuple):
    computed_by: Account
    decode: Account
    num_tokens: int
    num_output: int
    num_new: int
    compute_s: float


class LightRouter:
    """Chooses the workers of each request of one tenant."""

    def __init__(self, clock: Clock, num_held: Callable[[Request], Mapping[int, int]], seed: int) -> None:
        """num_held: tokens of a prompt that workers hold, by the workers' bits."""
        self._clock = clock
        self._num_held = num_held
        self._random = Random(seed)
        self._prefills: list[Account] = []
        self._decodes: list[Account] = []
        self._queue: deque[Request] = deque()
        self._entries: dict[str, _Entry] = {}
        self._by_bit: dict[int, Account] = {}
        self._arrivals = self._work_s = 0.0  # of prompts, over MEMORY_S
        self._arrived_s = 0.0

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def join(self, peer: LightWorker, speed: Speed) -> int:
        """Add a worker; return its bit."""
        account = Account(peer, speed, 1 << len(self._by_bit))
        self._by_bit[account.bit] = account
        is_prefill = peer.worker.role is WorkerRole.PREFILL
        (self._prefills if is_prefill else self._decodes).append(account)
        return account.bit

    def submit(self, request: Request) -> None:
        """Dispatch a request, or queue it."""
        self._queue.append(request)
        self._dispatch()

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
            computing = self._prefills + self._decodes
            if not any(each.has_slot(now_s) for each in computing):
                return
            request = self._queue[0]
            entry = self._choose(request, now_s)
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
        self._fade(now_s)
        self._arrivals += 1.0
        self._work_s += entry.compute_s

    def _fade(self, now_s: float) -> None:
        kept = max(0.0, 1.0 - (now_s - self._arrived_s) / MEMORY_S)
        self._arrivals *= kept
        self._work_s *= kept
        self._arrived_s = now_s

    def _rate(self, now_s: float) -> float:
        """Prompts a second that a worker receives, and more where these delay others in turn."""
        self._fade(now_s)
        number = len(self._prefills) or len(self._decodes)
        busy = min(MOST_BUSY, self._work_s / number / MEMORY_S)
        return self._arrivals / number / MEMORY_S / (1 - busy)

    def _choose(self, request: Request, now_s: float) -> _Entry | None:
        """Return the cheapest pair; None where no decode worker has room, or the best has no slot."""
        num_tokens, random = request.num_tokens, self._random
        num_output = min(EXPECTED_OUTPUT_TOKENS, request.sampling.max_tokens or EXPECTED_OUTPUT_TOKENS)
        held, rate = self._num_held(request), self._rate(now_s)
        num_kv = num_tokens + num_output
        decodes = [each for each in self._compared(self._decodes, held) if each.has_room(num_kv)]
        if not decodes:
            return None
        prefills = self._compared(self._prefills, held)
        costs = [self._prompt(each, num_tokens, held, rate, now_s) for each in prefills]
        costs = sorted(costs, key=itemgetter(0))[:MAX_COMBINED]
        candidates: list[tuple[float, _Prompt, Account]] = []
        joins = []
        for decode in decodes:
            speed, step_s, num_running = decode.speed, decode.step_s(), decode.num_attempts
            delay_s = num_running * num_output * (speed.sequence_s + speed.context_s * num_tokens)
            looks_s = LOOKS * step_s if decode.num_decoding else 0.0
            joins.append((0.5 * step_s + looks_s + delay_s, decode.bit, decode))
            local = self._prompt(decode, num_tokens, held, rate, now_s)
            stalled_s = decode.num_decoding * local.compute_s
            if decode.has_slot(now_s) or not costs:
                candidates.append((local.total_s + delay_s + stalled_s, local, decode))
        for join_s, _, decode in sorted(joins, key=itemgetter(0))[:MAX_COMBINED]:
            for cost in costs:
                total_s = cost.total_s + cost.account.speed.handoff_s + join_s
                candidates.append((total_s, cost, decode))
        _, prompt, decode = self._cheapest(candidates, random)
        if not prompt.account.has_slot(now_s):
            return None
        return _Entry(prompt.account, decode, num_kv, num_output, prompt.num_new, prompt.compute_s)

    def _cheapest(
        self, candidates: Sequence[tuple[float, _Prompt, Account]], random: Random
    ) -> tuple[float, _Prompt, Account]:
        """See `cheapest` in router/policies/candidates.py."""
        least_s = min([each[0] for each in candidates])
        tie_s = least_s * TIE
        equals = [each for each in candidates if each[0] <= least_s + tie_s]
        if len(equals) > 1:
            most_s = min(each[1].compute_s for each in equals) + tie_s
            equals = [each for each in equals if each[1].compute_s <= most_s]
        return equals[0] if len(equals) == 1 else random.choice(equals)

    def _prompt(
        self, account: Account, num_tokens: int, held: Mapping[int, int], rate: float, now_s: float
    ) -> _Prompt:
        """See `prompt_costs` in router/policies/candidates.py."""
        speed = account.speed
        num_new = max(1, num_tokens - held.get(account.bit, 0))
        compute_s = speed.prefill_s + num_new * (speed.token_s + speed.pair_s * (num_tokens - 0.5 * num_new))
        wait_s = account.wait_s(now_s) if account.num_computing else 0.0
        total_s = wait_s + compute_s + compute_s * (wait_s + compute_s) * rate
        return _Prompt(total_s, compute_s, num_new, account)

    def _compared(self, accounts: Sequence[Account], held: Mapping[int, int]) -> Sequence[Account]:
        """See CostPolicy: of very many workers, those that hold most and some drawn at random."""
        number = len(accounts)
        if number <= MAX_COMPARED:
            return accounts
        most = sorted(held.items(), key=lambda each: -each[1])[: 2 * MAX_HOLDERS]
        role = accounts[0].worker.role
        holders = [each for bit, _ in most if (each := self._by_bit[bit]).worker.role is role][:MAX_HOLDERS]
        drawn = [accounts[int(self._random.random() * number)] for _ in range(NUM_DRAWN)]
        drawn.sort(key=lambda each: (each.work_s, each.num_attempts))
        return list({each.bit: each for each in (*holders, *drawn[:2])}.values())
