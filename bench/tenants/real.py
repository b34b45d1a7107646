"""Whether tenants keep out of each other's way where all is real: processes of `baton serve`, HTTP and keys.

One prefill and one decode worker of `tiny`, a router, a gateway and the client share this machine's cores. So
every load is a part of what they were found to do together, in the same run. And a noisy tenant costs others
some time whoever orders the work: its requests have to be read, and the other core is never idle. How much,
the third load of each round says: the same requests, all refused at the door, and all cores busy. What runs
has to wait for a core, too, where both workers are busy and gateway, router and client want one: how much
longer it takes by that, the kernel says of each load.
"""

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Final, NamedTuple

from baton.bench.report import Row, at_least, at_most
from baton.bench.serve.figures import Slo, quantile
from baton.bench.serve.load import FIRST_TOKEN, Job
from baton.bench.tenants.cases import arrivals
from baton.bench.tenants.idle_load import busy_cores
from baton.bench.tenants.real_world import Call, Outcome, Server, serving

# What tenants ask of real processes, and what they are promised.
#
# Lengths are about half of the simulator's (bench/tenants/cases.py), as far as the model's context allows.
#
# Rates are in prompt tokens a second, as what there can be is found in the same run.
# No two prompts begin alike.

VOCAB_SIZE: Final = 1024
SLO: Final = Slo(ttft_s=2.0, tpot_s=0.2)
VICTIMS: Final = tuple(f"victim-{number}" for number in range(9))
VICTIM_TOKENS: Final = 850  # a prompt, on average
NOISY: Final = "noisy"
NOISY_TOKENS: Final = 3900
STOPPED: Final = "stopped"  # asks as the noisy one does, and is over its quota with the first request
SERVICE: Final = tuple(f"tenant-{number}" for number in range(4))
SERVICE_TOKENS: Final = 900
SLOS: Final = dict.fromkeys((*VICTIMS, *SERVICE), SLO) | {NOISY: Slo(), STOPPED: Slo()}


def victims(tokens_per_s: float, until_s: float, random: Random) -> list[Call]:
    """What several equal tenants ask, together."""
    at_s = arrivals(tokens_per_s / VICTIM_TOKENS, 0.0, until_s, random)
    return [
        _call(random.choice(VICTIMS), each_s, _length(random), random.randint(4, 16), random)
        for each_s in at_s
    ]


def noisy(tokens_per_s: float, until_s: float, random: Random) -> list[Call]:
    """What one more asks, in long prompts."""
    at_s = arrivals(tokens_per_s / NOISY_TOKENS, 0.0, until_s, random)
    return [_call(NOISY, each_s, NOISY_TOKENS, 8, random) for each_s in at_s]


def renewed(calls: Sequence[Call], random: Random) -> list[Call]:
    """The same with other prompts, as long: what was computed before is of no use to them."""
    return [_call(tenant, job.arrival_s, len(job.prompt), job.num_tokens, random) for tenant, job in calls]


def service(loads: Sequence[tuple[float, float]], random: Random) -> list[Call]:
    """Of four tenants with objectives. loads: for how many seconds, how many tokens a second."""
    calls, since_s = list[Call](), 0.0
    for span_s, tokens_per_s in loads:
        for at_s in arrivals(tokens_per_s / SERVICE_TOKENS, since_s, since_s + span_s, random):
            num_tokens, num_answered = random.randint(120, 1680), random.randint(4, 32)
            calls.append(_call(random.choice(SERVICE), at_s, num_tokens, num_answered, random))
        since_s += span_s
    return calls


def _length(random: Random) -> int:
    return max(16, min(NOISY_TOKENS, round(random.lognormvariate(6.45, 0.8))))


def _call(tenant: str, at_s: float, num_tokens: int, num_answered: int, random: Random) -> Call:
    prompt = tuple(random.choices(range(FIRST_TOKEN, VOCAB_SIZE), k=num_tokens))
    return Call(tenant, Job(prompt, num_answered, at_s))


VICTIM_LOAD: Final = 0.5  # of what there can be
TIMES_SHARE: Final = 50.0
LOADS: Final = (0.7, 1.0, 1.3, 1.6)  # of which one is the peak
OVERLOAD: Final = 3.0
AFTER: Final = 0.5
AT_ONCE: Final = 8
MOST_TOKENS: Final = 60_000  # of prompts, to find what there can be
WARM_S: Final = 2.0  # of each load, which no figure is of
GRACE_S: Final = 5.0  # after a load, for its last answers
BIN_S: Final = 10.0
MOMENT_S: Final = 2.0


class Size(NamedTuple):
    """How long it takes."""

    rounds: int = 9  # a p99 is of two or three requests of each
    round_s: float = 16.0
    point_s: float = 12.0  # of a load that may be the peak
    overload_s: float = 60.0
    after_s: float = 20.0


class Pair(NamedTuple):
    """The same victims' first requests, one by one."""

    alone: list[Outcome]
    sticky_worker: list[Outcome]  # the noisy tenant
    apart: list[Outcome]  # from what the noisy tenant has computed; all else is there
    stretches: Mapping[str, float] = {}  # of each: how much longer all took for want of a core

    @property
    def ttft_ratio(self) -> float:
        return ttft_p99_s(self.sticky_worker) / ttft_p99_s(self.alone)

    @property
    def least_ttft_ratio(self) -> float:
        return ttft_p99_s(self.apart) / ttft_p99_s(self.alone)

    @property
    def stretch_ratio(self) -> float:
        return self.stretches.get("beside", 1.0) / self.stretches.get("alone", 1.0)

    @property
    def kept_ratio(self) -> float:
        return kept(self.sticky_worker) / kept(self.alone)


class Overload(NamedTuple):
    points: list[list[Outcome]]  # loads of which one is the peak, some before and some after the overload
    outcomes: list[Outcome]
    size: Size


async def measure(size: Size, seed: int) -> tuple[list[Pair], Overload]:
    """WorkerLost when `baton serve` does not come up."""
    with tempfile.TemporaryDirectory() as folder:
        async with serving(SLOS, Path(folder), [STOPPED]) as server:
            await _most(server, "victims", Random(seed))  # workers have not met their shapes before
            pairs = [await _pair(server, size, Random(f"{seed} {number}")) for number in range(size.rounds)]
            overload = await _overload(server, size, Random(seed))
    return pairs, overload


async def _pair(server: Server, size: Size, random: Random) -> Pair:
    most, until_s = await _most(server, "victims", random), WARM_S + size.round_s
    calls = victims(VICTIM_LOAD * most, until_s, random)
    flood = noisy(TIMES_SHARE * most / (len(VICTIMS) + 1), until_s, random)
    stopped = [call._replace(tenant=STOPPED) for call in flood]
    loads = {"alone": calls, "beside": calls + flood, "apart": calls + stopped}
    found, stretches = {}, {}
    for name in random.sample(sorted(loads), len(loads)):
        load = renewed(sorted(loads[name], key=lambda call: call.job.arrival_s), random)
        async with busy_cores() if name == "apart" else nullcontext():
            before = server.core_times()
            outcomes = await server.load(load, until_s + GRACE_S)
            stretches[name] = server.core_times().stretch_since(before)
        found[name] = [
            each
            for each in outcomes
            if each.call.tenant in VICTIMS and not each.retry and each.asked_s >= WARM_S
        ]
        await server.settle(calls[0])
    return Pair(**found, stretches=stretches)


async def _overload(server: Server, size: Size, random: Random) -> Overload:
    most = await _most(server, "service", random)

    async def points() -> list[list[Outcome]]:
        found = []
        for load in LOADS:
            span_s = WARM_S + size.point_s
            outcomes = await server.load(service([(span_s, load * most)], random), span_s + GRACE_S)
            found.append([each for each in outcomes if each.asked_s >= WARM_S])
        return found

    before = await points()
    calls = service([(size.overload_s, OVERLOAD * most), (size.after_s, AFTER * most)], random)
    outcomes = await server.load(calls, size.overload_s + size.after_s + GRACE_S)
    await server.settle(calls[0])
    return Overload(before + await points(), outcomes, size)


async def _most(server: Server, kind: str, random: Random) -> float:
    """Prompt tokens a second that there can be now."""
    calls: list[Call]
    calls = victims(MOST_TOKENS, 1.0, random) if kind == "victims" else service([(1.0, MOST_TOKENS)], random)
    return await server.most(calls, AT_ONCE)


# What came of it.
def noisy_rows(pairs: Sequence[Pair]) -> list[Row]:
    alone = [each for pair in pairs for each in pair.alone]
    sticky_worker = [each for pair in pairs for each in pair.sticky_worker]
    apart = [each for pair in pairs for each in pair.apart]
    p99s = f"all: {ttft_p99_s(sticky_worker):.3f} s, alone {ttft_p99_s(alone):.3f} s; {len(alone)} requests"
    parts = f"{kept(sticky_worker):.3f} of all, alone {kept(alone):.3f}"
    halves = f"{_ttft_s(sticky_worker, 50):.3f} s, alone {_ttft_s(alone, 50):.3f} s"
    ratio, least, kept_ratio = (
        median(pair.ttft_ratio for pair in pairs),
        median(pair.least_ttft_ratio for pair in pairs),
        median(pair.kept_ratio for pair in pairs),
    )
    leasts = f"{ttft_p99_s(apart):.3f} s; its requests refused at the door, all cores busy"
    stretch = median(pair.stretch_ratio for pair in pairs)
    half = median(_ttft_s(pair.sticky_worker, 50) / _ttft_s(pair.alone, 50) for pair in pairs)
    return [
        at_most("noisy tenant: victims' TTFT p99 / alone", ratio, "x", 1.15, p99s),
        Row("noisy tenant: the machine's part of that", least, "x", note=leasts),
        Row("noisy tenant: all it runs takes longer / alone", stretch, "x", note="for want of a core"),
        Row("noisy tenant: victims' TTFT p50 / alone", half, "x", note=halves),
        at_least("noisy tenant: victims' SLO attainment / alone", kept_ratio, "x", 0.95, parts),
    ]


def overload_rows(overload: Overload) -> list[Row]:
    outcomes, size = overload.outcomes, overload.size
    end_s = size.overload_s
    peak = max(_num_good(point) / size.point_s for point in overload.points)
    during = goodputs(outcomes, min(BIN_S, end_s / 2), end_s)
    good_again_s = recovery_s(outcomes, end_s, end_s + size.after_s)
    refused = [each for each in outcomes if each.is_refused]
    told = sum(each.is_told for each in refused) / max(1, len(refused))
    num_calls = sum(not each.retry for each in outcomes)
    returned = [each for each in outcomes if each.retry and each.asked_s < end_s]
    statuses = Counter(each.status for each in outcomes if not each.is_good(SLO))
    others = "not good: " + ", ".join(f"{num} x {status}" for status, num in sorted(statuses.items()))
    return [
        Row("overload: peak goodput", peak, "req/s", note=f"of loads {LOADS[0]:g} to {LOADS[-1]:g}"),
        at_least("overload: least goodput of any 10 s / peak", min(during) / peak, "x", 0.9, others),
        at_most("overload: until 95 % are good again", good_again_s, "s", 10.0),
        at_least("overload: refused with a time", 100 * told, "%", 100.0, f"{len(refused)} refused"),
        Row("overload: HTTP requests a call", len(outcomes) / max(1, num_calls), "", note="3 if all retried"),
        Row(
            "overload: returned during it, and good",
            100 * kept(returned),
            "%",
            note=f"{len(returned)} returned",
        ),
    ]


def goodputs(outcomes: Sequence[Outcome], since_s: float, until_s: float) -> list[float]:
    """Good requests a second, in spans of BIN_S by when they were asked; a rest is left out."""
    num_bins = max(1, int((until_s - since_s) / BIN_S))
    width_s = min(BIN_S, until_s - since_s)
    counts = Counter(int((each.asked_s - since_s) // width_s) for each in outcomes if each.is_good(SLO))
    return [counts[number] / width_s for number in range(num_bins)]


def recovery_s(outcomes: Sequence[Outcome], end_s: float, until_s: float) -> float:
    """From the overload's end, until of what is asked in every later MOMENT_S 95 % are good."""
    recovered_s = 0.0
    for number in range(int((until_s - end_s) / MOMENT_S)):
        since_s = end_s + number * MOMENT_S
        span = [each for each in outcomes if since_s <= each.asked_s < since_s + MOMENT_S]
        if span and kept(span) < 0.95:
            recovered_s = (number + 1) * MOMENT_S
    return recovered_s


def kept(outcomes: Sequence[Outcome]) -> float:
    """How many of one keep their objectives."""
    return fmean(each.is_good(SLO) for each in outcomes) if outcomes else 1.0


def ttft_p99_s(outcomes: Sequence[Outcome]) -> float:
    return _ttft_s(outcomes, 99)


def _ttft_s(outcomes: Sequence[Outcome], percent: float) -> float:
    """Of those that have an answer; inf where none has."""
    found = [each.sample.ttft_s for each in outcomes if each.sample is not None]
    return quantile(found, percent) if found else float("inf")


def _num_good(outcomes: Sequence[Outcome]) -> int:
    return sum(each.is_good(SLO) for each in outcomes)


def as_json(pairs: Sequence[Pair], overload: Overload) -> dict[str, object]:
    """What the rows are made of."""
    end_s = overload.size.overload_s + overload.size.after_s
    return {
        "ttft_p99_alone_s": [ttft_p99_s(pair.alone) for pair in pairs],
        "ttft_p99_beside_s": [ttft_p99_s(pair.sticky_worker) for pair in pairs],
        "ttft_p99_apart_s": [ttft_p99_s(pair.apart) for pair in pairs],
        "stretches": [dict(pair.stretches) for pair in pairs],
        "goodput_of_points": [_num_good(point) / overload.size.point_s for point in overload.points],
        "goodput_every_10_s": goodputs(overload.outcomes, 0.0, end_s),
    }
