"""Load on a server: closed-loop for throughput, open-loop for latency.

The jobs of a load are random tokens with lengths between bounds, or a trace: lengths, moments and shared
prefixes of a real service (bench/traces.py).
"""

import asyncio
import itertools
import json
import random
import time
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from baton.bench.serve.client import Address, Answer, Client, sleep_until
from baton.bench.serve.figures import Bad, Run, Sample, Slo, streamed, unary
from baton.bench.traces import TraceRequest
from baton.errors import ConfigError, PeerGone

FIRST_TOKEN: Final = 4  # below are the special ones


class Lengths(NamedTuple):
    """Bounds of a length, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Read an option, "16-256" or "64". ArgumentTypeError: the text is anything else."""
        low, _, high = text.partition("-")
        try:
            lengths = cls(int(low), int(high or low))
        except ValueError:
            lengths = cls(0, 0)
        if not 1 <= lengths.low <= lengths.high:
            raise ArgumentTypeError(f"lengths: expected LOW-HIGH with 1 <= LOW <= HIGH, got {text!r}")
        return lengths


INPUT: Final = Lengths(16, 256)
OUTPUT: Final = Lengths(16, 128)


class Job(NamedTuple):
    """A prompt, and the length of its answer."""

    prompt: tuple[int, ...]
    num_tokens: int  # of the answer
    arrival_s: float = 0.0  # after the load begins, for open-loop load

    def body(self, model: str, *, stream: bool, as_text: bool = False) -> bytes:
        """Return the body of a completion. as_text: a word a token, for servers that take no token ids."""
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
    """Return random prompts; one seed gives one list."""
    source = random.Random(seed)
    jobs = []
    for _ in range(num_jobs):
        length, num_tokens = source.randint(*num_input), source.randint(*num_output)
        prompt = tuple(source.randrange(FIRST_TOKEN, vocab_size) for _ in range(length))
        jobs.append(Job(prompt, num_tokens))
    return jobs


def trace_jobs(requests: Sequence[TraceRequest], *, vocab_size: int, speed: float = 1.0) -> list[Job]:
    """Return prompts with equal leading blocks where the trace says so. speed: 2.0 halves the time."""
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
    """Return the same jobs with Poisson arrivals, `rate` a second on average."""
    source, moment_s, timed = random.Random(f"arrivals {seed}"), 0.0, []
    for job in jobs:
        timed.append(job._replace(arrival_s=moment_s))
        moment_s += source.expovariate(rate)
    return timed


_REMOTE_DECODE: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class VllmPair:
    """vLLM's own disaggregation: a prefill and a decode server, joined by the client instead of a proxy.

    Each request goes to the prefill server for one token first; the location of its KV in that answer goes to
    the decode server with the request. Without the proxy the rival has one hop less.
    """

    def __init__(self, prefill: Address, decode: Address) -> None:
        self._prefill = Client(prefill)
        self._decode = Client(decode)

    @property
    def address(self) -> Address:
        return self._decode.address

    async def get(self, path: str) -> Answer:
        return await self._decode.get(path)

    async def post(self, path: str, body: bytes) -> Answer:
        """Return the decode server's answer, or that of a prefill server that did not answer 200."""
        fields = json.loads(body)
        first = {**fields, "max_tokens": 1, "stream": False, "kv_transfer_params": _REMOTE_DECODE}
        first.pop("stream_options", None)
        prefilled = await self._prefill.post(path, json.dumps(first).encode())
        if prefilled.status != 200:
            return prefilled
        params = json.loads(prefilled.body).get("kv_transfer_params")
        return await self._decode.post(path, json.dumps({**fields, "kv_transfer_params": params}).encode())

    def close(self) -> None:
        self._prefill.close()
        self._decode.close()


Server: TypeAlias = Client | VllmPair  # under load
EncodedJob: TypeAlias = tuple[Job, bytes]  # with its body
PATIENCE_S: Final = 30.0  # with requests under way when the time is over


class Shape(NamedTuple):
    """The form of the requests."""

    stream: bool = True
    as_text: bool = False
    concurrency: int | None = None  # closed loop with so many at once; None: open loop
    slo: Slo = Slo()


class Load:
    """Puts jobs on one server. Answers are parsed when the load is over, not before."""

    def __init__(self, client: Server, model: str, shape: Shape) -> None:
        self._client = client
        self._model = model
        self._shape = shape
        self._answers: list[tuple[Answer, float, Job]] = []  # with the moment that latencies count from
        self._failures: list[str] = []
        self._max_lag_s = 0.0
        self._ended_s = 0.0

    async def run(self, jobs: Sequence[Job], seconds: float | None = None) -> Run:
        """Run every job once, to its end. The duration is from the load's begin to the last answer's end.

        seconds: a closed loop repeats the jobs until that time is over or the server is gone.
        """
        shape = self._shape
        requests = [(job, job.body(self._model, stream=shape.stream, as_text=shape.as_text)) for job in jobs]
        begin_s = self._ended_s = time.perf_counter()
        if shape.concurrency is None:
            asking = [self._when_due(job, body, begin_s) for job, body in requests]
        else:
            waiting = iter(requests) if seconds is None else self._repeated(requests, begin_s + seconds)
            asking = [self._in_turn(waiting) for _ in range(shape.concurrency)]
        try:
            async with asyncio.timeout(None if seconds is None else seconds + PATIENCE_S):
                await asyncio.gather(*asking)
        except TimeoutError:
            self._failures.append(f"no answer within {PATIENCE_S:g} s")
        return self._read(max(self._ended_s - begin_s, 1e-9))

    def _repeated(self, requests: Sequence[EncodedJob], until_s: float) -> Iterator[EncodedJob]:
        for request in itertools.cycle(requests):
            if self._failures or time.perf_counter() >= until_s:
                return
            yield request

    async def _in_turn(self, waiting: Iterator[EncodedJob]) -> None:
        for job, body in waiting:
            await self._one(job, body, time.perf_counter())

    async def _when_due(self, job: Job, body: bytes, begin_s: float) -> None:
        due_s = begin_s + job.arrival_s
        await sleep_until(due_s)
        self._max_lag_s = max(self._max_lag_s, time.perf_counter() - due_s)
        await self._one(job, body, due_s)

    async def _one(self, job: Job, body: bytes, start_s: float) -> None:
        try:
            self._answers.append((await self._client.post("/v1/completions", body), start_s, job))
        except (PeerGone, OSError) as error:
            self._failures.append(str(error) or type(error).__name__)
        self._ended_s = time.perf_counter()

    def _read(self, duration_s: float) -> Run:
        read, samples, said = streamed if self._shape.stream else unary, list[Sample](), ""
        for answer, start_s, job in self._answers:
            try:
                samples.append(read(answer, start_s, job.num_tokens))
            except Bad as error:
                self._failures.append(str(error))
                said = said or error.said
        return Run(samples, self._failures, duration_s, self._shape.slo, self._max_lag_s, said)


class Model(NamedTuple):
    """The first model that a server lists; `vocab_size` None: the server does not list it."""

    name: str
    vocab_size: int | None


async def model_of(client: Server) -> Model:
    """Ask for the model. ConfigError: the server lists none, or wants a key."""
    try:
        answer = await client.get("/v1/models")
        if answer.status not in (401, 403):
            card = json.loads(answer.body)["data"][0]
            size = card.get("vocab_size")
            return Model(str(card["id"]), size if isinstance(size, int) and size > FIRST_TOKEN else None)
    except (OSError, PeerGone, ValueError, LookupError, TypeError, AttributeError) as error:
        message = f"{client.address.url} lists no model at /v1/models: {error!r}; is it up? Or name --model"
        raise ConfigError(message) from error
    raise ConfigError(f"{client.address.url} wants a key that it knows: --api-key KEY, or BATON_API_KEY")
