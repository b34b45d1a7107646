"""The calls of tenants in the cases of bench/tenants/suite.py, and the times of queue operations."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from time import perf_counter_ns
from typing import Final, TypeVar

import msgspec

from baton.bench.tenants.world import Call
from baton.bench.traces import TraceRequest
from baton.messages.control import Submit
from baton.request import Request
from baton.router.queue.quotas import RequestWork
from baton.router.queue.tenant_queues import QueuedAttempt, TenantQueues
from baton.tenants import SchedulingKey, Sla

NUM_PREFILL: Final = 4
NUM_DECODE: Final = 2
TOKENS_PER_S: Final = 30_000.0 * NUM_PREFILL  # about what such a fleet computes
VICTIMS: Final = 9
SLA: Final = Sla(ttft_ms=2000.0, tpot_ms=50.0)
CONVERSATION_SLAS: Final = (
    Sla(ttft_ms=2000.0, tpot_ms=50.0),
    Sla(ttft_ms=5000.0, tpot_ms=50.0),
    Sla(ttft_ms=15_000.0, tpot_ms=100.0),
)


def arrivals(rate: float, since_s: float, until_s: float, random: Random) -> Iterator[float]:
    """Yield the moments of a Poisson process."""
    at_s = since_s + random.expovariate(rate)
    while at_s < until_s:
        yield at_s
        at_s += random.expovariate(rate)


def victims(until_s: float, seed: int, load: float = 0.6) -> list[Call]:
    """Return calls of nine of ten equal tenants, who use that share of the fleet together."""
    random, calls = Random(seed), list[Call]()
    mean_tokens = 1500
    rate = load * TOKENS_PER_S / mean_tokens / VICTIMS
    for number in range(VICTIMS):
        for at_s in arrivals(rate, 0.0, until_s, random):
            num_tokens = max(16, min(16_000, round(random.lognormvariate(6.9, 0.9))))
            num_answered, name = random.randint(16, 128), f"victim-{number}"
            call = Call(at_s=at_s, tenant=name, num_tokens=num_tokens, num_answered=num_answered, sla=SLA)
            calls.append(call)
    return calls


def noisy(until_s: float, seed: int, times_share: float = 50.0) -> list[Call]:
    """Return calls of the tenth tenant, with long prompts, at `times_share` times its share."""
    random, num_tokens = Random(seed + 1), 16_000
    rate = times_share * 0.1 * TOKENS_PER_S / num_tokens
    return [
        Call(at_s=at_s, tenant="noisy", num_tokens=num_tokens, num_answered=64)
        for at_s in arrivals(rate, 0.0, until_s, random)
    ]


def flood(weights: dict[str, float], until_s: float, seed: int) -> list[Call]:
    """Return calls of tenants with these weights, each for twice the capacity of the fleet."""
    random, calls = Random(seed), list[Call]()
    for tenant, weight in weights.items():
        rate = 2 * TOKENS_PER_S / 1000
        for at_s in arrivals(rate, 0.0, until_s, random):
            num_tokens, num_answered = random.randint(100, 1900), random.randint(8, 200)
            call = Call(at_s=at_s, tenant=tenant, num_tokens=num_tokens, num_answered=num_answered)
            calls.append(msgspec.structs.replace(call, scheduling_key=SchedulingKey(weight=weight)))
    return calls


def service(loads: Sequence[tuple[float, float]], seed: int) -> list[Call]:
    """Return calls of four tenants with objectives. loads: seconds, and shares of the fleet's capacity."""
    random, calls, since_s = Random(seed), list[Call](), 0.0
    for seconds, load in loads:
        for at_s in arrivals(load * TOKENS_PER_S / 2000, since_s, since_s + seconds, random):
            calls.append(
                Call(
                    at_s=at_s,
                    tenant=f"tenant-{random.randrange(4)}",
                    num_tokens=random.randint(200, 3800),
                    num_answered=random.randint(16, 128),
                    sla=SLA,
                )
            )
        since_s += seconds
    return calls


def conversation(trace: Sequence[TraceRequest], speed: float, seed: int, *, knows_sla: bool) -> list[Call]:
    """Return the trace at that speed, without shared prefixes; each request draws its objectives."""
    random = Random(seed)
    return [
        Call(
            at_s=each.arrival_s / speed,
            tenant="",
            num_tokens=each.input_tokens,
            num_answered=each.output_tokens,
            sla=random.choice(CONVERSATION_SLAS),
            knows_sla=knows_sla,
        )
        for each in trace
    ]


NUM_MEASURED: Final = 100_000
_Result = TypeVar("_Result")


def operation_times_us(num_tenants: int, num_each: int, seed: int = 0) -> dict[str, list[float]]:
    """Return the times of every operation of a queue that holds `num_each` requests of each tenant."""
    random, queues = Random(seed), TenantQueues()
    submits = []
    for number in range(num_tenants):
        key = SchedulingKey(weight=float(1 + number % 7))
        request = Request(request_id="", token_ids=(1,), tenant=f"t{number}", scheduling_key=key)
        submits.append(Submit(request=request))
    for number in range(num_tenants * num_each):
        queues.add(_waiting(submits[number % num_tenants], number, random))
    times: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, call: Callable[[], _Result]) -> _Result:
        begun = perf_counter_ns()
        result = call()
        times[name].append((perf_counter_ns() - begun) / 1e3)
        return result

    for number in range(NUM_MEASURED):
        added = _waiting(random.choice(submits), 10**9 + number, random)
        timed("add", partial(queues.add, added))
        first = timed("first", queues.first)
        assert first is not None
        timed("take", partial(queues.take, first))
        timed("correct", partial(queues.correct, 0, first.tenant, -0.1 * first.work))
        timed("remove", partial(queues.remove, added.key))
        timed("work before", partial(queues.work_before, added))
    return times


def _waiting(submit: Submit, number: int, random: Random) -> QueuedAttempt:
    waiting = QueuedAttempt(
        "g", submit, since_s=0.0, due_s=random.uniform(0, 60), work=RequestWork(0.0, random.randint(10, 4000))
    )
    waiting.key = (f"{number:x}", 0)
    return waiting
