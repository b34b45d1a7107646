"""A rehearsal: the production router before workers that a time model stands for, on a virtual clock.

The fault simulation (sim/world.py) runs whole workers over a model of numbers, to find wrong tokens. A
rehearsal measures how fast a fleet of large machines serves a load, over hours of virtual time. No bytes
move: a worker is its queue, the keys of its pages and the seconds that its steps take. The router learns of
pages, times and ends by the messages of workers and gateways alone. The same calls and seed give the same
figures.

1. `Rehearsal` joins the router, a gateway peer and workers, and keeps the virtual time. Its clients behave as
   openai-python does: a refused call that was told a time comes again after that time.
2. A prefill worker computes prompts in steps, in the order of their tenants' shares, as the engine does, and
   keeps their pages; the least recently used pages leave first.
3. A decode worker steps: every sequence gets a token a step, prompts that it computes itself a chunk.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Final

import msgspec

from baton.config.router import RouterConfig
from baton.fair_queue import FairShare
from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import (
    Dispatch,
    Ended,
    Heartbeat,
    Hello,
    KvEventBatch,
    KvEventsWanted,
    Measured,
    Prefill,
    Reachable,
    Rejected,
    Started,
    Submit,
)
from baton.messages.workers import Address, Load, PrefillTimes, StepTimes, Worker, WorkerRole
from baton.pages import KEY_BYTES
from baton.request import AttemptKey, Request, SamplingParams
from baton.router.index.prefix_index import PromptKeys, family_of
from baton.router.policies.candidates import Select
from baton.router.policies.cost import CostPolicy
from baton.router.router import Router
from baton.rpc.peer_clock import SAME_CLOCK, ClockOffset
from baton.rpc.peers import TICK_S, Peer
from baton.sim.process import Events, OffsetClock
from baton.tenants import Refusal, SchedulingKey, Sla
from baton.token_ids import TokenIds

STEPS_A_REPORT: Final = 64
MOST_STEPS_S: Final = 0.1  # decode steps in which nothing changes are simulated together for so long
GATEWAY: Final = f"{7:032x}"
MAX_RETRIES: Final = 2  # openai-python's
MAX_HONOURED_S: Final = 120.0  # a longer retry-after is not believed
BACK_OFF_S: Final = 0.5
MAX_BACK_OFF_S: Final = 8.0
NO_ROOM_S: Final = 0.05  # until a gateway asks again by itself


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The times of work: seconds, of a token unless said otherwise.

    The default is a 70B model on eight A800, by roofline.
    """

    prefill_s: float = 0.01  # of a step
    prefill_token_s: float = 1.2e-4
    prefill_pair_s: float = 2e-9  # of a new token and a token that it attends to
    step_s: float = 0.02
    step_sequence_s: float = 5e-5
    step_context_s: float = 1e-8
    kv_token_bytes: int = 320 * 1024
    transfer_s: float = 5e-3
    transfer_bytes_per_s: float = 10e9
    handoff_s: float = 5e-3  # not hidden behind the prompt's computation
    chunk_tokens: int = 2048  # of a prompt in a decode worker's step
    prefill_chunk_tokens: float = math.inf  # of a prefill worker's step; inf: one whole prompt a step

    def compute_s(self, num_new: int, num_tokens: int) -> float:
        """Return the time of a step that computes `num_new` tokens of a prompt of `num_tokens` so far."""
        pairs = num_new * (num_tokens - num_new / 2)
        return self.prefill_s + num_new * self.prefill_token_s + pairs * self.prefill_pair_s

    def pull_s(self, num_tokens: int) -> float:
        """Return the time to pull the pages of so many tokens."""
        return self.transfer_s + num_tokens * self.kv_token_bytes / self.transfer_bytes_per_s


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
    prefill_chunk_tokens=512,
)


class ClientCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a client makes. Without `knows_sla` its objectives are hidden from the router."""

    at_s: float
    token_ids: tuple[int, ...]
    num_answered: int  # tokens of the answer
    max_tokens: int = 2**20  # all that the router knows of the answer
    tenant: str = ""
    sla: Sla = Sla()
    scheduling_key: SchedulingKey = SchedulingKey()
    knows_sla: bool = True

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class CallOutcome(msgspec.Struct, kw_only=True):
    """The course of one HTTP request. Moments are negative where there was none."""

    call: ClientCall
    asked_s: float
    retry: int = 0
    num_held: int = 0  # tokens of the prompt that were not computed
    first_token_s: float = -1.0
    ended_s: float = -1.0
    refusal: str = ""
    retry_after_s: float = -1.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.asked_s

    @property
    def is_good(self) -> bool:
        """True when the answer met all objectives."""
        if self.ended_s < 0:
            return False
        sla, num_later = self.call.sla, max(1, self.call.num_answered - 1)
        tpot_ms = 1e3 * (self.ended_s - self.first_token_s) / num_later
        is_slow = sla.tpot_ms is not None and tpot_ms > sla.tpot_ms
        return not is_slow and (sla.ttft_ms is None or 1e3 * self.ttft_s <= sla.ttft_ms)


class PageStore:
    """Keys of pages, the least recently used first; a page leaves before its parents."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._pages: OrderedDict[bytes, int] = OrderedDict()  # key -> page id
        self._free = list(range(num_pages))

    def num_held(self, keys: tuple[bytes, ...]) -> int:
        """Return how many leading pages are here."""
        for number, key in enumerate(keys):
            if key not in self._pages:
                return number
        return len(keys)

    def keep(self, keys: tuple[bytes, ...]) -> Iterator[tuple[bytes, int]]:
        """Keep these pages; yield each change as a key and its page, or -1 for a page that left."""
        keys = keys[: self._num_pages]
        new = [key for key in keys if key not in self._pages]
        for key in reversed(keys):
            if key in self._pages:
                self._pages.move_to_end(key)
        while len(self._free) < len(new):
            key, page = self._pages.popitem(last=False)
            self._free.append(page)
            yield key, -1
        for key in reversed(new):
            self._pages[key] = self._free.pop()
            yield key, self._pages[key]


class PromptJob:
    """A prompt at the worker that computes it, with the pages that it pulls under way."""

    def __init__(self, worker: "RehearsedWorker", order: Dispatch | Prefill, decode: str) -> None:
        cluster, store = worker.cluster, worker.store
        self.request, self.decode = order.request, decode
        self.given_s = self.pulled_s = cluster.events.now_s
        self.begun_s = -1.0
        self.num_tokens = len(self.request.token_ids)
        self.num_held = self.num_done = 0
        self.pulled_bytes = self._num_pulled_tokens = 0
        if order.source is not None:
            keys, page_size = cluster.keys_of(self.request), worker.worker.page_size
            there = cluster.workers[order.source.worker].store.num_held(keys)
            num_pulled = min(there, len(order.source.pages))
            self._num_pulled_tokens = num_pulled * page_size
            num_missing = num_pulled - store.num_held(keys)
            if num_missing > 0:
                num_tokens = round(num_missing * page_size * cluster.scale)
                self.pulled_bytes = num_tokens * cluster.machine.kv_token_bytes
                self.pulled_s += cluster.machine.pull_s(num_tokens)

    @property
    def is_done(self) -> bool:
        return self.num_done >= self.num_tokens

    @property
    def num_new(self) -> int:
        """Tokens of the prompt that are computed, not held or pulled."""
        return self.num_tokens - self.num_held

    def find_held(self, worker: "RehearsedWorker") -> None:
        """Count the leading tokens that need no computation; at least one token is computed."""
        held = worker.store.num_held(worker.cluster.keys_of(self.request)) * worker.worker.page_size
        self.num_held = self.num_done = min(max(held, self._num_pulled_tokens), self.num_tokens - 1)

    def compute(self, most: float, now_s: float) -> int:
        """Compute at most so many tokens, at least one; return how many."""
        if self.begun_s < 0:
            self.begun_s = now_s
        num_new = min(max(1, int(min(most, self.num_tokens))), self.num_tokens - self.num_done)
        self.num_done += num_new
        return num_new


class RehearsedWorker:
    """A worker as a peer of the router."""

    silence_s = quiet_s = 0.0
    clock_offset: ClockOffset | None = SAME_CLOCK

    def __init__(self, cluster: "Rehearsal", hello: Hello) -> None:
        assert hello.worker is not None
        self.cluster = cluster
        self.hello = hello
        self.worker = hello.worker
        self.store = PageStore(self.worker.num_pages)
        self.is_keeping = True  # pages, for later prompts
        self.given_tokens = 0
        self.attempts: dict[AttemptKey, None] = {}  # dispatched here and not ended
        self._num_changes = 0

    def send(self, message: AnyMessage) -> None:
        """Take a message of the router."""
        if isinstance(message, KvEventsWanted):
            events = KvEventBatch(first=0, keys=b"", pages=(), generations=(), is_snapshot=True)
            self.cluster.router.received(self, events)
        elif isinstance(message, Dispatch):
            self.attempts[message.request.request_id, message.request.attempt] = None
            self.dispatched(message)
        elif isinstance(message, Prefill):
            self.prefill(message)

    def close(self) -> None:
        raise AssertionError("the router gave up a worker that is well")

    def dispatched(self, message: Dispatch) -> None:
        """Take an attempt to decode."""
        raise NotImplementedError

    def prefill(self, message: Prefill) -> None:
        """Take a prompt to compute."""
        raise NotImplementedError

    def take_prompt(self, message: Dispatch | Prefill, decode: str) -> PromptJob:
        """Begin to pull what the router says; return the job."""
        self.given_tokens += len(message.request.token_ids)
        return PromptJob(self, message, decode)

    def tick(self) -> None:
        """Send a heartbeat."""
        self.cluster.router.received(self, Heartbeat(load=Load(), attempts=tuple(self.attempts)))

    def keep(self, request: Request) -> None:
        """Keep the request's pages and tell the router."""
        changes = list(self.store.keep(self.cluster.keys_of(request))) if self.is_keeping else []
        if changes:
            events = KvEventBatch(
                first=self._num_changes,
                keys=b"".join(key for key, _ in changes),
                pages=tuple(page for _, page in changes),
                generations=(0,) * len(changes),
            )
            self._num_changes += len(changes)
            self.cluster.router.received(self, events)

    def report_prefill(self, job: PromptJob, exposed_s: float) -> None:
        """Tell the router what a prompt took, in the tokens that the router sees."""
        cluster = self.cluster
        is_remote = job.decode != self.worker.id
        token_bytes = cluster.machine.kv_token_bytes * cluster.scale
        times = PrefillTimes(
            job.request.request_id,
            job.request.attempt,
            job.begun_s - job.given_s,
            cluster.events.now_s - job.begun_s,
            job.num_new,
            job.num_tokens,
            pulled_bytes=job.pulled_bytes,
            pulled_s=job.pulled_s - job.given_s,
            moved_bytes=round(job.num_tokens * token_bytes) if is_remote else 0,
            exposed_s=exposed_s,
        )
        cluster.router.received(self, Measured(prefills=(times,)))


class RehearsedPrefill(RehearsedWorker):
    """Computes up to a chunk's tokens a step, of the prompts of tenants that are due first."""

    def __init__(self, cluster: "Rehearsal", hello: Hello) -> None:
        super().__init__(cluster, hello)
        self._share = FairShare()
        self._jobs: list[tuple[float, int, PromptJob]] = []  # a heap, by the tenants' virtual clocks
        self._num_jobs = count()
        self.is_stepping = False

    def prefill(self, message: Prefill) -> None:
        """Queue a prompt; its pages go to the worker `decode`."""
        job, share = self.take_prompt(message, message.decode), self._share
        tenant = job.request.tenant
        share.join(tenant, job.request.scheduling_key.weight)
        share.correct(tenant, job.num_tokens)
        due = share.clock(tenant)  # when the tenant's share has the prompt done
        share.leave(tenant)
        heappush(self._jobs, (due, next(self._num_jobs), job))
        self._step()

    def tick(self) -> None:
        super().tick()
        self._share.age()

    def _step(self) -> None:
        if self.is_stepping or not self._jobs:
            return
        self.is_stepping = True
        machine, scale, events = self.cluster.machine, self.cluster.scale, self.cluster.events
        due, _, first = self._jobs[0]
        begun = due - first.num_tokens / first.request.scheduling_key.weight
        self._share.present = max(self._share.present, begun)
        begin_s = max(events.now_s, first.pulled_s)
        left, step_s, done = machine.prefill_chunk_tokens, machine.prefill_s, list[PromptJob]()
        while self._jobs and left > 0:
            job = self._jobs[0][2]
            if job.begun_s < 0:
                job.find_held(self)
            num_new = job.compute(left, begin_s)
            step_s += (
                machine.compute_s(round(num_new * scale), round(job.num_done * scale)) - machine.prefill_s
            )
            left = left - num_new if math.isfinite(left) else 0
            if job.is_done:
                done.append(job)
                heappop(self._jobs)
        self.cluster.at(begin_s + step_s, lambda: self._stepped(done))

    def _stepped(self, done: Sequence[PromptJob]) -> None:
        self.is_stepping = False
        cluster = self.cluster
        for job in done:
            self.keep(job.request)
            self.report_prefill(job, cluster.machine.handoff_s)
            cluster.first_token(job.request, job.num_held)
            decode = cluster.workers[job.decode]
            assert isinstance(decode, RehearsedDecode)
            cluster.at(cluster.events.now_s + cluster.machine.handoff_s, partial(decode.join, job.request))
        self._step()


class RehearsedDecode(RehearsedWorker):
    """Decodes all its sequences together, beside the prompts that it computes itself."""

    def __init__(self, cluster: "Rehearsal", hello: Hello) -> None:
        super().__init__(cluster, hello)
        self._num_left: dict[str, int] = {}  # request id -> tokens to come
        self._requests: dict[str, Request] = {}
        self._jobs: deque[PromptJob] = deque()
        self._is_stepping = False
        self._num_steps = 0
        self._num_context = 0  # tokens that all sequences attend to, in the trace's

    def dispatched(self, message: Dispatch) -> None:
        if not message.prefill:
            job = self.take_prompt(message, self.worker.id)
            self.cluster.at(job.pulled_s, lambda: self._compute(job))

    def join(self, request: Request) -> None:
        """Decode a request that has its first token."""
        num_left = self.cluster.num_output_tokens(request) - 1
        self.keep(request)
        if num_left <= 0:
            self.cluster.ended(request)
            return
        self._num_left[request.request_id] = num_left
        self._requests[request.request_id] = request
        self._num_context += len(request.token_ids)
        self._step()

    def _compute(self, job: PromptJob) -> None:
        job.find_held(self)
        self._jobs.append(job)
        self._step()

    def _step(self) -> None:
        """Take as many steps together as nothing changes in, at most MOST_STEPS_S long."""
        if self._is_stepping or not (self._num_left or self._jobs):
            return
        self._is_stepping = True
        machine, scale, now_s = self.cluster.machine, self.cluster.scale, self.cluster.events.now_s
        step_s = machine.step_s + machine.step_sequence_s * len(self._num_left)
        step_s += machine.step_context_s * self._num_context * scale
        num_steps, num_new = 1, 0
        if self._jobs:
            job = self._jobs[0]
            num_new = job.compute(machine.chunk_tokens / scale, now_s)
            compute_s = machine.compute_s(round(num_new * scale), round(job.num_done * scale))
            step_s += compute_s - machine.prefill_s
        else:
            num_steps = max(1, min(min(self._num_left.values()), int(MOST_STEPS_S / step_s)))
        begun = list(self._num_left)
        self.cluster.at(now_s + step_s * num_steps, lambda: self._stepped(begun, num_steps, num_new, step_s))

    def _stepped(self, begun: list[str], num_steps: int, num_new: int, step_s: float) -> None:
        self._is_stepping = False
        self._num_steps += 1
        if self._num_steps % STEPS_A_REPORT == 0 or num_new:
            times = StepTimes(len(begun), num_new, self._num_context, step_s)
            self.cluster.router.received(self, Measured(steps=(times,)))
        for request_id in begun:
            self._num_left[request_id] -= num_steps
            if self._num_left[request_id] <= 0:
                del self._num_left[request_id]
                request = self._requests.pop(request_id)
                self._num_context -= len(request.token_ids)
                self.cluster.ended(request)
        if num_new and self._jobs[0].is_done:
            job = self._jobs.popleft()
            self.report_prefill(job, 0.0)
            self.cluster.first_token(job.request, job.num_held)
            self.join(job.request)
        self._step()


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The number of workers, and their room."""

    num_prefill: int = 8
    num_decode: int = 1
    num_prefill_pages: int = 8000
    num_decode_pages: int = 1_000_000
    num_decode_seqs: int = 100_000
    prefill_keeps: bool = True  # whether prefill workers keep pages for later prompts
    decode_keeps: bool = False

    def workers(self, page_size: int, max_num_batched_tokens: int) -> Iterator[Worker]:
        """Yield every worker as it introduces itself."""
        roles = [WorkerRole.PREFILL] * self.num_prefill + [WorkerRole.DECODE] * self.num_decode
        for number, role in enumerate(roles):
            is_prefill = role is WorkerRole.PREFILL
            yield Worker(
                id=f"{number + 16:032x}",
                name=f"{role}-{number}",
                role=role,
                model="m",
                fingerprint="f",
                address=Address("127.0.0.1", 1000 + number),
                kv_address=Address("127.0.0.1", 3000 + number),
                page_size=page_size,
                num_pages=self.num_prefill_pages if is_prefill else self.num_decode_pages,
                max_num_seqs=self.num_decode_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=2**20,
            )


class RehearsedGateway:
    """The router's peer that submits requests."""

    silence_s = quiet_s = 0.0
    clock_offset: ClockOffset | None = SAME_CLOCK

    def __init__(self, rejected: Callable[[Rejected], None]) -> None:
        self.hello = Hello(process=Kind.GATEWAY, id=GATEWAY)
        self._rejected = rejected

    def send(self, message: AnyMessage) -> None:
        if isinstance(message, Rejected):
            self._rejected(message)

    def close(self) -> None:
        raise AssertionError("the router gave up its gateway")


class Rehearsal:
    """The router, its workers, the clients and the virtual time; `outcomes` has every HTTP request."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        machine: Machine,
        page_size: int = 16,
        scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        """scale: real tokens in one token of the requests, for times. seed: of clients that back off."""
        self.machine = machine
        self.scale = scale
        self.events = Events()
        self.router = Router(config, OffsetClock(self.events, 0.0), f"{1:032x}")
        self.outcomes: list[CallOutcome] = []
        self.served: list[tuple[float, str, int]] = []  # time, tenant, tokens computed or answered
        self.levels: list[tuple[float, int]] = []  # time, overload level
        self.waiting_s = self.idle_s = 0.0  # worker-seconds in which a call waited; of these, idle
        self.workers: dict[str, RehearsedWorker] = {}
        self._random = Random(seed)
        self._numbers = count()
        self._open: dict[str, CallOutcome] = {}
        self._num_to_come = 0  # calls that have not been made
        self._seen_s = 0.0
        self._prompt_keys = PromptKeys()
        self._keys: dict[str, tuple[bytes, ...]] = {}  # request id -> keys of the prompt's pages
        self._keeps_pages = fleet.prefill_keeps or fleet.decode_keeps
        self._gateway = RehearsedGateway(self._rejected)
        self.router.joined(self._gateway)
        for worker in fleet.workers(page_size, round(machine.chunk_tokens / scale)):
            is_prefill = worker.role is WorkerRole.PREFILL
            hello = Hello(process=Kind.WORKER, id=worker.id, worker=worker)
            peer = (RehearsedPrefill if is_prefill else RehearsedDecode)(self, hello)
            peer.is_keeping = fleet.prefill_keeps if is_prefill else fleet.decode_keeps
            self.workers[worker.id] = peer
            self.router.joined(peer)
        peers: list[Peer] = [self._gateway, *self.workers.values()]
        for each in peers:
            self.router.received(each, Reachable(workers=tuple(self.workers)))

    @property
    def prefill_workers(self) -> list[RehearsedPrefill]:
        return [each for each in self.workers.values() if isinstance(each, RehearsedPrefill)]

    def select(self, select: Select) -> None:
        """Have the policy `cost` choose among its candidates by another rule."""
        policy = self.router.cluster_state.policy
        assert isinstance(policy, CostPolicy), "other policies have no candidates"
        policy.select = select

    def run(self, calls: Iterable[ClientCall], until_s: float | None = None) -> list[CallOutcome]:
        """Make all calls; simulate until then, or until all have ended. Return the outcomes, as asked."""
        for call in calls:
            self._num_to_come += 1
            self.at(call.at_s, partial(self._ask, call, 0))
        self.at(TICK_S, self._tick)
        if until_s is not None:
            self.events.run_until(until_s)
        while until_s is None and (self._num_to_come or self._open):
            self.events.run_until(self.events.now_s + TICK_S)
        return self.outcomes

    # Called by the workers.

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        """Call at that virtual time."""
        self.events.at(when_s, partial(self._happen, call))

    def keys_of(self, request: Request) -> tuple[bytes, ...]:
        """Return the keys of the prompt's pages; none where no worker keeps pages."""
        known = self._keys.get(request.request_id)
        if known is None:
            family = family_of(next(iter(self.workers.values())).worker)
            joined = self._prompt_keys.keys(family, request) if self._keeps_pages else b""
            known = tuple(joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES))
            self._keys[request.request_id] = known
        return known

    def num_output_tokens(self, request: Request) -> int:
        """Return how many tokens the answer has."""
        num_answered = self._open[request.request_id].call.num_answered
        return min(num_answered, request.sampling.max_tokens or num_answered)

    def first_token(self, request: Request, num_held_tokens: int) -> None:
        """Note that a request has its first token; `num_held_tokens` were not computed."""
        outcome = self._open[request.request_id]
        outcome.first_token_s, outcome.num_held = self.events.now_s, num_held_tokens
        self.served.append((self.events.now_s, request.tenant, len(request.token_ids)))
        started = Started(attempts=((request.request_id, request.attempt),))
        self.router.received(self._gateway, started)

    def ended(self, request: Request) -> None:
        """Note that a request has its last token."""
        outcome, key = self._open.pop(request.request_id), (request.request_id, request.attempt)
        outcome.ended_s, num_answered = self.events.now_s, outcome.call.num_answered
        self.served.append((self.events.now_s, request.tenant, num_answered))
        self._keys.pop(request.request_id, None)
        for worker in self.workers.values():
            worker.attempts.pop(key, None)
        self.router.received(self._gateway, Ended(attempts=(key,), num_tokens=(num_answered,)))

    # The clients, and the gateway.

    def _ask(self, call: ClientCall, retry: int) -> None:
        request_id = f"{next(self._numbers):032x}"
        self._num_to_come -= 1
        self._open[request_id] = CallOutcome(call=call, asked_s=self.events.now_s, retry=retry)
        self.outcomes.append(self._open[request_id])
        self._submit(request_id, 0)

    def _submit(self, request_id: str, attempt: int) -> None:
        call = self._open[request_id].call
        request = Request(
            request_id=request_id,
            token_ids=TokenIds.of(call.token_ids),
            sampling=SamplingParams(max_tokens=call.max_tokens),
            tenant=call.tenant,
            sla=call.sla if call.knows_sla else Sla(),
            scheduling_key=call.scheduling_key,
            attempt=attempt,
        )
        self.router.received(self._gateway, Submit(request=request))

    def _rejected(self, rejected: Rejected) -> None:
        outcome, now_s = self._open[rejected.request_id], self.events.now_s
        if rejected.refusal is Refusal.NO_ROOM:
            self.at(now_s + NO_ROOM_S, partial(self._submit, rejected.request_id, rejected.attempt + 1))
            return
        del self._open[rejected.request_id]
        outcome.refusal, outcome.retry_after_s = str(rejected.refusal), rejected.retry_after_s
        if outcome.retry < MAX_RETRIES and rejected.should_retry:
            wait_s = rejected.retry_after_s
            if wait_s > MAX_HONOURED_S:
                back_off_s = min(BACK_OFF_S * 2.0**outcome.retry, MAX_BACK_OFF_S)
                wait_s = back_off_s * (1 - 0.25 * self._random.random())
            self._num_to_come += 1
            self.at(now_s + wait_s, partial(self._ask, outcome.call, outcome.retry + 1))

    def _happen(self, call: Callable[[], None]) -> None:
        """Count how long workers were idle while calls waited, then make the call."""
        passed_s, self._seen_s = self.events.now_s - self._seen_s, self.events.now_s
        if len(self.router.admission_queue):
            workers = self.prefill_workers
            self.waiting_s += passed_s * len(workers)
            self.idle_s += passed_s * sum(not each.is_stepping for each in workers)
        call()

    def _tick(self) -> None:
        """Tick the workers and the router, now and every TICK_S from now on."""
        for worker in self.workers.values():
            worker.tick()
        self.router.tick()
        self.levels.append((self.events.now_s, int(self.router.admission_queue.overload.level)))
        self.at(self.events.now_s + TICK_S, self._tick)
