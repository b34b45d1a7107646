"""Workers on a virtual clock, for the router's simulator: what they hold, and how long they take.

A prefill worker computes prompts one after the other and keeps their pages; the least lately used leave
first. A decode worker steps: all its sequences get a token a step, and prompts that it computes itself are
a part of it.
"""

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from baton.bench.router_machine import Machine, PageStore
from baton.control import Beat, Dispatch, Hello, Measured, PageEvents, PagesWanted
from baton.control_wire import AnyMessage
from baton.request import Request
from baton.times import PrefillTimes, StepTimes
from baton.worker import Load

STEPS_A_REPORT: Final = 64


class World(Protocol):
    """What the workers are in."""

    machine: Machine
    scale: float  # real tokens in one of the trace as it is replayed

    def now_s(self) -> float: ...
    def at(self, when_s: float, call: Callable[[], None]) -> None: ...
    def tell_router(self, worker: "SimWorker", message: AnyMessage) -> None: ...
    def worker(self, worker_id: str) -> "SimWorker": ...
    def keys_of(self, request: Request) -> tuple[bytes, ...]: ...
    def first_token(self, request: Request, num_held_tokens: int, computer: str) -> None: ...
    def ended(self, request: Request) -> None: ...
    def num_output_tokens(self, request: Request) -> int: ...


class Job(NamedTuple):
    request: Request
    dispatch: Dispatch
    decode: str  # the worker's id
    given_s: float
    pulled_s: float  # when what is pulled is here
    num_pulled_tokens: int  # of the prompt's first, with what was held already
    pulled_bytes: int


class SimWorker:
    """A peer of the router."""

    silence_s = 0.0

    def __init__(self, world: World, hello: Hello) -> None:
        assert hello.worker is not None
        self.world = world
        self.hello = hello
        self.worker = hello.worker
        self.store = PageStore(self.worker.num_pages)
        self.computed_tokens = 0
        self.given_tokens = 0
        self.num_given = 0
        self.busy_s = 0.0
        self.is_keeping = True  # pages, for later prompts
        self.attempts: dict[tuple[str, int], None] = {}  # that it was given and that have not ended
        self._num_changes = 0

    def send(self, message: AnyMessage) -> None:
        if isinstance(message, PagesWanted):
            self.world.tell_router(
                self, PageEvents(first=0, keys=b"", pages=(), generations=(), is_afresh=True)
            )
        elif isinstance(message, Dispatch):
            self.attempts[message.request.request_id, message.request.attempt] = None
            self.dispatched(message)

    def beat(self) -> Beat:
        return Beat(load=Load(), attempts=tuple(self.attempts))

    def close(self) -> None:
        raise AssertionError("the router gave up a worker that was well")

    def dispatched(self, message: Dispatch) -> None:
        raise NotImplementedError

    def job_of(self, dispatch: Dispatch, decode: str) -> Job:
        """With what it pulls under way."""
        world, keys = self.world, self.world.keys_of(dispatch.request)
        now_s, held, pulled = world.now_s(), self.store.num_held(keys), 0
        pulled_s, pulled_bytes = now_s, 0
        if dispatch.source is not None:
            there = world.worker(dispatch.source.worker).store.num_held(keys)
            pulled = min(there, len(dispatch.source.pages))
            if pulled > held:
                num_tokens = round((pulled - held) * self.worker.page_size * world.scale)
                pulled_bytes = num_tokens * world.machine.kv_token_bytes
                pulled_s += world.machine.pull_s(num_tokens)
        self.num_given += 1
        self.given_tokens += len(dispatch.request.token_ids)
        num_pulled = pulled * self.worker.page_size
        return Job(dispatch.request, dispatch, decode, now_s, pulled_s, num_pulled, pulled_bytes)

    def held_for(self, job: Job) -> int:
        keys = self.world.keys_of(job.request)
        held = max(self.store.num_held(keys) * self.worker.page_size, job.num_pulled_tokens)
        return min(held, len(job.request.token_ids) - 1)

    def keep(self, request: Request) -> None:
        changes = list(self.store.keep(self.world.keys_of(request))) if self.is_keeping else []
        if changes:
            events = PageEvents(
                first=self._num_changes,
                keys=b"".join(key for key, _ in changes),
                pages=tuple(page for _, page in changes),
                generations=(0,) * len(changes),
            )
            self._num_changes += len(changes)
            self.world.tell_router(self, events)

    def tell_times(self, job: Job, begun_s: float, num_new: int, exposed_s: float) -> None:
        """In the tokens that the router sees."""
        world, num_tokens = self.world, len(job.request.token_ids)
        is_remote = job.dispatch.prefill == self.worker.id
        token_bytes = world.machine.kv_token_bytes * world.scale
        times = PrefillTimes(
            job.request.request_id,
            job.request.attempt,
            begun_s - job.given_s,
            world.now_s() - begun_s,
            num_new,
            num_tokens,
            pulled_bytes=job.pulled_bytes,
            pulled_s=job.pulled_s - job.given_s,
            moved_bytes=round(num_tokens * token_bytes) if is_remote else 0,
            exposed_s=exposed_s,
        )
        world.tell_router(self, Measured(prefills=(times,)))


class PrefillSim(SimWorker):
    def __init__(self, world: World, hello: Hello) -> None:
        super().__init__(world, hello)
        self._queue: deque[Job] = deque()
        self._is_busy = False

    def fill(self, message: Dispatch, decode: str) -> None:
        self._queue.append(self.job_of(message, decode))
        self._begin()

    def _begin(self) -> None:
        if self._is_busy or not self._queue:
            return
        self._is_busy = True
        job, world = self._queue.popleft(), self.world
        begun_s = max(world.now_s(), job.pulled_s)
        held = self.held_for(job)
        num_new = len(job.request.token_ids) - held
        num_all = round(len(job.request.token_ids) * world.scale)
        compute_s = world.machine.compute_s(round(num_new * world.scale), num_all)
        self.computed_tokens += num_new
        self.busy_s += compute_s
        world.at(begun_s + compute_s, lambda: self._end(job, begun_s, held))

    def _end(self, job: Job, begun_s: float, held: int) -> None:
        world = self.world
        self.keep(job.request)
        self.tell_times(job, begun_s, len(job.request.token_ids) - held, world.machine.handoff_s)
        world.first_token(job.request, held, self.worker.id)
        decode = world.worker(job.decode)
        assert isinstance(decode, DecodeSim)
        world.at(world.now_s() + world.machine.handoff_s, lambda: decode.join(job.request))
        self._is_busy = False
        self._begin()


class DecodeSim(SimWorker):
    def __init__(self, world: World, hello: Hello) -> None:
        super().__init__(world, hello)
        self._running: dict[str, Running] = {}
        self._jobs: deque[Filling] = deque()
        self._is_stepping = False
        self._num_steps = 0
        self._num_context = 0  # tokens that all running ones attend to, in the trace's

    def dispatched(self, message: Dispatch) -> None:
        if message.prefill:
            prefill = self.world.worker(message.prefill)
            assert isinstance(prefill, PrefillSim)
            prefill.fill(message, self.worker.id)
            return
        job = self.job_of(message, self.worker.id)
        self.world.at(job.pulled_s, lambda: self._compute(job))

    def join(self, request: Request) -> None:
        """Its first token is there."""
        num_left = self.world.num_output_tokens(request) - 1
        self.keep(request)
        if num_left <= 0:
            self.world.ended(request)
            return
        self._running[request.request_id] = Running(request, num_left)
        self._num_context += len(request.token_ids)
        self._step()

    def _compute(self, job: Job) -> None:
        held = self.held_for(job)
        self._jobs.append(Filling(job, held))
        self.computed_tokens += len(job.request.token_ids) - held
        self._step()

    def _step(self) -> None:
        """As many steps as nothing changes in, at most a quarter second's."""
        if self._is_stepping or not (self._running or self._jobs):
            return
        self._is_stepping = True
        machine, now_s = self.world.machine, self.world.now_s()
        step_s = machine.step_s + machine.step_sequence_s * len(self._running)
        step_s += machine.step_context_s * self._num_context * self.world.scale
        num_steps, num_new = 1, 0
        if self._jobs:
            num_new = self._jobs[0].chunk(now_s, machine.chunk_tokens / self.world.scale)
            filling = self._jobs[0]
            num_all = round(filling.num_done * self.world.scale)
            step_s += machine.compute_s(round(num_new * self.world.scale), num_all) - machine.prefill_s
        else:
            num_steps = min(each.num_left for each in self._running.values())
            num_steps = max(1, min(num_steps, int(0.1 / step_s)))
        self.busy_s += step_s * num_steps
        begun = list(self._running)
        self.world.at(now_s + step_s * num_steps, lambda: self._stepped(begun, num_steps, num_new, step_s))

    def _stepped(self, begun: list[str], num_steps: int, num_new: int, step_s: float) -> None:
        self._is_stepping = False
        self._num_steps += 1
        if self._num_steps % STEPS_A_REPORT == 0 or num_new:
            times = StepTimes(len(begun), num_new, self._num_context, step_s)
            self.world.tell_router(self, Measured(steps=(times,)))
        for request_id in begun:
            running = self._running[request_id]
            running.num_left -= num_steps
            if running.num_left <= 0:
                del self._running[request_id]
                self._num_context -= len(running.request.token_ids)
                self.world.ended(running.request)
        if num_new and self._jobs[0].is_done:
            filling = self._jobs.popleft()
            job = filling.job
            self.tell_times(job, filling.begun_s, len(job.request.token_ids) - filling.num_held, 0.0)
            self.world.first_token(job.request, filling.num_held, self.worker.id)
            self.join(job.request)
        self._step()


class Running:
    def __init__(self, request: Request, num_left: int) -> None:
        self.request = request
        self.num_left = num_left


class Filling:
    """A prompt that a decode worker computes, chunk by chunk."""

    def __init__(self, job: Job, num_held: int) -> None:
        self.job = job
        self.num_held = num_held
        self.num_done = num_held
        self.begun_s = -1.0

    @property
    def is_done(self) -> bool:
        return self.num_done >= len(self.job.request.token_ids)

    def chunk(self, now_s: float, most: float) -> int:
        if self.begun_s < 0:
            self.begun_s = now_s
        num_new = min(max(1, int(most)), len(self.job.request.token_ids) - self.num_done)
        self.num_done += num_new
        return num_new
