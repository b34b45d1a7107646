"""A Redis that a test can hurt, and requests that go on meanwhile."""

import asyncio
import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from baton.cluster.offline.llm import LLM
from baton.cluster.redis_server import RedisServer
from baton.messages.status import ROUTING_BOUNDS_S
from baton.request import Request, SamplingParams
from baton.router.redis.client import REDIS_FAILURES, Names, RedisConnection
from baton.token_ids import TokenIds
from tests.cluster_threads import Answer, wait_for
from tests.new_status import new_status
from tests.process_cluster import ProcessCluster

VOCAB_SIZE: Final = 1024
NUM_DOCUMENTS: Final = 4
NUM_OPEN: Final = 4  # requests at once
DUMP: Final = "dump.rdb"

ResultT = TypeVar("ResultT")


class HurtRedis:
    """A private Redis; its calls block."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._redis = RedisServer()
        self._snapshot = b""

    def __enter__(self) -> Self:
        self._runner.run(self._redis.start())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._redis.stop())
        self._runner.close()

    @property
    def url(self) -> str:
        return self._redis.url

    def kill(self) -> None:
        os.kill(self._redis.pid, signal.SIGKILL)
        self._runner.run(self._redis.ended())

    def start_empty(self) -> None:
        self._runner.run(self._redis.start())

    def start_old(self) -> None:
        """Start with the contents at the last `remember`."""
        (self._folder / DUMP).write_bytes(self._snapshot)
        self._runner.run(self._redis.start())

    def remember(self) -> None:
        self.ask("SAVE")
        self._snapshot = (self._folder / DUMP).read_bytes()
        (self._folder / DUMP).unlink()

    def stand_still(self, seconds: float) -> Callable[[], bool]:
        """Stop Redis. The returned function continues Redis after this time, and returns whether it has."""
        until_s = time.monotonic() + seconds
        os.kill(self._redis.pid, signal.SIGSTOP)

        def is_over() -> bool:
            if time.monotonic() < until_s:
                return False
            os.kill(self._redis.pid, signal.SIGCONT)
            return True

        return is_over

    def snapshot_bytes(self) -> int:
        """The size of the workers' snapshots, 16 bytes a page; 0 where Redis does not answer."""
        try:
            return sum(int(self.ask("STRLEN", key)) for key in self.ask("KEYS", "baton:*:workers:*"))
        except REDIS_FAILURES:
            return 0

    def ask(self, *words: str | bytes) -> Any:
        async def ask() -> Any:
            connection = RedisConnection(self.url, Names.of("none"))
            try:
                return await connection.call(*words)
            finally:
                await connection.aclose()

        return self._runner.run(ask())

    @property
    def _folder(self) -> Path:
        return Path(self.url.removeprefix("unix://")).parent


class Load:
    """Requests with common prefixes, NUM_OPEN at a time, each compared with the answer of one engine."""

    def __init__(self, cluster: ProcessCluster, llm: LLM, seed: int, num_prompts: int = 12) -> None:
        rng = random.Random(seed)
        documents = [_tokens(rng, 160) for _ in range(NUM_DOCUMENTS)]
        self._prompts = [
            documents[number % NUM_DOCUMENTS] + _tokens(rng, 10 + number) for number in range(num_prompts)
        ]
        self._sampling = [
            SamplingParams(max_tokens=12, temperature=float(number % 2), seed=number, ignore_eos=True)
            for number in range(num_prompts)
        ]
        self._golden = [
            list(llm.generate([list(prompt)], sampling)[0].outputs[0].token_ids)
            for prompt, sampling in zip(self._prompts, self._sampling, strict=True)
        ]
        self._cluster = cluster
        self._open: list[tuple[int, Answer]] = []
        self._num_asked = 0
        self.num_answered = 0

    def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Keep asking until the condition holds. AssertionError: a request failed, or a token differs."""

        def goes_on() -> bool:
            self._check_ended()
            while len(self._open) < NUM_OPEN:
                self._ask()
            return condition()

        wait_for(goes_on, timeout_s)

    def answer(self, num_more: int) -> None:
        enough = self.num_answered + num_more
        self.until(lambda: self.num_answered >= enough)

    def finish(self) -> None:
        wait_for(lambda: all(answer.has_ended for _, answer in self._open), 60.0)
        self._check_ended()

    def _ask(self) -> None:
        number = self._num_asked % len(self._prompts)
        self._num_asked += 1
        request = Request(
            request_id=secrets.token_hex(16),
            token_ids=TokenIds.of(self._prompts[number]),
            sampling=self._sampling[number],
        )
        self._open.append((number, self._cluster.begin(request)))

    def _check_ended(self) -> None:
        for number, answer in [each for each in self._open if each[1].has_ended]:
            assert answer.token_ids == self._golden[number], f"prompt {number}"
            self.num_answered += 1
        self._open = [each for each in self._open if not each[1].has_ended]


class RoutingShare:
    """The attempts that the routers have dispatched since this was made, by routing time."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self._cluster = cluster
        self._before = self._counts()

    def within(self, seconds: float) -> float:
        """Return the share of attempts that took no longer."""
        counts = [now - before for now, before in zip(self._counts(), self._before, strict=True)]
        num_fast = sum(
            count for bound_s, count in zip(ROUTING_BOUNDS_S, counts, strict=False) if bound_s <= seconds
        )
        return num_fast / max(1, sum(counts))

    def _counts(self) -> Sequence[int]:
        new = new_status(self._cluster.frontend)
        wait_for(lambda: new() is not None)
        status = new()
        assert status is not None
        return [sum(counts) for counts in zip(*(each.routing.counts for each in status.routers), strict=True)]


def _tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(2, VOCAB_SIZE) for _ in range(number)]
