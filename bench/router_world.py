"""A trace on simulated workers, routed by the production router, on a virtual clock.

The router is the real one: it hears of pages, times and ends by the messages that workers and gateways send
it, and nothing else. Given the same trace and seed, every figure is the same.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Final

import msgspec

from baton.bench.router_machine import Machine
from baton.bench.router_workers import DecodeSim, PrefillSim, SimWorker
from baton.bench.traces import TraceRequest
from baton.clock import ManualClock
from baton.control import Ended, Hello, Reachable, Started, Submit
from baton.control_wire import AnyMessage
from baton.node import Peer
from baton.page_keys import KEY_BYTES
from baton.request import Request, SamplingParams
from baton.router.costs import Select
from baton.router.prompt_keys import PromptKeys, family_of
from baton.router.router import Router
from baton.router_config import PolicyName, RouterConfig
from baton.wire_types import Kind
from baton.worker import Address, Worker, WorkerRole

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
        chooser = self.router.knowledge.chooser
        assert chooser is not None, "other policies have no candidates"
        chooser.select = select

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


def config_of(policy: PolicyName, seed: int = 0, local_prefill_tokens: int = 0) -> RouterConfig:
    return RouterConfig(
        policy=policy, seed=seed, local_prefill_tokens=local_prefill_tokens, max_attempts=2**19
    )
