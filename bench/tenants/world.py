"""Calls of tenants on simulated workers, by the production router, its queues and its cost model.

Clients behave as openai-python does: a refused call that was told a time comes again after it, twice at most.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import count
from random import Random
from typing import Final

import msgspec

from baton.bench.router.world import Fleet, Machine, SimulatedCluster
from baton.config.router import RouterConfig
from baton.messages.control import Rejected
from baton.request import Request, SamplingParams
from baton.rpc.peers import TICK_S
from baton.tenants import Refusal, SchedulingKey, Sla

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
    prefill_chunk_tokens=512,
)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a client makes; `knows_sla` says whether the router is told of its objectives."""

    at_s: float
    tenant: str
    num_tokens: int
    num_answered: int
    sla: Sla = Sla()
    scheduling_key: SchedulingKey = SchedulingKey()
    knows_sla: bool = True


class CallOutcome(msgspec.Struct, kw_only=True):
    """The course of one HTTP request."""

    call: Call
    asked_s: float
    retry: int
    first_token_s: float = -1.0
    ended_s: float = -1.0
    refusal: Refusal | None = None
    retry_after_s: float = -1.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.asked_s

    @property
    def is_good(self) -> bool:
        """Whether the answer met all objectives."""
        if self.ended_s < 0:
            return False
        sla, num_later = self.call.sla, max(1, self.call.num_answered - 1)
        tpot_ms = 1e3 * (self.ended_s - self.first_token_s) / num_later
        is_slow = sla.tpot_ms is not None and tpot_ms > sla.tpot_ms
        return not is_slow and (sla.ttft_ms is None or 1e3 * self.ttft_s <= sla.ttft_ms)


class TenantClients(SimulatedCluster):
    """Clients of several tenants, before workers that keep no pages."""

    tick_s = TICK_S

    def __init__(self, num_prefill: int, num_decode: int, machine: Machine = H200, seed: int = 0) -> None:
        fleet = Fleet(
            num_prefill=num_prefill,
            num_decode=num_decode,
            num_prefill_pages=58_000,
            num_decode_pages=58_000,
            num_decode_seqs=256,
            prefill_keeps=False,
        )
        config = RouterConfig(policy="least-loaded", seed=seed, max_attempts=2**19)
        self.outcomes: list[CallOutcome] = []
        self.answered: list[
            tuple[float, str, int]
        ] = []  # time, tenant, tokens that were computed or answered
        self.levels: list[tuple[float, int]] = []  # time, overload level
        self.waiting_s = self.idle_s = 0.0  # worker-seconds in which a call waited; of these, idle
        self._random = Random(seed)
        self._numbers = count()
        self._open: dict[str, CallOutcome] = {}
        self._seen_s = 0.0
        super().__init__(config, fleet, machine, page_size=16)

    def run(self, calls: Iterable[Call], until_s: float) -> None:
        """Make all calls, and simulate until then."""
        for call in calls:
            self.at(call.at_s, partial(self._ask, call, 0))
        self.at(self.tick_s, self.tick)
        self.events.run_until(until_s)

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        super().at(when_s, partial(self._happen, call))

    def keys_of(self, request: Request) -> tuple[bytes, ...]:
        return ()

    def num_output_tokens(self, request: Request) -> int:
        most = request.sampling.max_tokens
        asked = self._open[request.request_id].call.num_answered
        return asked if most is None else min(most, asked)

    def first_token(self, request: Request, num_held_tokens: int) -> None:
        self._open[request.request_id].first_token_s = self.events.now_s
        self.answered.append((self.events.now_s, request.tenant, len(request.token_ids)))
        super().first_token(request, num_held_tokens)

    def ended(self, request: Request, num_tokens: tuple[int, ...] = ()) -> None:
        outcome = self._open.pop(request.request_id)
        outcome.ended_s = self.events.now_s
        self.answered.append((self.events.now_s, request.tenant, outcome.call.num_answered))
        super().ended(request, (outcome.call.num_answered,))

    def rejected(self, rejected: Rejected) -> None:
        outcome, now_s = self._open[rejected.request_id], self.events.now_s
        if rejected.refusal is Refusal.NO_ROOM:
            again = partial(self._submit, rejected.request_id, rejected.attempt + 1)
            self.at(now_s + NO_ROOM_S, again)
            return
        del self._open[rejected.request_id]
        outcome.refusal, outcome.retry_after_s = rejected.refusal, rejected.retry_after_s
        if outcome.retry < MAX_RETRIES and rejected.may_return:
            wait_s = self._retry_wait_s(rejected.retry_after_s, outcome.retry)
            self.at(now_s + wait_s, partial(self._ask, outcome.call, outcome.retry + 1))

    def tick(self) -> None:
        super().tick()
        self.levels.append((self.events.now_s, int(self.router.admission_queue.overload.level)))

    def _happen(self, call: Callable[[], None]) -> None:
        """Count how long workers were idle while calls waited, then make the call."""
        passed_s, self._seen_s = self.events.now_s - self._seen_s, self.events.now_s
        if len(self.router.admission_queue):
            workers = self.prefill_workers
            self.waiting_s += passed_s * len(workers)
            self.idle_s += passed_s * sum(not each.is_stepping for each in workers)
        call()

    def _ask(self, call: Call, retry: int) -> None:
        request_id = f"{next(self._numbers):032x}"
        outcome = CallOutcome(call=call, asked_s=self.events.now_s, retry=retry)
        self._open[request_id] = outcome
        self.outcomes.append(outcome)
        self._submit(request_id, 0)

    def _submit(self, request_id: str, attempt: int) -> None:
        call = self._open[request_id].call
        self.submit(
            Request(
                request_id=request_id,
                token_ids=_tokens(call.num_tokens),
                sampling=SamplingParams(max_tokens=4 * call.num_answered),
                tenant=call.tenant,
                sla=call.sla if call.knows_sla else Sla(),
                scheduling_key=call.scheduling_key,
                attempt=attempt,
            )
        )

    def _retry_wait_s(self, retry_after_s: float, retry: int) -> float:
        if retry_after_s <= MAX_HONOURED_S:
            return retry_after_s
        back_off_s = min(BACK_OFF_S * 2.0**retry, MAX_BACK_OFF_S)
        return back_off_s * (1 - 0.25 * self._random.random())


@cache
def _tokens(num_tokens: int) -> tuple[int, ...]:
    return (1,) * num_tokens
