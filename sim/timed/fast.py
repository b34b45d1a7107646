"""A fleet of workers that time models stand for, before the production router, on a virtual clock.

The fast mode of a rehearsal (sim/rehearsal.py), and the large fleets of benches. No bytes move: a worker is
its queue, the keys of its pages and the seconds that its steps take. The router learns of pages, times and
ends by the messages of workers and gateways alone. The same calls and seed give the same figures.

1. `FastCluster` joins the router, a gateway peer and workers, and keeps the virtual time. Its clients behave
   as openai-python does: a refused call that was told a time comes again after that time.
2. `FastWorker` (sim/timed/fast_worker.py) computes prompts and decodes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from itertools import count
from random import Random
from typing import Final

from baton.config.router import RouterConfig
from baton.messages.bounds import SHORT_KEY_BYTES, Kind
from baton.messages.control import (
    Ended,
    Hello,
    KvEventBatch,
    Measured,
    Reachable,
    Rejected,
    Started,
    Submit,
)
from baton.messages.workers import WorkerRole
from baton.pages import split_keys
from baton.request import AttemptKey, Request, SamplingParams, TokenIds
from baton.router.router import Router
from baton.router.sliced_work import Family, PromptKeys, family_of
from baton.rpc.liveness import BEAT_S
from baton.rpc.peers import TICK_S, Peer
from baton.sim.process import Events, OffsetClock
from baton.sim.timed.direct_router import DirectRouter
from baton.sim.timed.fast_worker import FastWorker, PromptJob
from baton.sim.timed.fleet import CallOutcome, ClientCall, FastGateway, Fleet, retry_s
from baton.sim.timed.times import Contention, WorkTimes
from baton.tenants import Refusal

MAX_RETRIES: Final = 2  # openai-python's
NO_ROOM_S: Final = 0.05  # until a gateway asks again by itself


@lru_cache(4096)
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


class FastCluster:
    """The router, its workers, the clients and the virtual time; `outcomes` has every HTTP request."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        times: Mapping[WorkerRole, WorkTimes],
        page_size: int = 16,
        scale: float = 1.0,
        seed: int = 0,
        contention: Contention | None = None,
        is_direct: bool = False,
    ) -> None:
        """times: by role. scale: real tokens in one token of the requests, for times.
        seed: of clients that back off. contention: None for workers that share no machine.
        is_direct: a DirectRouter routes, and not the production router.
        """
        self.scale = scale
        self.contention = contention or Contention()
        self.num_busy = 0  # workers in a step
        self.events = Events()
        clock = OffsetClock(self.events, 0.0)
        self.router = Router(config, clock, f"{1:032x}")
        self.direct = DirectRouter(config, clock, self.keys_of) if is_direct else None
        self.outcomes: list[CallOutcome] = []
        self.workers: dict[str, FastWorker] = {}
        self.parts: defaultdict[str, float] = defaultdict(float)  # seconds of all requests, as in timelines
        self.holders: dict[str, FastWorker] = {}  # request id -> its decode worker
        self._random = Random(seed)
        self._other_keys = Random(seed)  # of pages that no other prompt has
        self._numbers = count()
        self._open: dict[str, CallOutcome] = {}
        self._num_to_come = 0  # calls that have not been made
        self._prompt_keys = PromptKeys()
        self._keys: dict[str, tuple[bytes, ...]] = {}  # request id -> keys of the prompt's pages
        self._known_keys: dict[tuple[AttemptKey, Family], bytes] = {}  # of calls that bring them
        self._keeps_pages = fleet.prefill_keeps or fleet.decode_keeps
        self._gateway = FastGateway(self._rejected)
        self.router.joined(self._gateway)
        self._join_workers(fleet, times, page_size)
        prefill = WorkerRole.PREFILL
        self.prefill_workers = [each for each in self.workers.values() if each.worker.role is prefill]
        self._family = family_of(next(iter(self.workers.values())).worker)
        peers: list[Peer] = [] if is_direct else [self._gateway, *self.workers.values()]
        for each in peers:
            self.router.received(each, Reachable(workers=tuple(self.workers)))

    def _join_workers(self, fleet: Fleet, times: Mapping[WorkerRole, WorkTimes], page_size: int) -> None:
        for worker in fleet.workers(page_size, self.scale):
            is_prefill = worker.role is WorkerRole.PREFILL
            hello = Hello(process=Kind.WORKER, id=worker.id, worker=worker)
            budget = fleet.prefill_budget if is_prefill else fleet.decode_budget
            peer = FastWorker(self, hello, times[worker.role], budget / self.scale)
            peer.is_keeping = fleet.prefill_keeps if is_prefill else fleet.decode_keeps
            self.workers[worker.id] = peer
            if self.direct is None:
                self.router.joined(peer)
        if self.direct is not None:
            self.direct.join(self.workers.values())

    def run(self, calls: Iterable[ClientCall], until_s: float | None = None) -> list[CallOutcome]:
        """Make all calls; simulate until then, or until all have ended. Return the outcomes, as asked."""
        for call in calls:
            self._num_to_come += 1
            self.at(call.at_s, partial(self._ask, call, 0))
        self.at(TICK_S, partial(self._tick, 1))
        if until_s is not None:
            self.events.run_until(until_s)
        while until_s is None and (self._num_to_come or self._open):
            self.events.run_until(self.events.now_s + TICK_S)
        return self.outcomes

    # Called by the workers.

    def received(self, worker: FastWorker, message: KvEventBatch | Measured) -> None:
        """Tell the router what a worker keeps, or has measured."""
        if self.direct is not None:
            self.direct.received(worker, message)
        else:
            self.router.received(worker, message)

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        """Call at that virtual time."""
        self.events.at(when_s, call)

    def keys_of(self, request: Request) -> tuple[bytes, ...]:
        """Return the keys of the prompt's pages; none where no worker keeps pages."""
        known = self._keys.get(request.request_id)
        if known is None:
            joined = self._open[request.request_id].call.page_keys
            if joined is None:
                joined = self._prompt_keys.keys(self._family, request) if self._keeps_pages else b""
            known = self._keys[request.request_id] = tuple(split_keys(joined))
        return known

    def num_more_pages(self, request: Request) -> int:
        """Return how many pages of the prompt have no keys."""
        return self._open[request.request_id].call.num_more_pages

    def num_output_tokens(self, request: Request) -> int:
        """Return how many tokens the answer has."""
        num_answered = self._open[request.request_id].call.num_answered
        return min(num_answered, request.sampling.max_tokens or num_answered)

    def first_token(self, job: PromptJob) -> None:
        """Note that a request has its first token."""
        request, now_s = job.request, self.events.now_s
        outcome = self._open[request.request_id]
        outcome.given_s, outcome.begun_s, outcome.first_token_s = job.given_s, job.begun_s, now_s
        outcome.first_wait_s = self.contention.wait_s(now_s)
        outcome.num_held = job.num_held
        if self.direct is not None:
            self.direct.started(request.key)
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
        outcome.last_wait_s = self.contention.wait_s(outcome.ended_s)
        for name, seconds in outcome.parts().items():
            self.parts[name] += seconds
        self._keys.pop(request.request_id, None)
        self._known_keys.pop((key, self._family), None)
        if self.direct is not None:
            self.direct.ended(key)
            return
        self.holders.pop(request.request_id).attempts.pop(key, None)
        self.router.received(self._gateway, Ended(attempts=(key,), num_tokens=(num_answered,)))

    # The clients and the gateway.

    def _ask(self, call: ClientCall, retry: int) -> None:
        request_id = f"{next(self._numbers):032x}"
        self._num_to_come -= 1
        self._open[request_id] = CallOutcome(call=call, asked_s=self.events.now_s, retry=retry)
        self._open[request_id].way_s = self.contention.ask(self.num_busy, self.events.now_s)
        self.outcomes.append(self._open[request_id])
        self._submit(request_id, 0)

    def _submit(self, request_id: str, attempt: int) -> None:
        call = self._open[request_id].call
        request = Request(
            request_id=request_id,
            token_ids=TokenIds.of(call.token_ids),
            sampling=_sampling(call.max_tokens),
            tenant=call.tenant,
            sla=call.sla,
            scheduling_key=call.scheduling_key,
            attempt=attempt,
        )
        if self.direct is not None:
            self.direct.submit(request)
            return
        if call.page_keys is not None:
            others = self._other_keys.randbytes(SHORT_KEY_BYTES * call.num_more_pages)
            self._known_keys[request.key, self._family] = call.page_keys + others
            self.router.cluster_state.keys.known = self._known_keys
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
            wait_s = retry_s(rejected, outcome.retry, self._random)
            self._num_to_come += 1
            self.at(now_s + wait_s, partial(self._ask, outcome.call, outcome.retry + 1))

    def _tick(self, number: int) -> None:
        """Tick the workers and the router, now and every TICK_S from now on."""
        if self.direct is not None:
            self.direct.tick()
        else:
            has_beat = not number % round(BEAT_S / TICK_S)
            for worker in self.workers.values():
                worker.tick()
                if has_beat:
                    worker.beat()
            self.router.tick()
        self.at(self.events.now_s + TICK_S, partial(self._tick, number + 1))
