"""A cluster whose number of workers changes, request by request, fast: tens of thousands of requests a
second.

A rehearsal (sim/rehearsal.py) runs the production router over a fixed fleet. Sizing a cluster over days, as
bench/planner.py does, needs neither pages nor messages but workers that start, end and change their role:

1. Prompts wait in order of arrival for the first free prefill worker, which computes one at a time.
2. A sequence joins the decode worker with the fewest sequences that has room, else it waits. All sequences
   of a worker get a token a step; between two changes steps are equally long, so they are computed at once.
3. `scale` orders workers: each serves after its start-up. A removed prefill worker ends its prompt, the
   sequences of a removed decode worker migrate. A worker is paid for from its order to its end.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Final

import msgspec

from baton.sim.process import Events
from baton.sim.timed.times import Machine

FLIP_S: Final = 2.0  # until a worker serves in its other role
FULL_TOKENS: Final = 1_000_000  # of KV, in a decode worker
FULL_SEQS: Final = 256


class ElasticCall(msgspec.Struct, kw_only=True):
    """A request, and its course. Moments are negative before they have come."""

    at_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    tenant: str = ""
    first_token_s: float = -1.0
    ended_s: float = -1.0

    def meets(self, ttft_s: float, tpot_s: float) -> bool:
        """Return whether the request has ended within both objectives."""
        if self.ended_s < 0:
            return False
        tpot = (self.ended_s - self.first_token_s) / max(1, self.output_tokens - 1)
        return self.first_token_s - self.at_s <= ttft_s and tpot <= tpot_s


class _Worker:
    """A worker from its order to its end."""

    def __init__(self, role: str, ordered_s: float) -> None:
        self.role = role
        self.ordered_s = ordered_s
        self.is_ready = self.is_leaving = False
        self.becomes = ""  # its role after its present work; "": it ends
        # Of a decode worker:
        self.running: list[tuple[float, int, ElasticCall]] = []  # heap by the step of the last token
        self.num_steps = 0.0
        self.num_context = 0
        self.step_s = 0.0
        self.seen_s = ordered_s
        self.version = 0


class ElasticFleet:
    """Workers of both roles on a virtual clock."""

    def __init__(
        self,
        machine: Machine,
        num_prefill: int,
        num_decode: int,
        startup_s: Callable[[], float],
        max_seqs: int = FULL_SEQS,
        max_tokens: int = FULL_TOKENS,
    ) -> None:
        """The first workers are ready. startup_s: draws the start-up of each later one."""
        self.events = Events()
        self.worker_s = 0.0  # of workers that have ended; see `paid_s`
        self.num_orders = 0  # workers added, removed and flipped
        self.startups_s: list[float] = []  # measured
        self.busy_s = {"prefill": 0.0, "decode": 0.0}  # worker-seconds; decode: by the share of its room
        self._machine = machine
        self._startup_s = startup_s
        self._max_seqs, self._max_tokens = max_seqs, max_tokens
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._prompts: deque[ElasticCall] = deque()
        self._sequences: deque[tuple[ElasticCall, float]] = deque()  # wait for room, with the steps to come
        self._serials = count()
        self._num_open = 0
        self._ended: Callable[[ElasticCall], None] = lambda call: None
        for role, number in (("prefill", num_prefill), ("decode", num_decode)):
            for _ in range(number):
                self._workers.append(_Worker(role, 0.0))
                self._ready(self._workers[-1])

    def run(
        self,
        calls: Sequence[ElasticCall],
        control: Callable[[float], None],
        every_s: float,
        ended: Callable[[ElasticCall], None] = lambda call: None,
    ) -> None:
        """Serve all calls, given in order of arrival; until then call `control` every `every_s` seconds."""
        self._ended = ended
        self._num_open = len(calls)
        self._next(iter(calls))
        now_s = 0.0
        while self._num_open:
            now_s += every_s
            self.events.run_until(now_s)
            control(now_s)

    def number(self, role: str, *, only_ready: bool = False) -> int:
        """Return the workers of a role that serve or will serve."""
        return sum(
            (each.becomes or each.role) == role and (bool(each.becomes) or not each.is_leaving)
            for each in self._workers
            if each.is_ready or not only_ready
        )

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a worker."""
        return len(self._prompts) + len(self._sequences)

    @property
    def paid_s(self) -> float:
        """Worker-seconds until now."""
        return self.worker_s + sum(self.events.now_s - each.ordered_s for each in self._workers)

    def scale(self, num_prefill: int, num_decode: int, *, flips: bool = True) -> None:
        """Order this many workers. A role that has too many gives workers to the other one, if `flips`."""
        wanted = {"prefill": num_prefill, "decode": max(1, num_decode)}
        surplus = {role: self.number(role) - number for role, number in wanted.items()}
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            while flips and surplus[role] > 0 and surplus[other] < 0:
                self._remove(role, becomes=other)
                surplus[role] -= 1
                surplus[other] += 1
        for role, number in surplus.items():
            for _ in range(number):
                self._remove(role)
            for _ in range(-number):
                self._add(role)

    def _add(self, role: str) -> None:
        self.num_orders += 1
        worker = _Worker(role, self.events.now_s)
        self._workers.append(worker)
        startup_s = self._startup_s()

        def started() -> None:
            self.startups_s.append(startup_s)
            self._ready(worker)

        self.events.after(startup_s, started)

    def _remove(self, role: str, becomes: str = "") -> None:
        """Take the latest worker of a role away: one that still starts is ended at once."""
        candidates = [each for each in self._workers if each.role == role and not each.is_leaving]
        starting = [each for each in candidates if not each.is_ready]
        worker = starting[-1] if starting and not becomes else candidates[-1]
        self.num_orders += 1
        worker.is_leaving, worker.becomes = True, becomes
        if not worker.is_ready:
            self._left(worker)
        elif role == "decode":
            self._advance(worker)
            moved, worker.running = worker.running, []
            for end, _, call in sorted(moved, key=lambda each: each[:2]):
                self._join(call, max(1.0, end - worker.num_steps))
            self._left(worker)
        elif worker in self._idle:
            self._idle.remove(worker)
            self._left(worker)

    def _left(self, worker: _Worker) -> None:
        if worker.becomes:
            worker.role, worker.becomes, worker.is_leaving = worker.becomes, "", False
            worker.running, worker.num_context, worker.num_steps = [], 0, 0.0
            is_started, worker.is_ready = worker.is_ready, False
            if is_started:
                self.events.after(FLIP_S, lambda: self._ready(worker))
            return
        self._workers.remove(worker)
        self.worker_s += self.events.now_s - worker.ordered_s

    def _ready(self, worker: _Worker) -> None:
        if worker.is_leaving:
            return
        worker.is_ready, worker.seen_s = True, self.events.now_s
        if worker.role == "prefill":
            self._idle.append(worker)
            self._compute()
        else:
            self._admit()

    def _next(self, calls: Iterator[ElasticCall]) -> None:
        call = next(calls, None)
        if call is not None:

            def arrive(arrived: ElasticCall = call) -> None:
                self._prompts.append(arrived)
                self._compute()
                self._next(calls)

            self.events.at(call.at_s, arrive)

    def _compute(self) -> None:
        while self._prompts and self._idle:
            worker, call = self._idle.pop(), self._prompts.popleft()
            num_new = max(1, call.prompt_tokens - call.cached_tokens)
            taken_s = self._machine.compute_s(num_new, call.prompt_tokens)
            self.busy_s["prefill"] += taken_s
            self.events.after(taken_s, partial(self._computed, worker, call))

    def _computed(self, worker: _Worker, call: ElasticCall) -> None:
        call.first_token_s = self.events.now_s
        if worker.is_leaving:
            self._left(worker)
        else:
            self._idle.append(worker)
        if call.output_tokens <= 1:
            self._end(call)
        else:
            self.events.after(
                self._machine.handoff_s(call.prompt_tokens), lambda: self._join(call, call.output_tokens - 1)
            )
        self._compute()

    def _join(self, call: ElasticCall, num_steps: float) -> None:
        room = [each for each in self._workers if each.role == "decode" and each.is_ready]
        room = [each for each in room if not each.is_leaving and self._has_room(each, call)]
        if not room:
            self._sequences.append((call, num_steps))
            return
        worker = min(room, key=lambda each: len(each.running))
        self._advance(worker)
        heapq.heappush(worker.running, (worker.num_steps + num_steps, next(self._serials), call))
        worker.num_context += call.prompt_tokens + call.output_tokens // 2
        self._step(worker)

    def _has_room(self, worker: _Worker, call: ElasticCall) -> bool:
        if not worker.running:
            return True
        fits = worker.num_context + call.prompt_tokens + call.output_tokens // 2 <= self._max_tokens
        return fits and len(worker.running) < self._max_seqs

    def _admit(self) -> None:
        """Let waiting sequences join, in order, until one finds no room."""
        for _ in range(len(self._sequences)):
            call, num_steps = self._sequences.popleft()
            self._join(call, num_steps)
            if self._sequences and self._sequences[-1][0] is call:
                self._sequences.rotate(1)
                return

    def _advance(self, worker: _Worker) -> None:
        now_s = self.events.now_s
        if worker.running:
            worker.num_steps += (now_s - worker.seen_s) / worker.step_s
            used = max(len(worker.running) / self._max_seqs, worker.num_context / self._max_tokens)
            self.busy_s["decode"] += (now_s - worker.seen_s) * used
        worker.seen_s = now_s

    def _step(self, worker: _Worker) -> None:
        """Schedule the next end of a sequence at the present pace."""
        worker.version += 1
        if not worker.running:
            return
        machine = self._machine
        worker.step_s = machine.step_base_s + machine.step_sequence_s * len(worker.running)
        worker.step_s += machine.step_context_s * worker.num_context
        left_s = max(0.0, worker.running[0][0] - worker.num_steps) * worker.step_s
        version = worker.version
        self.events.after(left_s, lambda: self._stepped(worker, version))

    def _stepped(self, worker: _Worker, version: int) -> None:
        if version != worker.version:
            return
        self._advance(worker)
        while worker.running and worker.running[0][0] <= worker.num_steps + 1e-6:
            _, _, call = heapq.heappop(worker.running)
            worker.num_context -= call.prompt_tokens + call.output_tokens // 2
            self._end(call)
        self._step(worker)
        if self._sequences:
            self._admit()

    def _end(self, call: ElasticCall) -> None:
        call.ended_s = self.events.now_s
        self._num_open -= 1
        self._ended(call)
