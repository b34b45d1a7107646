"""A worker of the fast mode of a rehearsal: its queue, the keys of its pages and the seconds of its steps.

1. `FastWorker` fills each step as the engine's continuous batching does: a token for each sequence, then
   chunks of prompts, in the order of their tenants' shares.
2. Steps in which nothing changes are one run: its seconds are summed in closed form. A prompt or a sequence
   that comes meanwhile cuts the run at the end of its present step.
3. A worker handles events between two steps, in a turn of its loop. A transfer, which hands a prompt over or
   pulls a prefix, takes several turns: of the source, when it is asked for the pages and when the last page
   has left; of the other worker, when the writer has stopped and when the pages are verified.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final

import msgspec

from baton.fair_queue import FairShare
from baton.messages.codec import AnyMessage
from baton.messages.control import (
    Dispatch,
    Heartbeat,
    Hello,
    KvEventBatch,
    KvEventsWanted,
    Prefill,
    PullSource,
)
from baton.messages.workers import Load, PrefillTimes
from baton.request import AttemptKey, Request
from baton.rpc.peer_clock import SAME_CLOCK, ClockOffset
from baton.rpc.worker_node import SAMPLE_S
from baton.sim.process import Call
from baton.sim.timed.fleet import Measurements, PageStore
from baton.sim.timed.times import StepWork, WorkTimes

if TYPE_CHECKING:
    from baton.sim.timed.fast import FastCluster

DIRECT_SAMPLE_S: Final = 0.2  # between two samples of steps for a DirectRouter
MOST_RUN_S: Final = 0.05  # of a run where other workers slow it down, or cease to
LOOKAHEAD: Final = 64  # see engine/scheduler/policies.py


class Transfer:
    """Pages that go from one worker to another."""

    __slots__ = ("begun_s", "seconds", "taker", "then")

    def __init__(self, taker: "FastWorker", seconds: Callable[[int], float], then: Call) -> None:
        """seconds: by the number of the source's transfers under way. then: called by a turn of the taker,
        when the pages are verified.
        """
        self.taker, self.seconds, self.then = taker, seconds, then
        self.begun_s = 0.0


class PromptJob:
    """A prompt at the worker that computes it, and the prefix that it pulls."""

    def __init__(
        self, worker: "FastWorker", request: Request, decode: str, source: PullSource | None
    ) -> None:
        cluster, store = worker.cluster, worker.store
        self.worker, self.request, self.decode = worker, request, decode
        self.given_s = self.pulled_s = cluster.events.now_s  # pulled_s: the end of the pull
        self.begun_s = -1.0
        self.num_tokens = request.num_tokens
        self.num_held = self.num_done = self.num_last = 0  # num_last: tokens of the latest chunk
        self.own_s = 0.0  # its part of the time of its steps
        self.granted_s = self.given_s  # when the grant of the decode worker comes
        self.pulled_bytes = self._num_pulled_tokens = 0
        if source is not None:
            keys, page_size = cluster.keys_of(request), worker.worker.page_size
            there = cluster.workers[source.worker].store.num_held(keys)
            num_pulled = min(there, source.num_tokens // page_size)
            self._num_pulled_tokens = num_pulled * page_size
            num_missing = num_pulled - store.num_held(keys)
            if num_missing > 0:
                num_tokens = round(num_missing * page_size * cluster.scale)
                self.pulled_bytes = num_tokens * worker.times.kv_token_bytes

    @property
    def num_left(self) -> int:
        """Tokens that are still to compute."""
        return self.num_tokens - self.num_done

    @property
    def num_new(self) -> int:
        """Tokens of the prompt that are computed, not held or pulled."""
        return self.num_tokens - self.num_held

    def find_held(self) -> None:
        """Count the leading tokens that need no computation; at least one token is computed."""
        worker = self.worker
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
    """Equal steps of a worker: one step with chunks of prompts, or several without."""

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
        assert times.num_stages == 1, "one step of a worker is under way at a time"
        self.cluster = cluster
        self.hello = hello
        self.worker = hello.worker
        self.times = times
        self.store = PageStore(self.worker.num_pages)
        self.is_keeping = True  # pages, for later prompts
        self.given_tokens = 0
        self.busy_s = 0.0
        self.attempts: dict[AttemptKey, None] = {}  # dispatched here and not ended
        self._num_transfers = 0  # under way
        self._budget = budget
        self._share = FairShare()
        self._jobs: list[tuple[float, int, PromptJob]] = []  # by the tenants' virtual clocks
        self._numbers = count()
        self._run: Run | None = None
        self._is_between = False  # the end of a run is being handled: new work starts with the next run
        self._num_steps = 0  # in all
        self._ends: list[tuple[int, int, Request]] = []  # a heap: last step of each sequence
        self._num_context = 0  # tokens that all sequences attend to
        self._waiting: deque[Request] = deque()  # sequences without room
        # Transfers, by the turn of the loop that handles them next.
        self._asked: list[Transfer] = []  # from here
        self._sent: list[Transfer] = []  # their pages have left
        self._arrived: list[Transfer] = []  # their pages have come; the writer has stopped in the next turn
        self._stopped: list[Transfer] = []  # their pages are verified in the next turn
        self._verified: list[Transfer] = []
        self._used_pages = 0
        self._most_steps = 2**20 if not cluster.contention.neighbours else 1
        self._num_changes = 0
        self.measurements = Measurements(SAMPLE_S if cluster.direct is None else DIRECT_SAMPLE_S)

    @property
    def is_stepping(self) -> bool:
        """A step runs, or its end is being handled."""
        return self._run is not None or self._is_between

    @property
    def next_turn_s(self) -> float:
        """The time of the next turn of the worker's loop."""
        run, now_s = self._run, self.cluster.events.now_s
        if run is None:
            return now_s
        return run.begin_s + run.step_s * max(1, math.ceil((now_s - run.begin_s) / run.step_s - 1e-9))

    # The router.

    def send(self, message: AnyMessage) -> None:
        """Take a message of the router."""
        if isinstance(message, KvEventsWanted):
            events = KvEventBatch(first=0, keys=b"", is_snapshot=True)
            self.cluster.received(self, events)
        elif isinstance(message, Dispatch):
            request = message.request
            self.attempts[request.key] = None
            self.cluster.holders[request.request_id] = self
            if not message.prefill:
                self.take(request, self.worker.id, message.source)
        elif isinstance(message, Prefill):
            self.take(message.request, message.decode, message.source)

    def close(self) -> None:
        raise AssertionError("the router gave up a worker that is well")

    def tick(self) -> None:
        """Age the tenants' shares."""
        self._share.age()

    def beat(self) -> None:
        """Send a heartbeat."""
        self.cluster.router.received(self, Heartbeat(load=Load(), attempts=tuple(self.attempts)))

    # Prompts and sequences.

    def join(self, request: Request) -> None:
        """Decode a request that has its first token, from the next step in which its pages have room."""
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
            num_tokens, num_left = request.num_tokens, self.cluster.num_output_tokens(request) - 1
            num_pages = -(-(num_tokens + num_left) // worker.page_size)
            is_full = (
                self._used_pages + num_pages > worker.num_pages or len(self._ends) >= worker.max_num_seqs
            )
            if self._ends and is_full:
                return
            self._waiting.popleft()
            self.cluster.joined(request)
            self._used_pages += num_pages
            heappush(self._ends, (self._num_steps + num_left, next(self._numbers), request))
            self._num_context += num_tokens + 1

    def take(self, request: Request, decode: str, source: PullSource | None) -> None:
        """Queue a prompt; first pull the prefix that the router names, if any."""
        job = PromptJob(self, request, decode, source)
        self.given_tokens += job.num_tokens
        job.granted_s = self.cluster.workers[decode].next_turn_s
        if source is not None and job.pulled_bytes:
            seconds = partial(self.times.transfer_s, job.pulled_bytes)
            self.cluster.workers[source.worker].ask(Transfer(self, seconds, partial(self._pulled, job)))
        else:
            self._queue(job)

    def _pulled(self, job: PromptJob) -> None:
        job.pulled_s = self.cluster.events.now_s
        self._queue(job)

    def _queue(self, job: PromptJob) -> None:
        job.find_held()
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
        if not (chunks or self._arrived or self._stopped or self._verified):
            num_steps = max(1, min(self._ends[0][0] - self._num_steps, self._most_steps))
        scale = cluster.scale
        context = round((self._num_context + num_seqs * (num_steps - 1) / 2) * scale)
        work = StepWork(num_seqs + len(chunks), context, round(num_new * scale), num_pairs * scale * scale)
        contention, now_s = cluster.contention, cluster.events.now_s
        step_s = contention.stretched_s(self.times.step_s(work), cluster.num_busy, now_s)
        contention.add_steps(num_steps, num_seqs * num_steps, cluster.num_busy, now_s)
        if contention.neighbours:
            self._most_steps = max(1, int(MOST_RUN_S / step_s))
        cluster.num_busy += 1
        self._run = run = Run(now_s, step_s, num_steps, work, chunks)
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
        """Yield the prompts of a step and their tokens, as `plan_continuous` shares a step's tokens out."""
        for place, (_, _, job) in enumerate(self._jobs):
            if budget < 1:
                return
            if job.begun_s < 0:
                job.find_held()  # prompts before it may have computed more of it
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
        self._measure(run)
        self._end_sequences()
        done = [job for job in run.chunks if not job.num_left]
        if done:
            self._jobs = [each for each in self._jobs if each[2].num_left]
            for job in done:
                self._computed(job)
        self._notice()
        self._is_between = False
        self._tell()
        self._step()

    def _measure(self, run: Run) -> None:
        """Note the time of a step, and the part of it that each prompt has."""
        if run.chunks:
            token_s = run.step_s / sum([job.num_last for job in run.chunks])
            for job in run.chunks:
                job.own_s += token_s * job.num_last
        self.measurements.sample_step(run.work, run.step_s, self.cluster.events.now_s)

    def _tell(self) -> None:
        """Tell the router what was measured, as often as workers do."""
        measured = self.measurements.take_due(self.cluster.events.now_s)
        if measured is not None:
            self.cluster.received(self, measured)

    def _notice(self) -> None:
        """One turn of the worker's loop: handle the events that came during a step."""
        sent, self._sent = self._sent, []
        for transfer in sent:
            transfer.taker.receive(transfer)
        asked, self._asked = self._asked, []
        for transfer in asked:
            self._send(transfer)
        while True:
            verified, self._verified = self._verified, self._stopped
            self._stopped, self._arrived = self._arrived, []
            for transfer in verified:
                transfer.then()
            has_step = self._ends or self._jobs or self._waiting  # else the next turn is at once
            if has_step or not (self._stopped or self._verified):
                return

    # Transfers.

    def ask(self, transfer: Transfer) -> None:
        """Have pages leave in the next turn."""
        if self.is_stepping:
            self._cut()
            self._asked.append(transfer)
        else:
            self._send(transfer)

    def receive(self, transfer: Transfer) -> None:
        """Take pages that have come: verify them, then go on."""
        if self.is_stepping:
            self._cut()
            self._arrived.append(transfer)
        else:
            transfer.then()

    def _send(self, transfer: Transfer) -> None:
        transfer.begun_s = now_s = self.cluster.events.now_s
        self._num_transfers += 1
        self.cluster.at(now_s + transfer.seconds(self._num_transfers), partial(self._pages_left, transfer))

    def _pages_left(self, transfer: Transfer) -> None:
        self._num_transfers -= 1
        if self.is_stepping:
            self._cut()
            self._sent.append(transfer)
        else:
            transfer.taker.receive(transfer)

    def _end_sequences(self) -> None:
        while self._ends and self._ends[0][0] <= self._num_steps:
            request = heappop(self._ends)[2]
            num_tokens = request.num_tokens + self.cluster.num_output_tokens(request)
            self._num_context -= num_tokens
            self._used_pages -= -(-(num_tokens - 1) // self.worker.page_size)
            self.cluster.ended(request)

    def _computed(self, job: PromptJob) -> None:
        """Decode a computed prompt, or hand it to its decode worker."""
        cluster, request = self.cluster, job.request
        self._keep(request)
        times = self._times(job)
        cluster.first_token(job)
        if job.decode == self.worker.id:
            self.measurements.prefills.append(times)
            self.join(request)
            return
        taker, num_tokens = cluster.workers[job.decode], round(job.num_last * cluster.scale)
        transfer = Transfer(taker, partial(self.times.handoff_s, num_tokens), lambda: None)
        transfer.then = partial(self._handed_over, request, times, transfer)
        if job.granted_s > cluster.events.now_s:
            cluster.at(job.granted_s, partial(self.ask, transfer))
        else:
            self._send(transfer)

    def _handed_over(self, request: Request, times: PrefillTimes, transfer: Transfer) -> None:
        """Note the times of a prompt, and have its decode worker go on. The next turn here hears of it."""
        exposed_s = self.next_turn_s - transfer.begun_s
        self.measurements.prefills.append(msgspec.structs.replace(times, exposed_s=exposed_s))
        transfer.taker.join(request)

    def _keep(self, request: Request) -> None:
        """Keep the request's pages and tell the router."""
        cluster = self.cluster
        if not self.is_keeping:
            return
        changes = self.store.keep(cluster.keys_of(request), cluster.num_more_pages(request))
        for tier, keys in changes.items():
            if keys:
                events = KvEventBatch(first=self._num_changes, keys=b"".join(keys), tier=tier)
                self._num_changes += len(keys)
                cluster.received(self, events)

    def _times(self, job: PromptJob) -> PrefillTimes:
        """Return what a computed prompt took, in the tokens that the router sees."""
        token_bytes, is_remote = self.times.kv_token_bytes * self.cluster.scale, job.decode != self.worker.id
        return PrefillTimes(
            job.request.request_id,
            job.request.attempt,
            job.begun_s - job.given_s,
            self.cluster.events.now_s - job.begun_s,
            job.num_new,
            job.num_tokens,
            pulled_bytes=job.pulled_bytes,
            pulled_s=job.pulled_s - job.given_s,
            moved_bytes=round(job.num_tokens * token_bytes) if is_remote else 0,
            own_s=job.own_s,
        )
