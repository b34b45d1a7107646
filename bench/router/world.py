"""A trace on simulated workers, routed by the production router, on a virtual clock.

The router is the real one: it hears of pages, times and ends by the messages that workers and gateways send
it, and nothing else. Given the same trace and seed, every figure is the same.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Final, NamedTuple, Protocol

import msgspec

from baton.bench.traces import TraceRequest
from baton.clock import ManualClock
from baton.config.router import RouterConfig
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
    Reachable,
    Started,
    Submit,
)
from baton.messages.workers import Address, Load, PrefillTimes, StepTimes, Worker, WorkerRole
from baton.pages import KEY_BYTES
from baton.request import Request, SamplingParams
from baton.router.index.prompt_keys import PromptKeys, family_of
from baton.router.policies.cost import CostPolicy
from baton.router.policies.costs import Select
from baton.router.router import Router
from baton.rpc.peers import Peer

# What a simulated worker is: how long its work takes, and which pages it keeps.


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; of a token where nothing else is said. The default: a 70B model on eight A800, by roofline."""

    prefill_s: float = 0.01
    prefill_token_s: float = 1.2e-4
    prefill_pair_s: float = 2e-9  # of a new token and one that it attends to
    step_s: float = 0.02
    step_sequence_s: float = 5e-5
    step_context_s: float = 1e-8
    kv_token_bytes: int = 320 * 1024
    transfer_s: float = 5e-3
    transfer_bytes_per_s: float = 10e9
    handoff_s: float = 5e-3  # not hidden behind the prompt's computation
    chunk_tokens: int = 2048  # of a prompt in a decode worker's step

    def compute_s(self, num_new: int, num_tokens: int) -> float:
        pairs = num_new * (num_tokens - num_new / 2)
        return self.prefill_s + num_new * self.prefill_token_s + pairs * self.prefill_pair_s

    def pull_s(self, num_tokens: int) -> float:
        return self.transfer_s + num_tokens * self.kv_token_bytes / self.transfer_bytes_per_s


class PageStore:
    """Keys of pages, the least lately used first; a page leaves before those that come before it."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._pages: OrderedDict[bytes, int] = OrderedDict()  # key -> page id
        self._free = list(range(num_pages))

    def num_held(self, keys: tuple[bytes, ...]) -> int:
        for number, key in enumerate(keys):
            if key not in self._pages:
                return number
        return len(keys)

    def keep(self, keys: tuple[bytes, ...]) -> Iterator[tuple[bytes, int]]:
        """Changes: a key, and its page or -1."""
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


# Workers on a virtual clock, for the router's simulator: what they hold, and how long they take.
#
# A prefill worker computes prompts one after the other and keeps their pages; the least lately used leave
# first. A decode worker steps: all its sequences get a token a step, and prompts that it computes itself are
# a part of it.

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
        if isinstance(message, KvEventsWanted):
            self.world.tell_router(
                self, KvEventBatch(first=0, keys=b"", pages=(), generations=(), is_afresh=True)
            )
        elif isinstance(message, Dispatch):
            self.attempts[message.request.request_id, message.request.attempt] = None
            self.dispatched(message)

    def beat(self) -> Heartbeat:
        return Heartbeat(load=Load(), attempts=tuple(self.attempts))

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
            events = KvEventBatch(
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


TICK_S: Final = 0.5
GATEWAY: Final = f"{7:032x}"
MAX_OUTPUT: Final = 2**20


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    num_prefill: int = 8
    num_decode: int = 1
    num_prefill_pages: int = 8000
    num_decode_pages: int = 1_000_000
    num_decode_seqs: int = 100_000
    page_tokens: int = 512  # of the trace's, unscaled
    publishes_decode: bool = False  # whether decode workers keep pages


class Outcome(msgspec.Struct, kw_only=True):
    """Of one request."""

    arrival_s: float
    num_tokens: int
    computer: str = ""
    num_held: int = 0
    first_token_s: float = 0.0
    ended_s: float = 0.0


class Gateway:
    """The router's peer that submits."""

    silence_s = 0.0

    def __init__(self) -> None:
        self.hello = Hello(process=Kind.GATEWAY, id=GATEWAY)

    def send(self, message: AnyMessage) -> None:
        assert message is not None

    def close(self) -> None:
        raise AssertionError("the router gave up its gateway")


class RouterWorld:
    def __init__(
        self, config: RouterConfig, fleet: Fleet, machine: Machine, scale: float, tokens_a_page: int
    ) -> None:
        """scale: real tokens in one that is replayed; tokens_a_page: replayed ones."""
        self.machine = machine
        self.scale = scale
        self.outcomes: dict[str, Outcome] = {}
        self._clock = ManualClock()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._keys = PromptKeys()
        self._known_keys: dict[str, tuple[bytes, ...]] = {}
        self._output: dict[str, int] = {}
        self.router = Router(config, self._clock, f"{1:032x}")
        self._gateway = Gateway()
        self.workers = self._start(fleet, tokens_a_page)

    def _start(self, fleet: Fleet, page_size: int) -> dict[str, SimWorker]:
        self.router.joined(self._gateway)
        workers: dict[str, SimWorker] = {}
        kinds = [(WorkerRole.PREFILL, PrefillSim)] * fleet.num_prefill
        for number, (role, kind) in enumerate([*kinds, *[(WorkerRole.DECODE, DecodeSim)] * fleet.num_decode]):
            is_prefill = role is WorkerRole.PREFILL
            worker = Worker(
                id=f"{number + 16:032x}",
                name=f"{role}-{number}",
                role=role,
                model="m",
                fingerprint="f",
                address=Address("127.0.0.1", 1000 + number),
                kv_address=Address("127.0.0.1", 3000 + number),
                page_size=page_size,
                num_pages=fleet.num_prefill_pages if is_prefill else fleet.num_decode_pages,
                max_num_seqs=fleet.num_decode_seqs,
                max_num_batched_tokens=round(self.machine.chunk_tokens / self.scale),
                max_model_len=2**20,
            )
            workers[worker.id] = kind(self, Hello(process=Kind.WORKER, id=worker.id, worker=worker))
            if not is_prefill and not fleet.publishes_decode:
                workers[worker.id].is_keeping = False
        self.workers = workers
        for each in workers.values():
            self.router.joined(each)
        peers: list[Peer] = [self._gateway, *workers.values()]
        for peer in peers:
            self.router.received(peer, Reachable(workers=tuple(workers)))
        return workers

    def select(self, select: Select) -> None:
        """By this one of the candidates is taken from now on; of a policy that looks at prompts."""
        policy = self.router.cluster_state.policy
        assert isinstance(policy, CostPolicy), "other policies have no candidates"
        policy.select = select

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
        known = self._known_keys.get(request.request_id)
        if known is None:
            family = family_of(next(iter(self.workers.values())).worker)
            joined = self._keys.keys(family, request)
            known = tuple(joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES))
            self._known_keys[request.request_id] = known
        return known

    def num_output_tokens(self, request: Request) -> int:
        return self._output[request.request_id]

    def first_token(self, request: Request, num_held_tokens: int, computer: str) -> None:
        outcome = self.outcomes[request.request_id]
        outcome.first_token_s = self.now_s()
        outcome.num_held, outcome.computer = num_held_tokens, computer
        self.router.received(self._gateway, Started(attempts=((request.request_id, 0),)))

    def ended(self, request: Request) -> None:
        self.outcomes[request.request_id].ended_s = self.now_s()
        del self._output[request.request_id], self._known_keys[request.request_id]
        for worker in self.workers.values():
            worker.attempts.pop((request.request_id, request.attempt), None)
        self.router.received(self._gateway, Ended(attempts=((request.request_id, 0),)))

    # The run.

    def replay(self, trace: Sequence[TraceRequest]) -> list[Outcome]:
        for number, each in enumerate(trace):
            self.at(each.arrival_s, lambda number=number, each=each: self._arrive(number, each))  # type: ignore[misc]
        self.at(TICK_S, self._tick)
        while self._output or len(self.outcomes) < len(trace):
            when_s, _, call = heappop(self._events)
            self._clock.advance(max(0.0, when_s - self.now_s()))
            call()
        return list(self.outcomes.values())

    def _arrive(self, number: int, traced: TraceRequest) -> None:
        request = Request(
            request_id=f"{number:032x}",
            token_ids=tokens_of(traced),
            sampling=SamplingParams(max_tokens=MAX_OUTPUT),
        )
        self._output[request.request_id] = traced.output_tokens
        self.outcomes[request.request_id] = Outcome(arrival_s=self.now_s(), num_tokens=len(request.token_ids))
        self.router.received(self._gateway, Submit(request=request))

    def _tick(self) -> None:
        for worker in self.workers.values():
            self.router.received(worker, worker.beat())
        self.router.tick()
        self.at(self.now_s() + TICK_S, self._tick)


def tokens_of(traced: TraceRequest) -> tuple[int, ...]:
    """Tokens that are alike where the blocks' ids are; without ids every prompt is alone."""
    size = traced.block_tokens
    if not traced.block_ids:
        first = int(traced.arrival_s * 1e6) % 2**30
        return tuple((first + at) % 2**31 for at in range(traced.input_tokens))
    ids = [block * size + at for block in traced.block_ids for at in range(size)]
    return tuple(ids[: traced.input_tokens])


def config_of(policy: str, seed: int = 0, local_prefill_tokens: int = 0) -> RouterConfig:
    return RouterConfig(
        policy=policy, seed=seed, local_prefill_tokens=local_prefill_tokens, max_attempts=2**19
    )
