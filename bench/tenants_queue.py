"""What an operation of the router's queues costs on this machine."""

from random import Random
from time import perf_counter_ns
from typing import Final

from baton.control import Submit
from baton.request import Request
from baton.router.tenant_queues import TenantQueues, Waiting
from baton.tenancy import Standing

NUM_MEASURED: Final = 100_000


def operation_times_us(num_tenants: int, num_each: int, seed: int = 0) -> dict[str, list[float]]:
    """Each of so many, in a queue of that many requests; every operation on one that is chosen by chance."""
    random, queues = Random(seed), TenantQueues()
    standings = [Standing(weight=float(1 + number % 7)) for number in range(num_tenants)]
    requests = [
        Request(request_id="", token_ids=(1,), tenant=f"t{number}", standing=standing)
        for number, standing in enumerate(standings)
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
