"""The calls of tenants in the cases of bench/tenants/suite.py, and the figures of their outcomes.

Rates are in prompt tokens a second, as a part of what the workers can do together.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from statistics import fmean
from typing import Final, NamedTuple, TypeAlias

import msgspec

from baton.bench.report import Row, at_least, at_most, percentile
from baton.sim.timed.fleet import CallOutcome, ClientCall
from baton.sim.timed.workload import arrivals
from baton.tenants import SchedulingKey, Sla

NUM_VICTIMS: Final = 9
NOISY: Final = "noisy"
BIN_S: Final = 10.0
TTFT_BAR: Final = 1.15
ATTAINMENT_BAR: Final = 0.95
GOODPUT_BAR: Final = 0.9
RECOVERY_BAR_S: Final = 10.0
GOOD_SHARE: Final = 0.95
NO_SLA: Final = Sla()
Prompt: TypeAlias = Callable[[Random, int], tuple[int, ...]]  # draws so many tokens
Size: TypeAlias = Callable[[ClientCall], float]


class TenantWorkload(NamedTuple):
    """The lengths of prompts and answers; victims' prompts are log-normal, other lengths uniform."""

    prompt: Prompt
    sla: Sla
    victim_mean: float
    victim_lognormal: tuple[float, float]
    victim_answers: tuple[int, int]
    longest: int  # prompt; each of the noisy tenant's is as long
    noisy_answer: int
    service_prompts: tuple[int, int]
    service_answers: tuple[int, int]

    def victims(self, tokens_per_s: float, until_s: float, random: Random) -> list[ClientCall]:
        """Return calls of nine equal tenants together, in order of time."""
        calls, rate = list[ClientCall](), tokens_per_s / self.victim_mean / NUM_VICTIMS
        for number in range(NUM_VICTIMS):
            for at_s in arrivals(rate, random, 0.0, until_s):
                num_tokens = round(random.lognormvariate(*self.victim_lognormal))
                lengths = max(16, min(self.longest, num_tokens)), random.randint(*self.victim_answers)
                calls.append(self._call(at_s, f"victim-{number}", *lengths, random, self.sla))
        return sorted(calls, key=lambda call: call.at_s)

    def noisy(self, tokens_per_s: float, until_s: float, random: Random) -> list[ClientCall]:
        """Return calls of a tenth tenant, with long prompts and without objectives."""
        return [
            self._call(at_s, NOISY, self.longest, self.noisy_answer, random)
            for at_s in arrivals(tokens_per_s / self.longest, random, 0.0, until_s)
        ]

    def flood(
        self, weights: dict[str, float], tokens_per_s: float, until_s: float, random: Random
    ) -> list[ClientCall]:
        """Return calls of tenants with these weights, each at this rate."""
        calls = []
        for tenant, weight in weights.items():
            for at_s in arrivals(tokens_per_s / 1000, random, 0.0, until_s):
                lengths = random.randint(100, 1900), random.randint(8, 200)
                call = self._call(at_s, tenant, *lengths, random)
                calls.append(msgspec.structs.replace(call, scheduling_key=SchedulingKey(weight=weight)))
        return calls

    def service(self, loads: Sequence[tuple[float, float]], random: Random) -> list[ClientCall]:
        """Return calls of four tenants with objectives. loads: seconds, and tokens a second."""
        calls, since_s = list[ClientCall](), 0.0
        for span_s, tokens_per_s in loads:
            rate = tokens_per_s / fmean(self.service_prompts)
            for at_s in arrivals(rate, random, since_s, since_s + span_s):
                tenant = f"tenant-{random.randrange(4)}"
                lengths = random.randint(*self.service_prompts), random.randint(*self.service_answers)
                calls.append(self._call(at_s, tenant, *lengths, random, self.sla))
            since_s += span_s
        return calls

    def renewed(self, calls: Sequence[ClientCall], random: Random) -> list[ClientCall]:
        """Return the same calls in order of time, with other prompts as long, so that no prefix is cached."""
        return [
            msgspec.structs.replace(call, token_ids=self.prompt(random, call.num_tokens))
            for call in sorted(calls, key=lambda call: call.at_s)
        ]

    def _call(
        self, at_s: float, tenant: str, num_tokens: int, num_answered: int, random: Random, sla: Sla = NO_SLA
    ) -> ClientCall:
        return ClientCall(
            at_s=at_s,
            token_ids=self.prompt(random, num_tokens),
            num_answered=num_answered,
            max_tokens=4 * num_answered,
            tenant=tenant,
            sla=sla,
        )


def victims_among(outcomes: Sequence[CallOutcome], since_s: float, until_s: float) -> list[CallOutcome]:
    """Return the first requests of the victims that were asked in this span."""
    return [
        each
        for each in outcomes
        if each.call.tenant.startswith("victim") and not each.retry and since_s <= each.asked_s < until_s
    ]


def ttft_s(outcomes: Sequence[CallOutcome], percent: float) -> float:
    """Return a percentile over the answers; inf where there is none."""
    found = [each.ttft_s for each in outcomes if each.first_token_s >= 0]
    return percentile(found, percent) if found else float("inf")


def share_good(outcomes: Sequence[CallOutcome]) -> float:
    """Return the share that met the objectives; 1.0 of none."""
    return fmean(each.is_good for each in outcomes) if outcomes else 1.0


def _one(call: ClientCall) -> float:
    return 1.0


def goodput(
    outcomes: Sequence[CallOutcome],
    since_s: float,
    until_s: float,
    size: Size = _one,
) -> float:
    """Return what was asked in this span and was good, a second. size: of a call; by default its number."""
    good = sum(size(each.call) for each in outcomes if each.is_good and since_s <= each.asked_s < until_s)
    return good / (until_s - since_s)


def goodputs(
    outcomes: Sequence[CallOutcome],
    since_s: float,
    until_s: float,
    size: Size = _one,
) -> list[float]:
    """Return the goodput of each whole span of BIN_S; of a shorter span, of all of it."""
    width_s = min(BIN_S, until_s - since_s)
    starts = [since_s + width_s * number for number in range(int((until_s - since_s) / width_s))]
    return [goodput(outcomes, start_s, start_s + width_s, size) for start_s in starts]


def recovery_s(outcomes: Sequence[CallOutcome], end_s: float, until_s: float, span_s: float) -> float:
    """Return the seconds from `end_s` until nearly all requests of every later span are good."""
    recovered_s = 0.0
    for number in range(int((until_s - end_s) / span_s)):
        since_s = end_s + number * span_s
        if share_good([each for each in outcomes if since_s <= each.asked_s < since_s + span_s]) < GOOD_SHARE:
            recovered_s = (number + 1) * span_s
    return recovered_s


def noisy_rows(ttft_ratio: float, attainment_ratio: float, ttft_note: str, attainment_note: str) -> list[Row]:
    """Return the figures of the victims beside the noisy tenant over those of the victims alone."""
    name = "noisy tenant: victims'"
    return [
        at_most(f"{name} TTFT p99 / alone", ttft_ratio, "x", TTFT_BAR, ttft_note),
        at_least(f"{name} SLO attainment / alone", attainment_ratio, "x", ATTAINMENT_BAR, attainment_note),
    ]


class OverloadSpan(NamedTuple):
    """When the overload began and ended, and until when requests came after it."""

    begin_s: float
    end_s: float
    until_s: float


def overload_rows(
    outcomes: Sequence[CallOutcome],
    peak: float,
    span: OverloadSpan,
    *,
    moment_s: float,
    most_told_s: float,
    most_calls: float | None,
) -> list[Row]:
    """Return goodput during the overload and after it, and the times that refused calls were told.

    moment_s: the spans after the overload. most_told_s: a longer time does not count as told. most_calls: the
    bar of HTTP requests a call.
    """
    during_s = span.begin_s + min(BIN_S, (span.end_s - span.begin_s) / 2)
    least = min(goodputs(outcomes, during_s, span.end_s))
    reasons = Counter(each.refusal or "late" for each in outcomes if not each.is_good)
    others = "not good: " + ", ".join(f"{number} x {reason}" for reason, number in sorted(reasons.items()))
    again_s = recovery_s(outcomes, span.end_s, span.until_s, moment_s)
    refused = [each for each in outcomes if each.refusal]
    told = sum(0 < each.retry_after_s <= most_told_s for each in refused) / max(1, len(refused))
    returned = [each for each in outcomes if each.retry and each.asked_s < span.end_s]
    calls, note = len(outcomes) / max(1, sum(not each.retry for each in outcomes)), "3 if all retried"
    good, returned_note = 100 * share_good(returned), f"{len(returned)} returned"
    return [
        Row("overload: peak goodput", peak, "req/s"),
        at_least("overload: least goodput of any 10 s / peak", least / peak, "x", GOODPUT_BAR, others),
        at_most("overload: until 95 % are good again", again_s, "s", RECOVERY_BAR_S),
        at_least("overload: refused with a time", 100 * told, "%", 100.0, f"{len(refused)} refused"),
        at_most("overload: HTTP requests a call", calls, "", most_calls, note),
        Row("overload: returned during it, and good", good, "%", note=returned_note),
    ]
