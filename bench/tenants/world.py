"""Tenants' calls on simulated workers, by the production router, its queues and its cost model.

Prefill workers compute prompts in chunks; which comes first follows the shares of tenants, as in the engine.
Clients behave as openai-python does: what is refused with a time comes again after it, twice at most.
"""

from collections.abc import Callable, Iterable
from functools import cache
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Final

import msgspec

from baton.bench.router.world import DecodeSim, Job, Machine, PrefillSim, SimWorker, World
from baton.clock import ManualClock
from baton.config.router import RouterConfig
from baton.fair_queue import FairShare
from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import Dispatch, Ended, Hello, Reachable, Rejected, Started, Submit
from baton.messages.workers import Address, Worker, WorkerRole
from baton.request import Request, SamplingParams
from baton.router.router import Router
from baton.rpc.peers import TICK_S, Peer
from baton.tenants import Refusal, SchedulingKey, Sla

# Prefill workers of the simulator that order prompts by the shares of tenants, much as an engine does.


class FairPrefillSim(PrefillSim):
    """A step computes up to a chunk's tokens, of the prompts whose tenants are due first."""

    def __init__(self, world: World, hello: Hello) -> None:
        super().__init__(world, hello)
        self._share = FairShare()
        self._jobs: list[tuple[float, int, _Filling]] = []  # a heap, by their tenants' clocks
        self._num_jobs = count()
        self.is_stepping = False

    def fill(self, message: Dispatch, decode: str) -> None:
        job = self.job_of(message, decode)
        request, share = job.request, self._share
        share.join(request.tenant, request.scheduling_key.weight)
        share.correct(request.tenant, len(request.token_ids))
        tag = share.clock(request.tenant)  # by when its share has it done
        share.leave(request.tenant)
        heappush(self._jobs, (tag, next(self._num_jobs), _Filling(job)))
        self._step()

    def age(self) -> None:
        self._share.age()

    def _step(self) -> None:
        if self.is_stepping or not self._jobs:
            return
        self.is_stepping = True
        machine, now_s = self.world.machine, self.world.now_s()
        first = self._jobs[0][2].job.request
        begun = self._jobs[0][0] - len(first.token_ids) / first.scheduling_key.weight
        self._share.present = max(self._share.present, begun)
        left, step_s, done = machine.chunk_tokens, machine.prefill_s, list[_Filling]()
        while self._jobs and left > 0:
            filling = self._jobs[0][2]
            num_new = filling.compute(left, now_s)
            left -= num_new
            step_s += machine.compute_s(num_new, filling.num_done) - machine.prefill_s
            if filling.num_done == len(filling.job.request.token_ids):
                done.append(filling)
                heappop(self._jobs)
        self.busy_s += step_s
        self.computed_tokens += machine.chunk_tokens - left
        self.world.at(now_s + step_s, lambda: self._stepped(done))

    def _stepped(self, done: Iterable["_Filling"]) -> None:
        self.is_stepping = False
        world = self.world
        for filling in done:
            job = filling.job
            self.tell_times(job, filling.begun_s, len(job.request.token_ids), world.machine.handoff_s)
            world.first_token(job.request, 0, self.worker.id)
            self._hand_off(job)
        self._step()

    def _hand_off(self, job: Job) -> None:
        decode = self.world.worker(job.decode)
        assert isinstance(decode, DecodeSim)
        self.world.at(self.world.now_s() + self.world.machine.handoff_s, lambda: decode.join(job.request))


class _Filling:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.num_done = 0
        self.begun_s = -1.0

    def compute(self, most: int, now_s: float) -> int:
        if self.begun_s < 0:
            self.begun_s = now_s
        num_new = min(most, len(self.job.request.token_ids) - self.num_done)
        self.num_done += num_new
        return num_new


GATEWAY: Final = f"{7:032x}"
MAX_RETRIES: Final = 2  # openai-python's
MAX_HONOURED_S: Final = 120.0  # a longer retry-after is not believed
BACK_OFF_S: Final = 0.5
MAX_BACK_OFF_S: Final = 8.0
NO_ROOM_S: Final = 0.05  # until a gateway asks again by itself
# An 8B model on one H200, by roofline.
H200: Final = Machine(
    prefill_s=2e-3,
    prefill_token_s=2.8e-5,
    prefill_pair_s=4e-10,
    step_s=4e-3,
    step_sequence_s=2e-5,
    step_context_s=2.7e-8,
    kv_token_bytes=2**17,
    handoff_s=2e-3,
    chunk_tokens=512,
)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One that a client makes."""

    at_s: float
    tenant: str
    num_tokens: int
    num_answered: int
    sla: Sla = Sla()
    scheduling_key: SchedulingKey = SchedulingKey()
    knows_sla: bool = True  # whether the router is told


class Outcome(msgspec.Struct, kw_only=True):
    """Of one HTTP request."""

    call: Call
    asked_s: float
    retry: int
    first_token_s: float = -1.0
    ended_s: float = -1.0
    refusal: Refusal | None = None
    retry_after_s: float = -1.0
    num_asked: int = 1  # of the router, by the gateway

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.asked_s

    @property
    def is_good(self) -> bool:
        """All objectives met."""
        if self.ended_s < 0:
            return False
        sla, num_later = self.call.sla, max(1, self.call.num_answered - 1)
        tpot_ms = 1e3 * (self.ended_s - self.first_token_s) / num_later
        is_slow = sla.tpot_ms is not None and tpot_ms > sla.tpot_ms
        return not is_slow and (sla.ttft_ms is None or 1e3 * self.ttft_s <= sla.ttft_ms)


class _Gateway:
    """The router's peer that submits, and its clients."""

    silence_s = 0.0

    def __init__(self, world: "TenantWorld") -> None:
        self.hello = Hello(process=Kind.GATEWAY, id=GATEWAY)
        self._world = world

    def send(self, message: AnyMessage) -> None:
        if isinstance(message, Rejected):
            self._world.rejected(message)

    def close(self) -> None:
        raise AssertionError("the router gave up its gateway")


class TenantWorld:
    """See bench/router_workers.World."""

    def __init__(self, num_prefill: int, num_decode: int, machine: Machine = H200, seed: int = 0) -> None:
        self.machine = machine
        self.scale = 1.0
        self.outcomes: list[Outcome] = []
        self.answered: list[tuple[float, str, int]] = []  # when, whose, tokens that were computed or answered
        self.levels: list[tuple[float, int]] = []
        self.waiting_s = self.idle_s = 0.0  # worker-seconds in which anybody waited; of these, idle
        self._random = Random(seed)
        self._clock = ManualClock()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._open: dict[str, Outcome] = {}
        self.router = Router(
            RouterConfig(policy="least-loaded", seed=seed, max_attempts=2**19), self._clock, f"{1:032x}"
        )
        self._gateway = _Gateway(self)
        self.workers: dict[str, SimWorker] = {}
        self._start(num_prefill, num_decode)

    def _start(self, num_prefill: int, num_decode: int) -> None:
        self.router.joined(self._gateway)
        roles = [WorkerRole.PREFILL] * num_prefill + [WorkerRole.DECODE] * num_decode
        for number, role in enumerate(roles):
            worker = Worker(
                id=f"{number + 16:032x}",
                name=f"{role}-{number}",
                role=role,
                model="m",
                fingerprint="f",
                address=Address("127.0.0.1", 1000 + number),
                kv_address=Address("127.0.0.1", 3000 + number),
                page_size=16,
                num_pages=58_000,
                max_num_seqs=256,
                max_model_len=2**20,
            )
            hello = Hello(process=Kind.WORKER, id=worker.id, worker=worker)
            is_prefill = role is WorkerRole.PREFILL
            peer: SimWorker = FairPrefillSim(self, hello) if is_prefill else DecodeSim(self, hello)
            peer.is_keeping = False
            self.workers[worker.id] = peer
            self.router.joined(peer)
        peers: list[Peer] = [self._gateway, *self.workers.values()]
        for each in peers:
            self.router.received(each, Reachable(workers=tuple(self.workers)))

    # What the workers call.

    def now_s(self) -> float:
        return self._clock.now_s()

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        heappush(self._events, (when_s, next(self._numbers), call))

    def tell_router(self, worker: SimWorker, message: AnyMessage) -> None:
        self.router.received(worker, message)

    def worker(self, worker_id: str) -> SimWorker:
        return self.workers[worker_id]

    def keys_of(self, request: Request) -> tuple[bytes, ...]:
        return ()

    def num_output_tokens(self, request: Request) -> int:
        most = request.sampling.max_tokens
        asked = self._open[request.request_id].call.num_answered
        return asked if most is None else min(most, asked)

    def first_token(self, request: Request, num_held_tokens: int, computer: str) -> None:
        self._open[request.request_id].first_token_s = self.now_s()
        self.answered.append((self.now_s(), request.tenant, len(request.token_ids)))
        self.router.received(self._gateway, Started(attempts=((request.request_id, request.attempt),)))

    def ended(self, request: Request) -> None:
        outcome = self._open.pop(request.request_id)
        outcome.ended_s = self.now_s()
        num_tokens = outcome.call.num_answered
        self.answered.append((self.now_s(), request.tenant, num_tokens))
        key = (request.request_id, request.attempt)
        for worker in self.workers.values():
            worker.attempts.pop(key, None)
        self.router.received(self._gateway, Ended(attempts=(key,), num_tokens=(num_tokens,)))

    # Clients.

    def _ask(self, call: Call, retry: int) -> None:
        request_id = f"{next(self._numbers):032x}"
        outcome = Outcome(call=call, asked_s=self.now_s(), retry=retry)
        self._open[request_id] = outcome
        self.outcomes.append(outcome)
        self._submit(request_id, 0)

    def _submit(self, request_id: str, attempt: int) -> None:
        call = self._open[request_id].call
        request = Request(
            request_id=request_id,
            token_ids=_tokens(call.num_tokens),
            sampling=SamplingParams(max_tokens=4 * call.num_answered),
            tenant=call.tenant,
            sla=call.sla if call.knows_sla else Sla(),
            scheduling_key=call.scheduling_key,
            attempt=attempt,
        )
        self.router.received(self._gateway, Submit(request=request))

    def rejected(self, rejected: Rejected) -> None:
        outcome = self._open[rejected.request_id]
        if rejected.refusal is Refusal.NO_ROOM:
            outcome.num_asked += 1
            request_id, attempt = rejected.request_id, rejected.attempt + 1
            self.at(self.now_s() + NO_ROOM_S, lambda: self._submit(request_id, attempt))
            return
        del self._open[rejected.request_id]
        outcome.refusal, outcome.retry_after_s = rejected.refusal, rejected.retry_after_s
        if outcome.retry < MAX_RETRIES and rejected.may_return:
            wait_s = self._client_waits_s(rejected.retry_after_s, outcome.retry)
            self.at(self.now_s() + wait_s, lambda: self._ask(outcome.call, outcome.retry + 1))

    def _client_waits_s(self, retry_after_s: float, retry: int) -> float:
        if retry_after_s <= MAX_HONOURED_S:
            return retry_after_s
        back_off_s = min(BACK_OFF_S * 2.0**retry, MAX_BACK_OFF_S)
        return back_off_s * (1 - 0.25 * self._random.random())

    # The run.

    def run(self, calls: Iterable[Call], until_s: float) -> None:
        """All calls, and what follows from them until then."""
        for call in calls:
            self.at(call.at_s, lambda call=call: self._ask(call, 0))  # type: ignore[misc]
        self.at(TICK_S, self._tick)
        prefills = [each for each in self.workers.values() if isinstance(each, FairPrefillSim)]
        while self._events and self._events[0][0] <= until_s:
            when_s, _, happen = heappop(self._events)
            passed_s = max(0.0, when_s - self.now_s())
            if len(self.router.admission_queue):
                self.waiting_s += passed_s * len(prefills)
                self.idle_s += passed_s * sum(not each.is_stepping for each in prefills)
            self._clock.advance(passed_s)
            happen()

    def _tick(self) -> None:
        for worker in self.workers.values():
            self.router.received(worker, worker.beat())
            if isinstance(worker, FairPrefillSim):
                worker.age()
        self.router.tick()
        self.levels.append((self.now_s(), int(self.router.admission_queue.overload.level)))
        self.at(self.now_s() + TICK_S, self._tick)


@cache
def _tokens(num_tokens: int) -> tuple[int, ...]:
    return (1,) * num_tokens
