"""Load on a server: closed-loop for throughput, open-loop for latency.

The jobs of a load are random tokens with lengths between bounds, or a trace: lengths, moments and shared
prefixes of a real service (sim/timed/workload.py).
"""

import asyncio
import itertools
import json
import random
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from baton.bench.serve.client import Address, Answer, Client, Connection, at_once, sleep_until
from baton.bench.serve.figures import Bad, Run, Sample, Slo, streamed, unary
from baton.errors import ConfigError, PeerGone
from baton.sim.timed.workload import TraceRequest, arrivals

FIRST_TOKEN: Final = 4  # below are the special ones


class LengthBounds(NamedTuple):
    """Bounds of a length, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "LengthBounds":
        """Read an option, "16-256" or "64". ArgumentTypeError: the text is anything else."""
        low, _, high = text.partition("-")
        try:
            lengths = cls(int(low), int(high or low))
        except ValueError:
            lengths = cls(0, 0)
        if not 1 <= lengths.low <= lengths.high:
            raise ArgumentTypeError(f"lengths: expected LOW-HIGH with 1 <= LOW <= HIGH, got {text!r}")
        return lengths


INPUT: Final = LengthBounds(16, 256)
OUTPUT: Final = LengthBounds(16, 128)


class Job(NamedTuple):
    """A prompt, and the length of its answer."""

    prompt: tuple[int, ...]
    num_tokens: int  # of the answer
    arrival_s: float = 0.0  # after the load begins, for open-loop load

    def body(self, model: str, *, stream: bool, asks_ids: bool = False) -> bytes:
        """Return the body of a completion.

        asks_ids: for token ids in the answer. A model without a tokenizer streams no event a token otherwise.
        """
        fields: dict[str, object] = {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.num_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        if stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if asks_ids:
            fields["return_token_ids"] = True
        return json.dumps(fields).encode()


def random_jobs(
    num_jobs: int,
    seed: int,
    *,
    vocab_size: int,
    num_input: LengthBounds = INPUT,
    num_output: LengthBounds = OUTPUT,
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
    moments_s = itertools.chain((0.0,), arrivals(rate, random.Random(f"arrivals {seed}")))
    return [job._replace(arrival_s=at_s) for job, at_s in zip(jobs, moments_s, strict=False)]


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


class Shape(NamedTuple):
    """The form of the requests."""

    stream: bool = True
    asks_ids: bool = False
    concurrency: int | None = None  # closed loop with so many at once; None: open loop
    slo: Slo = Slo()


class Load:
    """Puts jobs on one server."""

    def __init__(self, client: Server, model: str, shape: Shape) -> None:
        self._client = client
        self._model = model
        self._shape = shape
        self._samples: list[Sample] = []
        self._failures: list[str] = []
        self._said = ""
        self._max_lag_s = 0.0
        self._ended_s = 0.0

    async def run(self, jobs: Sequence[Job]) -> Run:
        """Run every job once, to its end. The duration is from the load's begin to the last answer's end."""
        shape = self._shape
        bodies = [job.body(self._model, stream=shape.stream, asks_ids=shape.asks_ids) for job in jobs]
        begin_s = time.perf_counter()
        if shape.concurrency is None:
            await asyncio.gather(
                *(self._when_due(job, body, begin_s) for job, body in zip(jobs, bodies, strict=True))
            )
        else:

            async def one(asked: tuple[Job, bytes]) -> None:
                await self._one(*asked, time.perf_counter())

            await at_once(shape.concurrency, zip(jobs, bodies, strict=True), one)
        duration_s = max(self._ended_s - begin_s, 1e-9)
        return Run(self._samples, self._failures, duration_s, shape.slo, self._max_lag_s, self._said)

    async def _when_due(self, job: Job, body: bytes, begin_s: float) -> None:
        due_s = begin_s + job.arrival_s
        await sleep_until(due_s)
        self._max_lag_s = max(self._max_lag_s, time.perf_counter() - due_s)
        await self._one(job, body, due_s)

    async def _one(self, job: Job, body: bytes, start_s: float) -> None:
        read = streamed if self._shape.stream else unary
        try:
            answer = await self._client.post("/v1/completions", body)
            self._samples.append(read(answer, start_s, job.num_tokens))
        except (Bad, PeerGone, OSError) as error:
            self._failures.append(str(error) or type(error).__name__)
            self._said = self._said or getattr(error, "said", "")
        self._ended_s = time.perf_counter()


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


PATH: Final = "/v1/completions"
NUM_WORDS: Final = 32
PATIENCE_S: Final = 30.0  # with requests under way when the time is over


class Point(NamedTuple):
    """A load of one kind of request from a fixed number of connections."""

    num_tokens: int
    stream: bool
    num_connections: int

    @property
    def name(self) -> str:
        kind = "SSE" if self.stream else "unary"
        return f"{kind}, {self.num_tokens} tokens, {self.num_connections} connections"


def requests_to(address: Address, model: str, point: Point) -> Iterator[bytes]:
    """Yield requests with prompts of words that do not repeat soon."""
    for number in itertools.count():
        words = " ".join(f"w{(number * 7919 + place * 31) % 1000}" for place in range(NUM_WORDS))
        fields: dict[str, object] = {"model": model, "prompt": words, "max_tokens": point.num_tokens}
        fields["ignore_eos"] = True
        if point.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        yield address.post(PATH, json.dumps(fields).encode())


class Hammer:
    """Sends as many requests as a server takes. Answers are parsed when the time is over, not before."""

    def __init__(self, address: Address, model: str, point: Point) -> None:
        self._address = address
        self._point = point
        self._requests = requests_to(address, model, point)
        self._answers: list[Answer] = []
        self._failures: list[str] = []
        self._until_s = 0.0
        self._num_active = 0
        self._all_done = asyncio.Event()

    async def run(self, seconds: float) -> Run:
        """Have every connection ask on until the time is over; rates are over the time until the last end."""
        connections = [await Connection.open(self._address) for _ in range(self._point.num_connections)]
        begin_s = time.perf_counter()
        self._until_s, self._num_active = begin_s + seconds, len(connections)
        for connection in connections:
            self._ask(connection)
        try:
            async with asyncio.timeout(seconds + PATIENCE_S):
                await self._all_done.wait()
        except TimeoutError:
            self._failures.append(f"no answer within {PATIENCE_S:g} s")
        duration_s = time.perf_counter() - begin_s
        for connection in connections:
            connection.close()
        return self._read(duration_s)

    def _ask(self, connection: Connection) -> None:
        connection.send(next(self._requests), self._asked_by(connection))

    def _asked_by(self, connection: Connection) -> Callable[[Answer | PeerGone], None]:
        def done(answer: Answer | PeerGone) -> None:
            if isinstance(answer, PeerGone):
                self._failures.append(str(answer))
            else:
                self._answers.append(answer)
            if connection.is_open and time.perf_counter() < self._until_s:
                self._ask(connection)
                return
            self._num_active -= 1
            if not self._num_active:
                self._all_done.set()

        return done

    def _read(self, duration_s: float) -> Run:
        read, samples = streamed if self._point.stream else unary, []
        for answer in self._answers:
            try:
                samples.append(read(answer, answer.sent_s, self._point.num_tokens))
            except Bad as error:
                self._failures.append(str(error))
        return Run(samples, self._failures, duration_s)
