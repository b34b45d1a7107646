"""What tenants ask for, in the cases that bench/tenants/suite.py measures."""

from collections.abc import Iterator, Sequence
from random import Random
from time import perf_counter_ns
from typing import Final

from baton.bench.tenants.world import Call
from baton.bench.traces import TraceRequest
from baton.messages.control import Submit
from baton.request import Request
from baton.router.queue.tenant_queues import TenantQueues, Waiting
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
    """Of a Poisson process."""
    at_s = since_s + random.expovariate(rate)
    while at_s < until_s:
        yield at_s
        at_s += random.expovariate(rate)


def victims(until_s: float, seed: int, load: float = 0.6) -> list[Call]:
    """Nine of ten equal tenants; together they use so much of the fleet."""
    random, calls = Random(seed), list[Call]()
    mean_tokens = 1500
    rate = load * TOKENS_PER_S / mean_tokens / VICTIMS
    for number in range(VICTIMS):
        for at_s in arrivals(rate, 0.0, until_s, random):
            num_tokens = max(16, min(16_000, round(random.lognormvariate(6.9, 0.9))))
            answered = random.randint(16, 128)
            calls.append(
                Call(
                    at_s=at_s,
                    tenant=f"victim-{number}",
                    num_tokens=num_tokens,
                    num_answered=answered,
                    sla=SLA,
                )
            )
    return calls


def noisy(until_s: float, seed: int, times_share: float = 50.0) -> list[Call]:
    """The tenth, with long prompts, at so many times its share."""
    random, num_tokens = Random(seed + 1), 16_000
    rate = times_share * 0.1 * TOKENS_PER_S / num_tokens
    return [
        Call(at_s=at_s, tenant="noisy", num_tokens=num_tokens, num_answered=64)
        for at_s in arrivals(rate, 0.0, until_s, random)
    ]


def flood(weights: dict[str, float], until_s: float, seed: int) -> list[Call]:
    """Each asks for twice of all that there is."""
    random, calls = Random(seed), list[Call]()
    for tenant, weight in weights.items():
        rate = 2 * TOKENS_PER_S / 1000
        for at_s in arrivals(rate, 0.0, until_s, random):
            num_tokens, num_answered = random.randint(100, 1900), random.randint(8, 200)
            scheduling_key = SchedulingKey(weight=weight)
            calls.append(
                Call(
                    at_s=at_s,
                    tenant=tenant,
                    num_tokens=num_tokens,
                    num_answered=num_answered,
                    scheduling_key=scheduling_key,
                )
            )
    return calls


def service(loads: Sequence[tuple[float, float]], seed: int) -> list[Call]:
    """Calls with objectives, of four tenants. loads: seconds, and how much of the fleet they would use."""
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
    """The trace, so many times faster; its requests have objectives by lot. Its prefixes are not shared."""
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


# What an operation of the router's queues costs on this machine.

NUM_MEASURED: Final = 100_000


def operation_times_us(num_tenants: int, num_each: int, seed: int = 0) -> dict[str, list[float]]:
    """Each of so many, in a queue of that many requests; every operation on one that is chosen by chance."""
    random, queues = Random(seed), TenantQueues()
    scheduling_keys = [SchedulingKey(weight=float(1 + number % 7)) for number in range(num_tenants)]
    requests = [
        Request(request_id="", token_ids=(1,), tenant=f"t{number}", scheduling_key=scheduling_key)
        for number, scheduling_key in enumerate(scheduling_keys)
    ]
    submits = [Submit(request=request) for request in requests]
    waiting = [
        _waiting(submits[number % num_tenants], number, random) for number in range(num_tenants * num_each)
    ]
    for each in waiting:
        queues.add(each)
    return _measure(queues, submits, random)


def _measure(queues: TenantQueues, submits: list[Submit], random: Random) -> dict[str, list[float]]:
    operations = ("add", "first", "take", "remove", "correct", "work before")
    times: dict[str, list[float]] = {operation: [] for operation in operations}
    number = 10**9
    for _ in range(NUM_MEASURED):
        number += 1
        added = _waiting(random.choice(submits), number, random)
        begun = perf_counter_ns()
        queues.add(added)
        times["add"].append((perf_counter_ns() - begun) / 1e3)
        begun = perf_counter_ns()
        first = queues.first()
        times["first"].append((perf_counter_ns() - begun) / 1e3)
        assert first is not None
        begun = perf_counter_ns()
        queues.take(first)
        times["take"].append((perf_counter_ns() - begun) / 1e3)
        begun = perf_counter_ns()
        queues.correct(0, first.tenant, -0.1 * first.work)
        times["correct"].append((perf_counter_ns() - begun) / 1e3)
        begun = perf_counter_ns()
        queues.remove(added.key)
        times["remove"].append((perf_counter_ns() - begun) / 1e3)
        begun = perf_counter_ns()
        queues.work_before(added)
        times["work before"].append((perf_counter_ns() - begun) / 1e3)
    return times


def _waiting(submit: Submit, number: int, random: Random) -> Waiting:
    waiting = Waiting(
        "g", submit, since_s=0.0, due_s=random.uniform(0, 60), work=float(random.randint(10, 4000))
    )
    waiting.key = (f"{number:x}", 0)
    return waiting
