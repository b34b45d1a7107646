"""As many requests as a server takes, from a fixed number of connections, for a fixed time.

No task, and nothing read of an answer, until the time is over: the client shares the machine with the server.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from baton.bench.serve_client import Address, Answer, Connection
from baton.bench.serve_figures import Bad, Sample, streamed, unary
from baton.errors import PeerGone

PATH: Final = "/v1/completions"
NUM_WORDS: Final = 32
PATIENCE_S: Final = 30.0  # for what is under way when the time is over


class Point(NamedTuple):
    num_tokens: int
    stream: bool
    num_connections: int

    @property
    def name(self) -> str:
        kind = "SSE" if self.stream else "unary"
        return f"{kind}, {self.num_tokens} tokens, {self.num_connections} connections"


class Hammered(NamedTuple):
    """What one run at one point has given."""

    requests_per_s: float
    tokens_per_s: float
    samples: list[Sample]
    failures: list[str]
    cpu_s: float = 0.0  # of the server's processes; 0 where they are not known


def requests_to(address: Address, model: str, point: Point) -> Iterator[bytes]:
    """Prompts of words that do not repeat soon."""
    for number in itertools.count():
        words = " ".join(f"w{(number * 7919 + place * 31) % 1000}" for place in range(NUM_WORDS))
        fields: dict[str, object] = {"model": model, "prompt": words, "max_tokens": point.num_tokens}
        fields["ignore_eos"] = True
        if point.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        yield address.post(PATH, json.dumps(fields).encode())


class Hammer:
    def __init__(self, address: Address, model: str, point: Point) -> None:
        self._address = address
        self._point = point
        self._requests = requests_to(address, model, point)
        self._answers: list[Answer] = []
        self._failures: list[str] = []
        self._until_s = 0.0
        self._num_active = 0
        self._all_done = asyncio.Event()

    async def run(self, seconds: float) -> Hammered:
        """Every connection asks on until the time is over; the rate is over the time until the last end."""
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

    def _read(self, duration_s: float) -> Hammered:
        read, samples = streamed if self._point.stream else unary, []
        for answer in self._answers:
            try:
                samples.append(read(answer, answer.sent_s, self._point.num_tokens))
            except Bad as error:
                self._failures.append(str(error))
        num_tokens = sum(sample.num_tokens for sample in samples)
        return Hammered(len(samples) / duration_s, num_tokens / duration_s, samples, self._failures)
