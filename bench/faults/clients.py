"""Clients of a cluster of the tiny model, which compare every answer.

1. A call streams with resumable events, asks for a whole answer, or hangs up in the middle, by chance.
2. A connection that breaks or is refused means that a gateway died. The client resumes a stream with the id
   of its last event, and asks anything else again, at whichever gateway the port leads to.
3. A refused call is asked again after the time that the refusal names. A call ends `answered`, `cancelled`,
   `wrong` or `lost`: an error within a stream, another status, or no end within MAX_CALL_S.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any, Final, NamedTuple

import msgspec

from baton.bench.clusters import MODEL
from baton.bench.report import Row, at_most
from baton.bench.serve.client import Address, Answer, Connection
from baton.bench.serve.figures import events_of
from baton.cluster.offline.llm import LLM
from baton.request import SamplingParams

VOCAB_SIZE: Final = 1024
NUM_QUESTIONS: Final = 60
NUM_DOCUMENTS: Final = 6
DOCUMENT_TOKENS: Final = 240
MAX_TOKENS: Final = (4, 24, 96, 200)
STREAM_SHARE, CANCEL_SHARE = 0.65, 0.15  # of all calls; of the streams, calls that hang up
CANCEL_S: Final = (0.02, 2.0)
MAX_CALL_S: Final = 150.0
RETRY_S: Final = 0.5
MAX_RETRY_S: Final = 10.0  # a longer Retry-After is cut to this


class Question(NamedTuple):
    """A completion to ask for, and the tokens of the right answer."""

    body: dict[str, Any]
    golden: list[int]


class Lost(Exception):
    """A call without a proper end."""


@dataclass
class _Stream:
    """One stream over all its connections."""

    token_ids: list[int] = field(default_factory=list)
    moments_s: list[float] = field(default_factory=list)  # of events with tokens
    last_id: str = ""
    is_done: bool = False

    def take(self, answer: Answer) -> None:
        """Read the whole events of one connection. Lost: one of them is an error."""
        for event in events_of(answer.pieces, may_be_cut=True):
            self.last_id = event.id or self.last_id
            if event.content is None:
                self.is_done = True
                continue
            if "error" in event.content:
                reason = event.content["error"]
                raise Lost(f"an error in a stream after {len(self.token_ids)} tokens: {reason}")
            for choice in event.content.get("choices") or ():
                if token_ids := choice.get("token_ids") or []:
                    self.token_ids += token_ids
                    self.moments_s.append(event.moment_s)


def make_questions(seed: int, max_tokens: Sequence[int] = MAX_TOKENS) -> list[Question]:
    """Return questions about documents, greedy and seeded in turns, each answered once by one engine."""
    rng = random.Random(f"{seed} questions")
    documents = [_tokens(rng, DOCUMENT_TOKENS) for _ in range(NUM_DOCUMENTS)]
    questions = []
    with LLM(MODEL, cache={"kv_cache_memory_bytes": 64 << 20}) as llm:
        for number in range(NUM_QUESTIONS):
            prompt = documents[number % NUM_DOCUMENTS][: rng.choice((0, 120, 240))] + _tokens(rng, 20)
            sampling = {
                "max_tokens": rng.choice(max_tokens),
                "temperature": float(number % 2),
                "seed": number,
                "ignore_eos": True,
            }
            (answer,) = llm.generate([prompt], msgspec.convert(sampling, SamplingParams))
            body = {"model": MODEL, "prompt": prompt, "return_token_ids": True, **sampling}
            questions.append(Question(body, list(answer.outputs[0].token_ids)))
    return questions


class Clients:
    """Some clients of one cluster; the counts and times are of all calls since the beginning."""

    def __init__(
        self,
        url: str,
        questions: Sequence[Question],
        seed: int,
        num_clients: int,
        keys: Sequence[str] = ("",),
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.complaints: list[str] = []
        self.gaps_s: list[float] = []  # the longest gap of each stream after its first token
        self.waits_s: list[float] = []  # for the first token of each stream
        self._addresses = [Address(url, key) for key in keys]
        self._questions = questions
        self._rngs = [random.Random(f"{seed} client {number}") for number in range(num_clients)]
        self._begin_s = time.perf_counter()

    @asynccontextmanager
    async def asking(self, rest_s: float = 0.0) -> AsyncIterator[None]:
        """Ask until the block ends, and `rest_s` before and after it; then wait for the last answers."""
        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for rng in self._rngs:
                group.create_task(self._ask_on(rng, is_over))
            try:
                await asyncio.sleep(rest_s)
                yield
                await asyncio.sleep(rest_s)
            finally:
                is_over.set()

    async def run(self, seconds: float) -> None:
        """Ask for so long, and read every answer to its end."""
        async with self.asking():
            await asyncio.sleep(seconds)

    async def time_first_token(self) -> float:
        """Ask one more question; return the seconds until its first token. Lost: there was none."""
        await self._stream(self._addresses[0], self._questions[0])
        return self.waits_s[-1]

    @property
    def num_compared(self) -> int:
        """Answers that were read to their end."""
        return self.outcomes["answered"] + self.outcomes["wrong"]

    @property
    def num_failed(self) -> int:
        """Lost calls and broken connections, for faults that may break no connection."""
        return self.outcomes["lost"] + self.outcomes["resumed"] + self.outcomes["asked again"]

    @property
    def tally(self) -> str:
        """The counts of all outcomes in words."""
        return ", ".join(f"{number} {name}" for name, number in sorted(self.outcomes.items()))

    def answer_rows(self, name: str, note: str = "") -> list[Row]:
        """Return the calls that failed, and the answers with wrong tokens."""
        unit, complaints = f"of {self.outcomes.total()}", "; ".join(self.complaints[:3])
        return [
            at_most(f"{name}: failed", self.num_failed, unit, 0, complaints),
            at_most(f"{name}: wrong", self.outcomes["wrong"], "", 0, note or self.tally),
        ]

    async def _ask_on(self, rng: random.Random, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            address, question = rng.choice(self._addresses), rng.choice(self._questions)
            streams, hangs_up = rng.random() < STREAM_SHARE, rng.random() < CANCEL_SHARE
            cancel_s = rng.uniform(*CANCEL_S)
            try:
                async with asyncio.timeout(MAX_CALL_S):
                    if streams and hangs_up:
                        await self._hang_up(address, question, cancel_s)
                    elif streams:
                        await self._stream(address, question)
                    else:
                        await self._whole(address, question)
            except Lost as error:
                self._complain("lost", str(error))
            except TimeoutError:
                self._complain("lost", f"no end within {MAX_CALL_S:g} s")

    def _complain(self, outcome: str, text: str) -> None:
        self.outcomes[outcome] += 1
        self.complaints.append(f"{time.perf_counter() - self._begin_s:.0f} s: {outcome}: {text}")

    def _compare(self, question: Question, token_ids: list[int]) -> None:
        golden = question.golden
        if token_ids == golden:
            self.outcomes["answered"] += 1
            return
        pairs = zip(token_ids, golden, strict=False)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        self._complain("wrong", f"{same} tokens agree of {len(token_ids)}, expected {len(golden)}")

    async def _whole(self, address: Address, question: Question) -> None:
        while True:
            answer, is_broken = await self._post(address, question.body)
            if is_broken:
                self.outcomes["asked again"] += 1
            elif answer.status == 200:
                break
            else:
                await self._wait_to_retry(answer)
        self._compare(question, json.loads(answer.body)["choices"][0]["token_ids"])

    async def _stream(self, address: Address, question: Question) -> None:
        stream, begin_s = _Stream(), time.perf_counter()
        while not stream.is_done:
            header = f"last-event-id: {stream.last_id}\r\n" if stream.last_id else ""
            answer, is_broken = await self._post(address, _streamed(question), header)
            if answer.status == 200:
                stream.take(answer)
            if is_broken:
                self.outcomes["resumed" if stream.last_id else "asked again"] += 1
            elif answer.status != 200:
                await self._wait_to_retry(answer)
            elif not stream.is_done:
                raise Lost("a stream ended without [DONE]")
        moments_s = stream.moments_s
        self.waits_s.append(moments_s[0] - begin_s if moments_s else 0.0)
        self.gaps_s.append(max((after - before for before, after in pairwise(moments_s)), default=0.0))
        self._compare(question, stream.token_ids)

    async def _hang_up(self, address: Address, question: Question, after_s: float) -> None:
        """Hang up in the middle of a stream; one that ends earlier counts like any other."""
        try:
            async with asyncio.timeout(after_s):
                await self._stream(address, question)
        except TimeoutError:
            self.outcomes["cancelled"] += 1

    async def _post(self, address: Address, body: dict[str, Any], header: str = "") -> tuple[Answer, bool]:
        """Return the answer as far as it came, and whether its connection broke before its end."""
        try:
            connection = await Connection.open(address)
        except OSError:
            await asyncio.sleep(RETRY_S)
            return Answer(), True
        request = address.post("/v1/completions", json.dumps(body).encode(), header)
        try:
            answer, error = await connection.exchange(request)
            return answer, error is not None
        finally:
            connection.close()

    async def _wait_to_retry(self, answer: Answer) -> None:
        if not answer.is_refusal:
            raise Lost(f"status {answer.status}: {answer.body[:200].decode(errors='replace')}")
        self.outcomes["refused"] += 1
        await asyncio.sleep(min(MAX_RETRY_S, max(RETRY_S, answer.retry_after_s)))


def _streamed(question: Question) -> dict[str, Any]:
    return {**question.body, "stream": True, "stream_options": {"resumable": True}}


def _tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(2, VOCAB_SIZE) for _ in range(number)]
