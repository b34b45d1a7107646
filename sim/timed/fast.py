"""A fleet of workers that time models stand for, before the production router, on a virtual clock.

The fast mode of a rehearsal (sim/rehearsal.py), and the large fleets of benches. No bytes move: a worker is
its queue, the keys of its pages and the seconds that its steps take. The router learns of pages, times and
ends by the messages of workers and gateways alone. The same calls and seed give the same figures.

1. `FastCluster` joins the router, a gateway peer and workers, and keeps the virtual time. Its clients behave
   as openai-python does: a refused call that was told a time comes again after that time.
2. `FastWorker` fills each step as the engine's continuous batching does: a token for each sequence, then
   chunks of prompts, in the order of their tenants' shares.
3. Steps in which nothing changes are one run, whose seconds are summed in closed form. A prompt or a sequence
   that comes meanwhile cuts the run at the end of its present step.
"""

import math
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Final

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
    PullSource,
    Reachable,
    Rejected,
    Started,
    Submit,
)
from baton.messages.workers import Load, PrefillTimes, StepTimes, WorkerRole
from baton.pages import KEY_BYTES
from baton.request import AttemptKey, Request, SamplingParams
from baton.router.policies.candidates import Select
from baton.router.policies.cost import CostPolicy
from baton.router.router import Router
from baton.router.sliced_work import Family, PromptKeys, family_of
from baton.rpc.peer_clock import SAME_CLOCK, ClockOffset
from baton.rpc.peers import TICK_S, Peer
from baton.rpc.worker_node import MEASURED_S
from baton.sim.process import Events, OffsetClock
from baton.sim.timed.fleet import CallOutcome, ClientCall, FastGateway, Fleet, PageStore
from baton.sim.timed.light_router import LightRouter, LightWorker, speed_of
from baton.sim.timed.times import Contention, StepWork, WorkTimes
from baton.tenants import Refusal, Sla
from baton.token_ids import TokenIds

STEPS_A_REPORT: Final = 64
MAX_REPORTED: Final = 32  # steps in one message, as workers send samples
MOST_RUN_S: Final = 0.05  # of a run where other workers slow it down, or cease to
LOOKAHEAD: Final = 64  # see engine/scheduler/policies.py
MAX_RETRIES: Final = 2  # openai-python's
MAX_HONOURED_S: Final = 120.0  # a longer retry-after is not believed
BACK_OFF_S: Final = 0.5
MAX_BACK_OFF_S: Final = 8.0
NO_ROOM_S: Final = 0.05  # until a gateway asks again by itself


class PromptJob:
    """A prompt at the worker that computes it, with the pages that it pulls under way."""

    def __init__(
        self, worker: "FastWorker", request: Request, decode: str, source: PullSource | None
    ) -> None:
        cluster, store = worker.cluster, worker.store
        self.request, self.decode = request, decode
        self.given_s = self.pulled_s = cluster.events.now_s
        self.begun_s = -1.0
        self.num_tokens = self.request.num_tokens
        self.num_held = self.num_done = self.num_last = 0  # num_last: tokens of the latest chunk
        self.pulled_bytes = self._num_pulled_tokens = 0
        if source is not None:
            keys, page_size = cluster.keys_of(self.request), worker.worker.page_size
            there = cluster.workers[source.worker].store.num_held(keys)
            num_pulled = min(there, len(source.pages))
            self._num_pulled_tokens = num_pulled * page_size
            num_missing = num_pulled - store.num_held(keys)
            if num_missing > 0:
                num_tokens = round(num_missing * page_size * cluster.scale)
                self.pulled_bytes = num_tokens * worker.times.kv_token_bytes
                self.pulled_s += worker.times.transfer_s(self.pulled_bytes)

    @property
    def num_left(self) -> int:
        """Tokens that are still to compute."""
        return self.num_tokens - self.num_done

    @property
    def num_new(self) -> int:
        """Tokens of the prompt that are computed, not held or pulled."""
        return self.num_tokens - self.num_held

    def find_held(self, worker: "FastWorker") -> None:
        """Count the leading tokens that need no computation; at least one token is computed."""
        held = worker.store.num_held(worker.cluster.keys_of(self.request)) * worker.worker.page_size
        self.num_held = self.num_done = min(max(held, self._num_pulled_tokens), self.num_tokens - 1)

    def compute(self, num_new: int, now_s: float) -> float:
        """Compute a chunk; return its pairs of a new token and a token that it attends to."""
        if self.begun_s < 0:
            self.begun_s = now_s
        self.num_done += num_new
        self.num_last = num_new
        return num_new * (self.num_done - num_new / 2)


class Run:
    """Steps of a worker that nothing changes: one with chunks of prompts, or several without."""

    __slots__ = ("begin_s", "chunks", "num_steps", "step_s", "work")

    def __init__(
        self, begin_s: float, step_s: float, num_steps: int, work: StepWork, chunks: list[PromptJob]
    ) -> None:
        self.begin_s, self.step_s, self.num_steps = begin_s, step_s, num_steps
        self.work, self.chunks = work, chunks

    @property
    def end_s(self) -> float:
        """The end of the last step."""
        return self.begin_s + self.step_s * self.num_steps


class FastWorker:
    """A worker as a peer of the router: it computes prompts, and decodes if its role says so."""

    silence_s = quiet_s = 0.0
    clock_offset: ClockOffset | None = SAME_CLOCK

    def __init__(self, cluster: "FastCluster", hello: Hello, times: WorkTimes, budget: float) -> None:
        """budget: tokens of a step; inf: one whole prompt a step."""
        assert hello.worker is not None
        self.cluster = cluster
        self.hello = hello
        self.worker = hello.worker
        self.times = times
        self.store = PageStore(self.worker.num_pages)
        self.is_keeping = True  # pages, for later prompts
        self.given_tokens = 0
        self.busy_s = 0.0
        self.bit = 0  # at the light router
        self.attempts: dict[AttemptKey, None] = {}  # dispatched here and not ended
        self._budget = budget
        self._share = FairShare()
        self._jobs: list[tuple[float, int, PromptJob]] = []  # by the tenants' virtual clocks
        self._numbers = count()
        self._run: Run | None = None
        self._is_between = False  # the end of a run is handled; what comes of it is in the next one
        self._num_steps = 0  # in all
        self._ends: list[tuple[int, int, Request]] = []  # a heap: last step of each sequence
        self._num_context = 0  # tokens that all sequences attend to
        self._waiting: deque[Request] = deque()  # sequences without room
        self._sent: list[PromptJob] = []  # whose pages have left; the worker notices between two steps
        self._arrived: list[Request] = []  # whose pages have come; they are verified between two steps,
        self._verified: list[Request] = []  # and decode from the step after the next one on
        self._used_pages = 0
        self._most_steps = 2**20 if not cluster.contention.neighbours else 1
        self._num_changes = 0
        self._measured: list[PrefillTimes] = []
        self._step_times: list[StepTimes] = []

    @property
    def is_stepping(self) -> bool:
        """A step runs, or its end is being handled."""
        return self._run is not None or self._is_between

    # The router.

    def send(self, message: AnyMessage) -> None:
        """Take a message of the router."""
        if isinstance(message, KvEventsWanted):
            events = KvEventBatch(first=0, keys=b"", pages=(), generations=(), is_snapshot=True)
            self.cluster.router.received(self, events)
        elif isinstance(message, Dispatch):
            request = message.request
            self.attempts[request.key] = None
            self.cluster.holders[request.request_id] = self
            if not message.prefill:
                self._take(request, self.worker.id, message.source)
        elif isinstance(message, Prefill):
            self._take(message.request, message.decode, message.source)

    def close(self) -> None:
        """See Peer."""
        raise AssertionError("the router gave up a worker that is well")

    def tick(self) -> None:
        """Age the tenants' shares."""
        self._share.age()

    def beat(self) -> None:
        """Send a heartbeat and what was measured since the last one."""
        router = self.cluster.router
        router.received(self, Heartbeat(load=Load(), attempts=tuple(self.attempts)))
        if self._measured or self._step_times:
            measured = Measured(prefills=tuple(self._measured), steps=tuple(self._step_times))
            self._measured, self._step_times = [], []
            router.received(self, measured)

    # Prompts and sequences.

    def receive(self, request: Request) -> None:
        """Take a request whose pages have come: verify them, then decode."""
        if not self.is_stepping:
            self.join(request)
        else:
            self._cut()
            self._arrived.append(request)

    def join(self, request: Request) -> None:
        """Decode a request that has its first token, from the next step on in which its pages have room."""
        self._keep(request)
        if self.cluster.num_output_tokens(request) <= 1:
            self.cluster.joined(request)
            self.cluster.ended(request)
            return
        self._waiting.append(request)
        self._cut()
        self._step()

    def _admit(self) -> None:
        """Take in the sequences that have room."""
        worker = self.worker
        while self._waiting:
            request = self._waiting[0]
            num_left = self.cluster.num_output_tokens(request) - 1
            num_pages = -(-(request.num_tokens + num_left) // worker.page_size)
            is_full = (
                self._used_pages + num_pages > worker.num_pages or len(self._ends) >= worker.max_num_seqs
            )
            if self._ends and is_full:
                return
            self._waiting.popleft()
            self.cluster.joined(request)
            self._used_pages += num_pages
            heappush(self._ends, (self._num_steps + num_left, next(self._numbers), request))
            self._num_context += request.num_tokens + 1

    def take(self, request: Request, decode: LightWorker) -> None:
        """See LightWorker."""
        assert isinstance(decode, FastWorker)
        self.cluster.holders[request.request_id] = decode
        self._take(request, decode.worker.id)

    def _take(self, request: Request, decode: str, source: PullSource | None = None) -> None:
        """Begin to pull what the router says, and queue the prompt."""
        self.given_tokens += request.num_tokens
        job = PromptJob(self, request, decode, source)
        if job.pulled_s > self.cluster.events.now_s:
            self.cluster.at(job.pulled_s, partial(self._queue, job))
        else:
            self._queue(job)

    def _queue(self, job: PromptJob) -> None:
        job.find_held(self)
        share, tenant = self._share, job.request.tenant
        share.join(tenant, job.request.scheduling_key.weight)
        share.correct(tenant, job.num_tokens)
        due = share.clock(tenant)  # when the tenant's share has the prompt done
        share.leave(tenant)
        insort(self._jobs, (due, next(self._numbers), job))
        self._cut()
        self._step()

    # Steps.

    def _cut(self) -> None:
        """End the present run with its present step."""
        run, now_s = self._run, self.cluster.events.now_s
        if run is not None and run.num_steps > 1:
            num_steps = max(1, math.ceil((now_s - run.begin_s) / run.step_s - 1e-9))
            if num_steps < run.num_steps:
                run.num_steps = num_steps
                self.cluster.at(run.end_s, partial(self._stepped, run, num_steps))

    def _step(self) -> None:
        if self.is_stepping:
            return
        self._admit()
        if not (self._ends or self._jobs):
            return
        cluster, num_seqs, num_steps = self.cluster, len(self._ends), 1
        chunks, num_new, num_pairs = self._chunks(num_seqs) if self._jobs else ([], 0, 0.0)
        if not chunks and not self._verified:
            num_steps = max(1, min(self._ends[0][0] - self._num_steps, self._most_steps))
        scale = cluster.scale
        context = round((self._num_context + num_seqs * (num_steps - 1) / 2) * scale)
        work = StepWork(num_seqs + len(chunks), context, round(num_new * scale), num_pairs * scale * scale)
        step_s, contention = self.times.step_s(work), cluster.contention
        if contention.neighbours:
            now_s = cluster.events.now_s
            step_s *= contention.slowdown(cluster.num_busy, now_s)
            contention.add_tokens(num_seqs * num_steps, now_s)
            self._most_steps = max(1, int(MOST_RUN_S / step_s))
        cluster.num_busy += 1
        self._run = run = Run(cluster.events.now_s, step_s, num_steps, work, chunks)
        cluster.at(run.end_s, partial(self._stepped, run, num_steps))

    def _chunks(self, num_seqs: int) -> tuple[list[PromptJob], int, float]:
        """Return the prompts of a step, their new tokens and their pairs."""
        now_s, (due, _, first) = self.cluster.events.now_s, self._jobs[0]
        begun = due - first.num_tokens / first.request.scheduling_key.weight
        self._share.present = max(self._share.present, begun)
        chunks, num_new, num_pairs = list[PromptJob](), 0, 0.0
        for job, num_tokens in list(self._fill(self._budget - num_seqs)):
            num_pairs += job.compute(num_tokens, now_s)
            num_new += num_tokens
            chunks.append(job)
        return chunks, num_new, num_pairs

    def _fill(self, budget: float) -> Iterator[tuple[PromptJob, int]]:
        """Yield the prompts of a step and their tokens, as ContinuousPolicy shares a step's tokens out."""
        for place, (_, _, job) in enumerate(self._jobs):
            if budget < 1:
                return
            if job.num_left > budget:
                yield from self._split(int(budget), place)
                return
            yield job, job.num_left
            budget = budget - job.num_left if math.isfinite(budget) else 0

    def _split(self, budget: int, place: int) -> Iterator[tuple[PromptJob, int]]:
        """Give half to the prompt that cannot be finished, and half to shorter ones of its tenant."""
        head, share = self._jobs[place][2], budget // 2
        later = (job for _, _, job in self._jobs[place + 1 : place + 1 + LOOKAHEAD])
        tenant = head.request.tenant
        shorter = [job for job in later if job.num_left < head.num_left and job.request.tenant == tenant]
        given = []
        for job in sorted(shorter, key=lambda job: job.num_left):
            if not share:
                break
            given.append((job, min(share, job.num_left)))
            share -= given[-1][1]
        yield head, budget - sum(num_tokens for _, num_tokens in given)
        yield from given

    def _stepped(self, run: Run, num_steps: int) -> None:
        if run is not self._run or num_steps != run.num_steps:
            return  # the run was cut
        self._run, self._is_between = None, True
        self.cluster.num_busy -= 1
        self.busy_s += run.step_s * num_steps
        self._num_steps += num_steps
        self._num_context += num_steps * len(self._ends)
        is_sampled = run.chunks or self._num_steps % STEPS_A_REPORT < num_steps
        if is_sampled and len(self._step_times) < MAX_REPORTED and self.cluster.light is None:
            work = run.work
            context = work.num_context + work.num_new
            self._step_times.append(StepTimes(work.num_sequences, work.num_new, context, run.step_s))
        self._end_sequences()
        done = [job for job in run.chunks if not job.num_left]
        if done:
            self._jobs = [each for each in self._jobs if each[2].num_left]
            for job in done:
                self._computed(job)
        self._notice()
        self._is_between = False
        self._step()

    def _notice(self) -> None:
        """Handle what has come during a step: a worker's loop looks between two steps."""
        sent, self._sent = self._sent, []
        for job in sent:
            self._hand_over(job)
        verified, self._verified = self._verified, self._arrived
        self._arrived = []
        if not (self._ends or self._jobs or verified or self._waiting):  # the next look is at once
            verified, self._verified = self._verified, []
        for request in verified:
            self.join(request)

    def _pages_left(self, job: PromptJob) -> None:
        if not self.is_stepping:
            self._hand_over(job)
        else:
            self._sent.append(job)

    def _hand_over(self, job: PromptJob) -> None:
        self.cluster.workers[job.decode].receive(job.request)

    def _end_sequences(self) -> None:
        while self._ends and self._ends[0][0] <= self._num_steps:
            request = heappop(self._ends)[2]
            num_tokens = request.num_tokens + self.cluster.num_output_tokens(request)
            self._num_context -= num_tokens
            self._used_pages -= -(-(num_tokens - 1) // self.worker.page_size)
            self.cluster.ended(request)

    def _computed(self, job: PromptJob) -> None:
        """Hand a computed prompt to its decode worker."""
        cluster, request = self.cluster, job.request
        is_remote = job.decode != self.worker.id
        exposed_s = 0.0
        if is_remote:
            exposed_s = self.times.handoff_s(round(job.num_last * cluster.scale))
        self._keep(request)
        self._report(job, exposed_s, is_remote)
        cluster.first_token(job)
        if is_remote:
            cluster.at(cluster.events.now_s + exposed_s, partial(self._pages_left, job))
        else:
            self.join(request)

    def _keep(self, request: Request) -> None:
        """Keep the request's pages and tell the router."""
        cluster = self.cluster
        if not self.is_keeping:
            return
        changes = list(self.store.keep(cluster.keys_of(request), cluster.num_more_pages(request)))
        if cluster.light is not None:
            cluster.pages_changed(changes, self.bit)
        elif changes:
            events = KvEventBatch(
                first=self._num_changes,
                keys=b"".join(key for key, _ in changes),
                pages=tuple(page for _, page in changes),
                generations=(0,) * len(changes),
            )
            self._num_changes += len(changes)
            self.cluster.router.received(self, events)

    def _report(self, job: PromptJob, exposed_s: float, is_remote: bool) -> None:
        """Note what a prompt took, in the tokens that the router sees."""
        if self.cluster.light is not None:
            return
        token_bytes = self.times.kv_token_bytes * self.cluster.scale
        times = PrefillTimes(
            job.request.request_id,
            job.request.attempt,
            job.begun_s - job.given_s,
            self.cluster.events.now_s - job.begun_s,
            job.num_new,
            job.num_tokens,
            pulled_bytes=job.pulled_bytes,
            pulled_s=job.pulled_s - job.given_s,
            moved_bytes=round(job.num_tokens * token_bytes) if is_remote else 0,
            exposed_s=exposed_s,
        )
        self._measured.append(times)


class FastCluster:
    """The router, its workers, the clients and the virtual time; `outcomes` has every HTTP request."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        times: WorkTimes | Mapping[WorkerRole, WorkTimes],
        page_size: int = 16,
        scale: float = 1.0,
        seed: int = 0,
        contention: Contention | None = None,
        is_light: bool = False,
    ) -> None:
        """times: of all workers, or by role. scale: real tokens in one token of the requests, for times.
        seed: of clients that back off. contention: None for workers that share no machine.
        is_light: LightRouter routes, and not the production router.
        """
        self.scale = scale
        self.contention = contention or Contention()
        self.num_busy = 0  # workers in a step
        self.events = Events()
        clock = OffsetClock(self.events, 0.0)
        self.router = Router(config, clock, f"{1:032x}")
        self.light = LightRouter(clock, self._num_held, config.seed) if is_light else None
        self.outcomes: list[CallOutcome] = []
        self.served: list[tuple[float, str, int]] = []  # time, tenant, tokens computed or answered
        self.levels: list[tuple[float, int]] = []  # time, overload level
        self.waiting_s = self.idle_s = 0.0  # worker-seconds in which a call waited; of these, idle
        self.workers: dict[str, FastWorker] = {}
        self.parts: defaultdict[str, float] = defaultdict(float)  # seconds of all requests, as in timelines
        self.holders: dict[str, FastWorker] = {}  # request id -> its decode worker
        self._random = Random(seed)
        self._numbers = count()
        self._open: dict[str, CallOutcome] = {}
        self._num_to_come = 0  # calls that have not been made
        self._calls: Iterator[ClientCall] = iter(())  # by their moments
        self._seen_s = 0.0
        self._prompt_keys = PromptKeys()
        self._keys: dict[str, tuple[bytes, ...]] = {}  # request id -> keys of the prompt's pages
        self._page_holders: dict[bytes, int] = {}  # key -> bits of the workers that keep the page
        self._known_keys: dict[tuple[AttemptKey, Family], bytes] = {}  # of calls that bring them
        self._keeps_pages = fleet.prefill_keeps or fleet.decode_keeps
        self._gateway = FastGateway(self._rejected)
        self.router.joined(self._gateway)
        for worker in fleet.workers(page_size, scale):
            is_prefill = worker.role is WorkerRole.PREFILL
            hello = Hello(process=Kind.WORKER, id=worker.id, worker=worker)
            own = times[worker.role] if isinstance(times, Mapping) else times
            budget = fleet.prefill_budget if is_prefill else fleet.decode_budget
            peer = FastWorker(self, hello, own, budget / scale)
            peer.is_keeping = fleet.prefill_keeps if is_prefill else fleet.decode_keeps
            self.workers[worker.id] = peer
            if self.light is None:
                self.router.joined(peer)
            else:
                peer.bit = self.light.join(peer, speed_of(own, budget))
        prefill = WorkerRole.PREFILL
        self.prefill_workers = [each for each in self.workers.values() if each.worker.role is prefill]
        self._family = family_of(next(iter(self.workers.values())).worker)
        peers: list[Peer] = [] if is_light else [self._gateway, *self.workers.values()]
        for each in peers:
            self.router.received(each, Reachable(workers=tuple(self.workers)))

    def select(self, select: Select) -> None:
        """Have the policy `cost` choose among its candidates by another rule."""
        policy = self.router.cluster_state.policy
        assert isinstance(policy, CostPolicy), "other policies have no candidates"
        policy.select = select

    def run(self, calls: Iterable[ClientCall], until_s: float | None = None) -> list[CallOutcome]:
        """Make all calls; simulate until then, or until all have ended. Return the outcomes, as asked."""
        self._calls = iter(sorted(calls, key=lambda call: call.at_s))
        self._next_call()
        self.at(TICK_S, partial(self._tick, 1))
        if until_s is not None:
            self.events.run_until(until_s)
        while until_s is None and (self._num_to_come or self._open):
            self.events.run_until(self.events.now_s + TICK_S)
        return self.outcomes

    # Called by the workers.

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        """Call at that virtual time."""
        self.events.at(when_s, call if self.light is not None else partial(self._happen, call))

    def keys_of(self, request: Request) -> tuple[bytes, ...]:
        """Return the keys of the prompt's pages; none where no worker keeps pages."""
        known = self._keys.get(request.request_id)
        if known is None:
            joined = self._open[request.request_id].call.page_keys
            if joined is None:
                joined = self._prompt_keys.keys(self._family, request) if self._keeps_pages else b""
            known = tuple(joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES))
            self._keys[request.request_id] = known
        return known

    def num_more_pages(self, request: Request) -> int:
        """Return how many pages of the prompt have no keys."""
        return self._open[request.request_id].call.num_more_pages

    def pages_changed(self, changes: Sequence[tuple[bytes, int]], bit: int) -> None:
        """Note pages that a worker keeps, or no longer."""
        holders = self._page_holders
        for key, page in changes:
            if page >= 0:
                holders[key] = holders.get(key, 0) | bit
            else:
                holders[key] &= ~bit

    def _num_held(self, request: Request) -> dict[int, int]:
        """See LightRouter."""
        found: dict[int, int] = {}
        before, page_size = -1, self._family[2]
        for number, key in enumerate((*self.keys_of(request), b"")):
            holders = self._page_holders.get(key, 0) & before
            if holders != before and number:
                left = before ^ holders
                while left:
                    bit = left & -left
                    found[bit] = number * page_size
                    left ^= bit
            if not holders:
                break
            before = holders
        return found

    def num_output_tokens(self, request: Request) -> int:
        """Return how many tokens the answer has."""
        num_answered = self._open[request.request_id].call.num_answered
        return min(num_answered, request.sampling.max_tokens or num_answered)

    def first_token(self, job: PromptJob) -> None:
        """Note that a request has its first token."""
        request, now_s = job.request, self.events.now_s
        outcome = self._open[request.request_id]
        outcome.given_s, outcome.begun_s, outcome.first_token_s = job.given_s, job.begun_s, now_s
        outcome.num_held = job.num_held
        self.served.append((now_s, request.tenant, request.num_tokens))
        if self.light is not None:
            self.light.started(request.request_id)
            return
        started = Started(attempts=((request.request_id, request.attempt),))
        self.router.received(self._gateway, started)

    def joined(self, request: Request) -> None:
        """Note that a request decodes from now on."""
        self._open[request.request_id].joined_s = self.events.now_s

    def ended(self, request: Request) -> None:
        """Note that a request has its last token."""
        outcome, key = self._open.pop(request.request_id), request.key
        outcome.ended_s, num_answered = self.events.now_s, outcome.call.num_answered
        self.served.append((self.events.now_s, request.tenant, num_answered))
        for name, seconds in outcome.parts().items():
            self.parts[name] += seconds
        self._keys.pop(request.request_id, None)
        self._known_keys.pop((key, self._family), None)
        self.holders.pop(request.request_id).attempts.pop(key, None)
        if self.light is not None:
            self.light.ended(request.request_id)
            return
        self.router.received(self._gateway, Ended(attempts=(key,), num_tokens=(num_answered,)))

    # The clients, and the gateway.

    def _next_call(self) -> None:
        call = next(self._calls, None)
        if call is not None:
            self._num_to_come += 1
            self.at(call.at_s, partial(self._arrive, call))

    def _arrive(self, call: ClientCall) -> None:
        self._next_call()
        self._ask(call, 0)

    def _ask(self, call: ClientCall, retry: int) -> None:
        request_id = f"{next(self._numbers):032x}"
        self._num_to_come -= 1
        self._open[request_id] = CallOutcome(call=call, asked_s=self.events.now_s, retry=retry)
        self.outcomes.append(self._open[request_id])
        self._submit(request_id, 0)

    def _submit(self, request_id: str, attempt: int) -> None:
        call = self._open[request_id].call
        self.contention.add_request(self.events.now_s)
        request = Request(
            request_id=request_id,
            token_ids=TokenIds.of(call.token_ids),
            sampling=SamplingParams(max_tokens=call.max_tokens),
            tenant=call.tenant,
            sla=call.sla if call.knows_sla else Sla(),
            scheduling_key=call.scheduling_key,
            attempt=attempt,
        )
        if call.page_keys is not None and self.light is None:
            self._known_keys[request.key, self._family] = call.page_keys
            self.router.cluster_state.keys.known = self._known_keys
        if self.light is not None:
            self.light.submit(request)
            return
        self.router.received(self._gateway, Submit(request=request))

    def _rejected(self, rejected: Rejected) -> None:
        outcome, now_s = self._open[rejected.request_id], self.events.now_s
        self._known_keys.pop(((rejected.request_id, rejected.attempt), self._family), None)
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

    def _tick(self, number: int) -> None:
        """Tick the workers and the router, now and every TICK_S from now on."""
        if self.light is not None:
            return
        has_beat = not number % round(MEASURED_S / TICK_S)
        for worker in self.workers.values():
            worker.tick()
            if has_beat:
                worker.beat()
        self.router.tick()
        self.levels.append((self.events.now_s, int(self.router.admission_queue.overload.level)))
        self.at(self.events.now_s + TICK_S, partial(self._tick, number + 1))
