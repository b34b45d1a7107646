"""Load on a server: closed-loop for throughput, open-loop for latency."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from baton.bench.serve_client import Address, Answer, sleep_until
from baton.bench.serve_figures import Bad, Sample, Slo, Summary, streamed, summarise, unary
from baton.bench.serve_workload import FIRST_TOKEN, Job
from baton.errors import ConfigError, PeerGone


class Server(Protocol):
    """What a load is put on: `Client` documents it."""

    @property
    def address(self) -> Address: ...

    async def get(self, path: str) -> Answer: ...

    async def post(self, path: str, body: bytes) -> Answer: ...

    def close(self) -> None: ...


class Shape(NamedTuple):
    """How the jobs are asked for."""

    stream: bool = True
    as_text: bool = False
    concurrency: int | None = None  # closed loop, with as many at once; None: each at its own moment
    slo: Slo = Slo()


class Run(NamedTuple):
    summary: Summary
    samples: list[Sample]
    max_lag_s: float  # by which the client came late with a request, at worst
    said: str = ""  # by the server of the first answer that does not count


class Load:
    """One target's."""

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
        """Every job once, to its end. The duration is from the load's begin to the last answer's end."""
        shape = self._shape
        bodies = [job.body(self._model, stream=shape.stream, as_text=shape.as_text) for job in jobs]
        begin_s = time.perf_counter()
        if shape.concurrency is None:
            await asyncio.gather(
                *(self._when_due(job, body, begin_s) for job, body in zip(jobs, bodies, strict=True))
            )
        else:
            waiting = iter(list(zip(jobs, bodies, strict=True)))

            async def work() -> None:
                for job, body in waiting:
                    await self._one(job, body, time.perf_counter())

            await asyncio.gather(*(work() for _ in range(shape.concurrency)))
        duration_s = max(self._ended_s - begin_s, 1e-9)
        summary = summarise(self._samples, self._failures, duration_s, shape.slo)
        return Run(summary, self._samples, self._max_lag_s, self._said)

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
    """As a server lists it."""

    name: str
    vocab_size: int | None  # None: the server does not say


async def model_of(client: Server) -> Model:
    """The first that the server lists. ConfigError when it lists none, or wants a key."""
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
