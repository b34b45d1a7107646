"""Tenants of real processes: the cost of a noisy tenant to the others, and goodput under overload.

One prefill and one decode worker of `tiny`, a router, a gateway and the client share this machine's cores.
So every load is a part of what they could do together in the same run. A noisy tenant costs the others some
time in any order of work: its requests must be read, and the other core is never idle.

Clients behave as openai-python does: a refused call comes again after the time that it was told, or after
half a second and then one, twice at most, and not if it is told not to. The times of a call count from when
it was due: a call that a full server delays is late all the same.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from random import Random
from statistics import median
from typing import Final, NamedTuple

from baton.bench.clusters import MODEL, served_cluster, tenants_yaml
from baton.bench.report import Report, Row
from baton.bench.serve.client import Address, Client, at_once, sleep_until
from baton.bench.serve.figures import Bad, streamed
from baton.bench.serve.load import FIRST_TOKEN, Job
from baton.bench.tenants.calls import (
    NOISY,
    NUM_VICTIMS,
    OverloadSpan,
    TenantWorkload,
    goodput,
    goodputs,
    noisy_rows,
    overload_rows,
    share_good,
    ttft_s,
    victims_among,
)
from baton.errors import PeerGone
from baton.sim.timed.fast import MAX_RETRIES
from baton.sim.timed.fleet import CallOutcome, ClientCall
from baton.tenants import Sla

STEP_TOKENS: Final = 256  # between two steps a worker chooses the tenant that is due
OPTIONS: Final = (
    *("--runtime", "local", "--kv-cache-memory", "256MiB"),
    *("--max-num-batched-tokens", str(STEP_TOKENS), "--drain-timeout", "1"),
)
MAX_HONOURED_S: Final = 60.0  # a longer retry-after is not believed
BACK_OFF_S: Final = 0.5
MOST_TOLD_S: Final = 600.0
IDLE_S: Final = 0.3
VOCAB_SIZE: Final = 1024
# Lengths are about half of the simulation's: the model's context is short. No two prompts begin alike.
WORKLOAD: Final = TenantWorkload(
    prompt=lambda random, num_tokens: tuple(random.choices(range(FIRST_TOKEN, VOCAB_SIZE), k=num_tokens)),
    sla=Sla(ttft_ms=2000.0, tpot_ms=200.0),
    victim_mean=850,
    victim_lognormal=(6.45, 0.8),
    victim_answers=(4, 16),
    longest=3900,
    noisy_answer=8,
    service_prompts=(120, 1680),
    service_answers=(4, 32),
)
SLAS: Final = (
    {f"victim-{number}": WORKLOAD.sla for number in range(NUM_VICTIMS)}
    | {f"tenant-{number}": WORKLOAD.sla for number in range(4)}
    | {NOISY: Sla()}
)
VICTIM_LOAD: Final = 0.5  # of the capacity
TIMES_SHARE: Final = 50.0
LOADS: Final = (0.7, 1.0, 1.3, 1.6)  # one of which is the peak
OVERLOAD: Final = 3.0
AFTER: Final = 0.5
AT_ONCE: Final = 8
MOST_TOKENS: Final = 60_000  # of prompts, to find the capacity
WARM_S: Final = 2.0  # of each load, in which nothing counts
GRACE_S: Final = 5.0  # after a load, for its last answers
MOMENT_S: Final = 2.0


class TenantServer:
    """A running `baton serve`, asked with the keys of its tenants."""

    def __init__(self, url: str, keys: Mapping[str, str]) -> None:
        self._clients = {tenant: Client(Address(url, key)) for tenant, key in keys.items()}

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()

    async def load(self, calls: Sequence[ClientCall], until_s: float) -> list[CallOutcome]:
        """Make every call when it is due; give up calls that have not ended `until_s` after the begin."""
        found: list[CallOutcome] = []
        begin_s = time.perf_counter()
        with suppress(TimeoutError):
            async with asyncio.timeout(until_s), asyncio.TaskGroup() as group:
                for call, body in [(call, _body(call)) for call in calls]:
                    group.create_task(self._call(call, body, begin_s, found))
        return found

    async def capacity(self, calls: Sequence[ClientCall]) -> float:
        """Return the prompt tokens a second that a closed loop of AT_ONCE of these calls reaches."""
        begin_s = time.perf_counter()
        outcomes = await at_once(AT_ONCE, calls, self._ask_now)
        seconds = time.perf_counter() - begin_s
        return sum(each.call.num_tokens for each in outcomes if each.ended_s >= 0) / seconds

    async def settle(self, call: ClientCall) -> None:
        """Wait until calls that were given up are out of the way: this call is answered at once."""
        while not ((outcome := await self._ask_now(call)).ended_s >= 0 and outcome.ttft_s < IDLE_S):
            await asyncio.sleep(IDLE_S)

    async def _ask_now(self, call: ClientCall) -> CallOutcome:
        outcome = CallOutcome(call=call, asked_s=0.0)
        await self._ask(outcome, _body(call), time.perf_counter())
        return outcome

    async def _call(self, call: ClientCall, body: bytes, begin_s: float, found: list[CallOutcome]) -> None:
        due_s = begin_s + call.at_s
        for retry in range(MAX_RETRIES + 1):
            await sleep_until(due_s)
            outcome = CallOutcome(call=call, asked_s=due_s - begin_s, retry=retry)
            found.append(outcome)  # also where the load is over before the answer
            should_retry = await self._ask(outcome, body, due_s)
            if not outcome.refusal or not should_retry:
                return
            is_believed = 0 < outcome.retry_after_s <= MAX_HONOURED_S
            wait_s = outcome.retry_after_s if is_believed else BACK_OFF_S * 2**retry
            due_s = time.perf_counter() + wait_s

    async def _ask(self, outcome: CallOutcome, body: bytes, due_s: float) -> bool:
        """Ask, and complete the outcome; return whether a refused call may come again."""
        call, should_retry = outcome.call, True
        try:
            answer = await self._clients[call.tenant].post("/v1/completions", body)
            if answer.is_refusal:
                outcome.refusal, should_retry = str(answer.status), answer.should_retry != "false"
                outcome.retry_after_s = answer.retry_after_s
            sample = streamed(answer, due_s, call.num_answered)
            outcome.first_token_s = outcome.asked_s + sample.ttft_s
            outcome.ended_s = outcome.asked_s + sample.e2el_s
        except (Bad, PeerGone):
            pass
        return should_retry


def _body(call: ClientCall) -> bytes:
    return Job(tuple(call.token_ids), call.num_answered).body(MODEL, stream=True)


@asynccontextmanager
async def serving(slas: Mapping[str, Sla]) -> AsyncIterator[TenantServer]:
    """Run a cluster for these tenants and objectives. WorkerLost: it does not come up."""
    keys = {tenant: secrets.token_hex(16) for tenant in slas}
    async with served_cluster(OPTIONS, prefill=1, decode=1, tenants=tenants_yaml(keys, slas)) as cluster:
        with closing(TenantServer(cluster.url, keys)) as server:
            yield server


class Size(NamedTuple):
    """The number of rounds, and the lengths of the loads."""

    rounds: int = 9  # the p99 of a round is of two or three requests
    round_s: float = 16.0
    point_s: float = 12.0  # of a load that may be the peak
    overload_s: float = 60.0
    after_s: float = 20.0


class Pair(NamedTuple):
    """The first requests of the victims in one round, by load."""

    alone: list[CallOutcome]
    beside: list[CallOutcome]  # beside the noisy tenant


async def measure_real(size: Size, seed: int, report: Report) -> None:
    """Measure both cases. WorkerLost: `baton serve` does not come up."""
    async with serving(SLAS) as server:
        report.tell("warming up")
        await server.capacity(_victims(Random(seed)))  # the first prompts of each length are slow
        pairs = []
        for number in range(size.rounds):
            report.tell(f"noisy tenant, round {number + 1} of {size.rounds}", number / (size.rounds + 5))
            pairs.append(await _pair(server, size, Random(f"{seed} {number}")))
        report.rows += pair_rows(pairs)
        report.tell("overload", size.rounds / (size.rounds + 5))
        await _overload(server, size, Random(seed), report)
    report.extra |= {
        f"ttft_p99_{name}_s": [ttft_s(getattr(pair, name), 99) for pair in pairs] for name in Pair._fields
    }


async def _pair(server: TenantServer, size: Size, random: Random) -> Pair:
    capacity, until_s = await server.capacity(_victims(random)), WARM_S + size.round_s
    calls = WORKLOAD.victims(VICTIM_LOAD * capacity, until_s, random)
    noise = WORKLOAD.noisy(TIMES_SHARE * capacity / (NUM_VICTIMS + 1), until_s, random)
    loads, found = {"alone": calls, "beside": calls + noise}, {}
    for name in random.sample(sorted(loads), len(loads)):
        outcomes = await server.load(WORKLOAD.renewed(loads[name], random), until_s + GRACE_S)
        found[name] = victims_among(outcomes, WARM_S, until_s)
        await server.settle(calls[0])
    return Pair(**found)


async def _overload(server: TenantServer, size: Size, random: Random, report: Report) -> None:
    capacity = await server.capacity(WORKLOAD.service([(1.0, MOST_TOKENS)], random))

    async def points() -> list[float]:
        """Return the goodput at loads one of which is the peak."""
        found = []
        for load in LOADS:
            until_s = WARM_S + size.point_s
            calls = WORKLOAD.service([(until_s, load * capacity)], random)
            found.append(goodput(await server.load(calls, until_s + GRACE_S), WARM_S, until_s))
        return found

    found = await points()
    loads = [(size.overload_s, OVERLOAD * capacity), (size.after_s, AFTER * capacity)]
    calls, until_s = WORKLOAD.service(loads, random), size.overload_s + size.after_s
    outcomes = await server.load(calls, until_s + GRACE_S)
    await server.settle(calls[0])
    found += await points()
    span = OverloadSpan(0.0, size.overload_s, until_s)
    report.rows += overload_rows(
        outcomes, max(found), span, moment_s=MOMENT_S, most_told_s=MOST_TOLD_S, most_calls=None
    )
    report.extra |= {"goodput_of_points": found, "goodput_every_10_s": goodputs(outcomes, 0.0, until_s)}


def _victims(random: Random) -> list[ClientCall]:
    """Return calls of the victims to find the capacity with."""
    return WORKLOAD.victims(MOST_TOKENS, 1.0, random)


def pair_rows(pairs: Sequence[Pair]) -> list[Row]:
    """Return medians over the rounds of the ratios to the victims alone."""

    def ratio(percent: float) -> float:
        return median(ttft_s(pair.beside, percent) / ttft_s(pair.alone, percent) for pair in pairs)

    alone, beside = ([each for pair in pairs for each in getattr(pair, name)] for name in Pair._fields)
    p99s = f"all: {ttft_s(beside, 99):.3f} s, alone {ttft_s(alone, 99):.3f} s; {len(alone)} requests"
    halves = f"{ttft_s(beside, 50):.3f} s, alone {ttft_s(alone, 50):.3f} s"
    shares = f"{share_good(beside):.3f} of all, alone {share_good(alone):.3f}"
    attainment = median(share_good(pair.beside) / share_good(pair.alone) for pair in pairs)
    return [
        *noisy_rows(ratio(99), attainment, p99s, shares),
        Row("noisy tenant: victims' TTFT p50 / alone", ratio(50), "x", note=halves),
    ]
