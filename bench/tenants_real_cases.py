"""What tenants ask of real processes, and what they are promised.

Lengths are about half of the simulator's (tenants_cases.py), as far as the model's context lets them be.

Rates are in prompt tokens a second, as what there can be is found in the same run.
No two prompts begin alike.
"""

from collections.abc import Sequence
from random import Random
from typing import Final

from baton.bench.serve_figures import Slo
from baton.bench.serve_workload import FIRST_TOKEN, Job
from baton.bench.tenants_cases import arrivals
from baton.bench.tenants_real_world import Call

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
