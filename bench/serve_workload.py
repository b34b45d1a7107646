"""Requests that a load consists of: how long, and when.

- Random tokens, lengths between bounds. By default 32 requests of 16 to 256 tokens in and 16 to 128 out, with
  another seed each round: the work that other engines were measured with.
- A trace: lengths, moments and shared prefixes of a real service (traces.py).
"""

import json
import random
from collections.abc import Sequence
from typing import Final, NamedTuple

from baton.bench.traces import TraceRequest
from baton.errors import ConfigError

FIRST_TOKEN: Final = 4  # below are the special ones


class Lengths(NamedTuple):
    """Both bounds are reached."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """ "16-256" or "64". ConfigError for anything else."""
        low, _, high = text.partition("-")
        try:
            lengths = cls(int(low), int(high or low))
        except ValueError:
            lengths = cls(0, 0)
        if not 1 <= lengths.low <= lengths.high:
            raise ConfigError(f"lengths: expected LOW-HIGH with 1 <= LOW <= HIGH, got {text!r}")
        return lengths


INPUT: Final = Lengths(16, 256)
OUTPUT: Final = Lengths(16, 128)


class Job(NamedTuple):
    prompt: tuple[int, ...]
    num_tokens: int  # of the answer
    arrival_s: float = 0.0  # after the load begins; for open-loop load

    def body(self, model: str, *, stream: bool, as_text: bool = False) -> bytes:
        """Of a request to /v1/completions. as_text: a word a token, for servers that take no token ids."""
        fields: dict[str, object] = {
            "model": model,
            "prompt": " ".join(f"w{token}" for token in self.prompt) if as_text else self.prompt,
            "max_tokens": self.num_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        if stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(fields).encode()


def random_jobs(
    num_jobs: int,
    seed: int,
    *,
    vocab_size: int,
    num_input: Lengths = INPUT,
    num_output: Lengths = OUTPUT,
) -> list[Job]:
    source = random.Random(seed)
    jobs = []
    for _ in range(num_jobs):
        length, num_tokens = source.randint(*num_input), source.randint(*num_output)
        prompt = tuple(source.randrange(FIRST_TOKEN, vocab_size) for _ in range(length))
        jobs.append(Job(prompt, num_tokens))
    return jobs


def trace_jobs(requests: Sequence[TraceRequest], *, vocab_size: int, speed: float = 1.0) -> list[Job]:
    """Prompts whose leading blocks are equal where the trace says so. speed: 2.0 plays it twice as fast."""
    return [
        Job(_trace_prompt(request, number, vocab_size), request.output_tokens, request.arrival_s / speed)
        for number, request in enumerate(requests)
    ]


def _trace_prompt(request: TraceRequest, number: int, vocab_size: int) -> tuple[int, ...]:
    prompt: list[int] = []
    for block_id in request.block_ids:
        source = random.Random(block_id)
        prompt += [source.randrange(FIRST_TOKEN, vocab_size) for _ in range(request.block_tokens)]
    rest = random.Random(f"own {number}")
    missing = request.input_tokens - len(prompt)
    prompt += [rest.randrange(FIRST_TOKEN, vocab_size) for _ in range(max(0, missing))]
    return tuple(prompt[: request.input_tokens])


def poisson(jobs: Sequence[Job], rate: float, seed: int) -> list[Job]:
    """The same jobs, `rate` a second on average, at moments that know nothing of each other."""
    source, moment_s, timed = random.Random(f"arrivals {seed}"), 0.0, []
    for job in jobs:
        timed.append(job._replace(arrival_s=moment_s))
        moment_s += source.expovariate(rate)
    return timed
