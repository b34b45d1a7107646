"""Processes of a running cluster are killed: no request is lost, no token differs, every page is freed."""

import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
from _pytest.mark import ParameterSet

from baton.cluster.offline.llm import LLM
from baton.config.cluster import ServeConfig, WorkersConfig
from baton.config.engine import CacheConfig, EngineSettings, SchedulerConfig
from baton.config.router import RouterConfig
from baton.errors import WorkerLost
from baton.messages.operations import Migrate, Migrated
from baton.messages.workers import WorkerRole
from baton.request import Request, SamplingParams, StructuredOutputs, TokenEvent, TokenIds
from tests.answer import Answer
from tests.cluster_threads import wait_for
from tests.process_cluster import ProcessCluster, templates
from tests.served import is_alive

VOCAB_SIZE: Final = 1024
REPLACED_S: Final = 15.0  # silence of 3 s, the kill and the start of a process, on a busy machine
NEXT_TOKEN_S: Final = 3.0
PAGES_BACK_AFTER_KILL_S: Final = 5.0
PAGES_BACK_AFTER_CANCEL_S: Final = 1.0
STEP_TIMEOUT_S: Final = 4.0  # a step of a few milliseconds that takes so long has hung
SLACK_S: Final = 3.0  # of a busy machine

# Small steps, so that a prompt takes many of them and its pages leave one after another.
ENGINE: Final = EngineSettings(
    cache=CacheConfig(kv_cache_memory_bytes=64 << 20),
    scheduler=SchedulerConfig(max_num_batched_tokens=16),
)
CONFIG: Final = ServeConfig(
    model="tiny",
    runtime="local",
    port=0,
    prefill=WorkersConfig(num_workers=2),
    decode=WorkersConfig(num_workers=2, page_size=32),
    engine=ENGINE,
    router=RouterConfig(policy="least-loaded"),  # which sends every prompt to a prefill worker
    step_timeout_s=STEP_TIMEOUT_S,
)


def slow(value: float | str) -> ParameterSet:
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def hangs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder: a worker whose name is a file in it hangs in its next step, and removes the file."""
    return tmp_path_factory.mktemp("hangs")


@pytest.fixture(scope="module")
def cluster(hangs: Path) -> Iterator[ProcessCluster]:
    command = (sys.executable, "-m", "tests.hanging_process", str(hangs))
    with ProcessCluster(CONFIG, command=command) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", cache={"kv_cache_memory_bytes": 64 << 20}) as llm:
        yield llm


LETTERS: Final = StructuredOutputs(regex="([a-z]{1,5} ){1000}")  # longer than any answer


class Watched(Answer):
    """An answer with the time of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.times_s: list[float] = []
        self.on_event = self._note

    def _note(self, event: TokenEvent) -> None:
        self.times_s.append(time.monotonic())

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in pairwise(self.times_s)), default=0.0)


def request(seed: int, *, num_prompt_tokens: int, max_tokens: int) -> Request:
    """Return a greedy request for an even seed, a sampled one for an odd seed; it ends at `max_tokens`.

    The answer of every third has a form.
    """
    rng = random.Random(seed)
    ends_late = {"structured_outputs": LETTERS} if seed % 3 == 0 else {"ignore_eos": True}
    sampling = SamplingParams(max_tokens=max_tokens, temperature=float(seed % 2), seed=seed, **ends_late)
    token_ids = tuple(rng.randrange(2, VOCAB_SIZE) for _ in range(num_prompt_tokens))
    return Request(request_id=secrets.token_hex(16), token_ids=TokenIds.of(token_ids), sampling=sampling)


def expected(llm: LLM, requests: Sequence[Request]) -> list[list[int]]:
    """Return the tokens of one engine for each request."""
    prompts = [list(each.token_ids) for each in requests]
    completions = llm.generate(prompts, [each.sampling for each in requests])
    return [list(each.outputs[0].token_ids) for each in completions]


class Running:
    """Requests that a whole cluster has begun, and the tokens that one engine gives for them."""

    def __init__(
        self,
        cluster: ProcessCluster,
        llm: LLM,
        seed: int,
        num_requests: int = 6,
        *,
        max_tokens: int,
        num_prompt_tokens: int = 200,
        is_alone: bool = True,
    ) -> None:
        """is_alone: wait until the cluster is whole and idle."""
        if is_alone:
            cluster.wait_until_whole()
        seeds = range(seed, seed + num_requests)
        asked = [request(each, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens) for each in seeds]
        self._golden = expected(llm, asked) if is_alone else None
        self._asked, self._llm = asked, llm
        self.answers = [Watched() for _ in asked]
        for each, answer in zip(asked, self.answers, strict=True):
            cluster.begin(each, answer)

    @property
    def longest_gap_s(self) -> float:
        return max(answer.longest_gap_s for answer in self.answers)

    def wait_for_tokens(self, num_tokens: int) -> None:
        """Wait until every request has so many."""
        wait_for(lambda: all(len(answer.events) >= num_tokens for answer in self.answers))

    def check(self) -> None:
        """Wait for all answers and compare them."""
        wait_for(lambda: all(answer.has_ended for answer in self.answers))
        golden = self._golden or expected(self._llm, self._asked)
        assert [answer.token_ids for answer in self.answers] == golden


def num_replays(cluster: ProcessCluster) -> int:
    counters = cluster.frontend.counters
    return sum(number for name, number in counters.items() if name.startswith("replays"))


@pytest.mark.parametrize("share", [slow(0.0), 0.3, slow(0.6), slow(0.9)])
def test_killed_prefill_worker_loses_nothing(cluster: ProcessCluster, llm: LLM, share: float) -> None:
    """share: of the requests that have a first token; the others are queued, computed or transferred."""
    running = Running(cluster, llm, 100, num_prompt_tokens=700, max_tokens=12)
    num_begun = round(share * len(running.answers))
    wait_for(lambda: sum(bool(answer.events) for answer in running.answers) >= num_begun)
    cluster.kill("prefill-0")
    running.check()
    cluster.wait_until_whole(PAGES_BACK_AFTER_KILL_S + 20)


def test_prefill_workers_killed_after_their_last_page_interrupt_nothing(
    cluster: ProcessCluster, llm: LLM
) -> None:
    before = num_replays(cluster)
    running = Running(cluster, llm, 150, 4, max_tokens=400)
    running.wait_for_tokens(2)  # the second token is computed from all pages of the prompt
    for name in ("prefill-0", "prefill-1"):
        cluster.kill(name)
    running.check()
    assert num_replays(cluster) == before
    cluster.wait_until_whole()


@pytest.mark.parametrize("num_tokens", [slow(1), 2, slow(20), slow(39)])
def test_killed_decode_worker_loses_nothing(cluster: ProcessCluster, llm: LLM, num_tokens: int) -> None:
    running = Running(cluster, llm, 200 + num_tokens * 10, max_tokens=40)
    wait_for(lambda: len(running.answers[0].events) >= num_tokens)
    before = num_replays(cluster)
    cluster.kill("decode-0")
    running.check()
    assert num_replays(cluster) > before, "no request was there"
    assert running.longest_gap_s <= NEXT_TOKEN_S
    cluster.wait_until_whole()


def test_killed_template_harms_no_worker_and_later_ones_start(cluster: ProcessCluster, llm: LLM) -> None:
    running, before = Running(cluster, llm, 250, max_tokens=60), num_replays(cluster)
    running.wait_for_tokens(2)
    (killed,) = templates()
    killed.kill()
    running.check()
    assert num_replays(cluster) == before
    cluster.kill("prefill-0")
    wait_for(lambda: any(template != killed for template in templates()))
    cluster.wait_until_whole()


def test_killed_router_interrupts_no_stream_and_loses_no_request(cluster: ProcessCluster, llm: LLM) -> None:
    before = Running(cluster, llm, 300, 4, num_prompt_tokens=100, max_tokens=300)
    before.wait_for_tokens(6)
    cluster.kill("router-0")
    after = Running(cluster, llm, 310, 4, num_prompt_tokens=100, max_tokens=20, is_alone=False)
    before.check()
    after.check()
    assert before.longest_gap_s <= 2.0, "running streams need no router, which takes longer to start"
    cluster.wait_until_whole()


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_pages_are_free_within_a_second_of_a_cancel(cluster: ProcessCluster, num_tokens: int) -> None:
    cluster.wait_until_whole()
    asked = [request(400 + i, num_prompt_tokens=800, max_tokens=2000) for i in range(4)]
    answers = [cluster.begin(each) for each in asked]
    wait_for(lambda: all(len(answer.events) >= num_tokens for answer in answers))
    for each in asked:
        cluster.cancel(each.request_id)
    # A status is one heartbeat old at most, and is queried every second.
    cluster.wait_until_whole(PAGES_BACK_AFTER_CANCEL_S + 2.5)


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_worker_that_hangs_is_killed_and_replaced(cluster: ProcessCluster, llm: LLM, name: str) -> None:
    running = Running(cluster, llm, 500, max_tokens=60)
    wait_for(lambda: len(running.answers[0].events) >= 5)
    pid = cluster.pid(name)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: cluster.pid(name) != pid, REPLACED_S)
        running.check()
        cluster.wait_until_whole()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    finally:
        with suppress(ProcessLookupError):  # the supervisor has not killed the process
            os.kill(pid, signal.SIGCONT)


def test_worker_process_that_hangs_in_a_native_call_is_killed_and_replaced(
    cluster: ProcessCluster, llm: LLM, hangs: Path
) -> None:
    """Its other threads go on, and so do its heartbeats."""
    running = Running(cluster, llm, 520, max_tokens=300)
    running.wait_for_tokens(1)
    pid, file = cluster.pid("decode-0"), hangs / "decode-0"
    file.touch()
    wait_for(lambda: not file.exists())
    begun_s = time.monotonic()
    wait_for(lambda: not is_alive(pid))
    assert STEP_TIMEOUT_S - 0.5 < time.monotonic() - begun_s < STEP_TIMEOUT_S + 2.0 + SLACK_S
    running.check()
    cluster.wait_until_whole()
    assert cluster.pid("decode-0") != pid


def test_request_is_not_tried_a_third_time_after_two_workers_died(cluster: ProcessCluster) -> None:
    cluster.wait_until_whole()
    asked = request(600, num_prompt_tokens=100, max_tokens=3000)
    answer = cluster.begin(asked)
    wait_for(lambda: len(answer.events) >= 5)
    first = cluster.frontend.decode_worker(asked.request_id)
    cluster.kill(cluster.decode_name(asked.request_id))
    wait_for(lambda: cluster.frontend.decode_worker(asked.request_id) not in ("", first))
    num_before = len(answer.events)
    wait_for(lambda: len(answer.events) > num_before)
    cluster.kill(cluster.decode_name(asked.request_id))
    wait_for(lambda: answer.has_ended)
    assert isinstance(answer.error, WorkerLost)
    cluster.wait_until_whole()


class Mover:
    """Orders streams from one decode worker to another, as an operator's order reaches a gateway."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self._cluster = cluster
        self.answers: list[Migrated] = []

    @property
    def num_moved(self) -> int:
        return sum(each.num_moved for each in self.answers)

    def order(self, name: str) -> None:
        """Move all streams of this worker; the router chooses where to."""
        workers = {each.name: each.id for each in self._cluster.frontend.workers}
        order = Migrate(worker=workers.get(name, ""))
        self._cluster.call(lambda: self._cluster.frontend.migrations.order(order, self.answers.append))


@pytest.mark.parametrize("num_moves", [4, slow(40)])
def test_moved_streams_keep_their_tokens_and_need_no_replay(
    cluster: ProcessCluster, llm: LLM, num_moves: int
) -> None:
    running, mover = Running(cluster, llm, 700, max_tokens=60 * num_moves), Mover(cluster)
    replays = num_replays(cluster)
    running.wait_for_tokens(2)
    for number in range(num_moves):
        mover.order(f"decode-{number % 2}")
        wait_for(lambda: len(mover.answers) > number)  # noqa: B023
    running.check()
    assert {each.reason for each in mover.answers if each.num_left} <= {"it has ended"}
    assert mover.num_moved >= num_moves
    assert num_replays(cluster) == replays and not cluster.frontend.counters["contradictions"]
    cluster.wait_until_whole()


@pytest.mark.parametrize("victim", ["decode-0", slow("decode-1")])
def test_moves_under_kills_lose_nothing(cluster: ProcessCluster, llm: LLM, victim: str) -> None:
    """decode-0: runs streams that move; decode-1: they move there."""
    running, mover = Running(cluster, llm, 720, max_tokens=150), Mover(cluster)
    running.wait_for_tokens(3)
    mover.order("decode-0")
    cluster.kill(victim)
    running.check()
    cluster.wait_until_whole()
    assert len(mover.answers) == 1


def worker_in_role(cluster: ProcessCluster, name: str, role: WorkerRole) -> bool:
    """Return whether the gateway is connected to a worker of this name and role."""
    connected = cluster.frontend._peer_registry.connected()
    found = [each for each in cluster.frontend.workers if each.name == name and each.role is role]
    return any(each.id in connected for each in found)


def test_workers_flip_under_load_and_lose_nothing(cluster: ProcessCluster, llm: LLM) -> None:
    running, before = Running(cluster, llm, 740, max_tokens=400), num_replays(cluster)
    running.wait_for_tokens(3)
    pid = cluster.pid("decode-0")
    for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
        cluster.order(lambda operator: operator.flip("decode-0", role))  # noqa: B023
        wait_for(lambda: worker_in_role(cluster, "decode-0", role))  # noqa: B023
    running.check()
    assert num_replays(cluster) == before
    assert cluster.pid("decode-0") == pid
    cluster.wait_until_whole()
