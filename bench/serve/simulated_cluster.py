"""A gateway over a cluster that exists as figures alone: for measurements and pictures of the dashboard.

The HTTP side is the real one. Its Service tells the status of as many workers as asked for, and answers every
request with made-up tokens. Time can be played ahead, so that the charts have 15 minutes at once.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Final

import msgspec

from baton.cluster.model_directory import resolve_model
from baton.config.gateway import GatewayConfig
from baton.gateway.metrics.metrics import Metrics
from baton.gateway.process import GatewayProcess
from baton.gateway.streams.request_stream import RequestMarks, Sink, WorkerMarks
from baton.messages.bounds import short_id
from baton.messages.control import Decision, Routed, Weighed
from baton.messages.operations import (
    Decisions,
    Explain,
    FindRequests,
    FoundRequests,
    GatewayStatus,
    PlanSummary,
    Status,
)
from baton.messages.orders import Sleep, Wake
from baton.messages.status import OverloadLevel, QueueStatus, RouterStatus, TenantStatus
from baton.messages.workers import Address, Load, PrefillTimes, Worker, WorkerRole, WorkerStatus, WorkerTimes
from baton.request import FinishReason, Request, TokenEvent
from baton.rpc.peer_clock import SAME_CLOCK

GATEWAY: Final = "9a3f51c0" + "0" * 24
WORKERS_A_NODE: Final = 8
NUM_PAGES: Final = 8192
PAGE_BYTES: Final = 2**21
HISTORY_S: Final = 900.0
STEP_S: Final = 5.0  # of the history
PROMPT_S: Final = 0.06  # of a made-up answer
TOKEN_S: Final = 0.004
TENANTS: Final = ("acme", "globex", "initech", "<b>umbrella</b>")  # the last one must be shown as it is
PLANS: Final = tuple(
    PlanSummary(
        id=f"plan-{number}",
        before_s=30.0 * (8 - number),
        outcome="change" if number == 8 else "keep",
        workers="4P8D" if number == 8 else "3P7D",
        actions="add 1 prefill, add 1 decode" if number == 8 else "",
        reason="3P7D becomes 4P8D, the cheapest that meets the objectives" if number == 8 else "",
        predicted=0.9971,
        came=0.9925 if number < 4 else None,
    )
    for number in range(8, 0, -1)
)
TERMS: Final = ("queue_s", "pull_s", "compute_s", "handoff_s", "join_s", "decode_delay_s", "queue_delay_s")
NOWHERE: Final = Address("127.0.0.1", 1)  # no router is asked
KEY: Final = b"k" * 32


class PlayedClock:
    """The machine's monotonic clock, behind by a time that `play` makes up for."""

    def __init__(self) -> None:
        self.behind_s = 0.0

    def now_s(self) -> float:
        return time.monotonic() - self.behind_s


class SimulatedCluster:
    """A Service of made-up workers. `step` lets a time pass."""

    def __init__(self, num_prefill: int, num_decode: int, *, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self._loads: dict[str, Load] = {}
        self._num_routed = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.counters: Counter[str] = Counter(replays_lost=2)
        self.worker_us: Counter[str] = Counter()
        self.why_not_ready = ""
        self.workers: Sequence[Worker] = [
            self._worker(index, WorkerRole.PREFILL if index < num_prefill else WorkerRole.DECODE, num_prefill)
            for index in range(num_prefill + num_decode)
        ]
        self._decoders = [each for each in self.workers if each.role is WorkerRole.DECODE]
        self.draining: Collection[str] = ()
        self.status: Status | None = None

    def _worker(self, index: int, role: WorkerRole, num_prefill: int) -> Worker:
        number = index if role is WorkerRole.PREFILL else index - num_prefill
        return Worker(
            id=f"{index:032x}",
            name=f"{role.value}-{number}",
            role=role,
            model="tiny",
            fingerprint="f",
            address=Address("10.0.0.1", 1024 + index),
            kv_address=Address("10.0.0.1", 16384 + index),
            page_size=16,
            num_pages=NUM_PAGES,
            max_num_seqs=256,
            max_model_len=4096,
            node=f"node-{index // WORKERS_A_NODE:03}",
            pid=4000 + index,
        )

    def step(self, metrics: Metrics, seconds: float) -> None:
        """Let a time pass: workers compute, and the counts of the gateway grow."""
        for worker in self.workers:
            before = self._loads.get(worker.id, Load())
            self._loads[worker.id] = (
                self._prefilled(worker.pid, before, seconds)
                if worker.role is WorkerRole.PREFILL
                else self._decoded(before, seconds)
            )
        self._count(metrics, seconds)
        self.status = self._told(metrics)

    def _prefilled(self, number: int, before: Load, seconds: float) -> Load:
        random_ = self._random
        sent = dict(before.kv_bytes_to)
        for index in range(2):
            to = self._decoders[(7 * number + 3 * index) % len(self._decoders)].id
            sent[to] = sent.get(to, 0) + round(random_.uniform(20, 60) * PAGE_BYTES * seconds)
        active, cached = random_.randint(600, 2600), random_.randint(2500, 4000)
        found = round(random_.uniform(800, 2000) * seconds)
        return Load(
            num_running=random_.randint(1, 6),
            num_waiting=random_.randint(0, 3),
            num_outgoing=random_.randint(0, 4),
            pages=_pages(active, cached, leased=random_.randint(0, 90)),
            prefix_queries_tokens=before.prefix_queries_tokens + round(3000 * seconds),
            prefix_hits_tokens=before.prefix_hits_tokens + found,
            num_tokens=before.num_tokens + round(4 * seconds),
            kv_bytes=sum(sent.values()),
            kv_bytes_to=sent,
            counters={"sent_by_tcp": round(sum(sent.values()) / PAGE_BYTES)},
        )

    def _decoded(self, before: Load, seconds: float) -> Load:
        random_ = self._random
        running = min(96, max(8, before.num_running + random_.randint(-6, 7)))
        drafts = before.num_draft_tokens + round(90 * seconds)
        return Load(
            num_running=running,
            num_waiting=random_.randint(0, 2),
            num_incoming=random_.randint(0, 5),
            pages=_pages(running * 60, 1200, leased=random_.randint(0, 200), quarantined=running % 4),
            num_preemptions=before.num_preemptions + (random_.random() < 0.02),
            num_draft_tokens=drafts,
            num_accepted_tokens=round(0.7 * drafts),
            num_masks=before.num_masks + 40,
            mask_us=before.mask_us + 40 * 55,
            num_tokens=before.num_tokens + round(running * random_.uniform(24, 30) * seconds),
            counters={"remote_prefills": before.counters.get("remote_prefills", 0) + 3},
        )

    def _count(self, metrics: Metrics, seconds: float) -> None:
        num = max(1, round(seconds * self._random.uniform(30, 44)))
        self._num_routed += num
        for _ in range(num):
            metrics.ttft.observe(self._random.lognormvariate(-1.9, 0.5))
            metrics.duration.observe(self._random.lognormvariate(1.0, 0.5))
            for _ in range(4):
                metrics.itl.observe(self._random.lognormvariate(-3.7, 0.35))
        metrics.num_open = self._random.randint(190, 230)
        metrics.requests["/v1/chat/completions", 200] += num
        metrics.generated_tokens += round(num * self._random.uniform(180, 230))

    def _told(self, metrics: Metrics) -> Status:
        level = OverloadLevel.QUEUE if self._random.random() < 0.3 else OverloadLevel.CALM
        return Status(
            workers=tuple(
                WorkerStatus(
                    worker=worker,
                    load=self._loads[worker.id],
                    num_attempts=self._loads[worker.id].num_running,
                    beat_age_s=0.2,
                    is_draining=worker.name == "decode-2",
                )
                for worker in self.workers
            ),
            num_gateways=1,
            gateways=(GatewayStatus(id=GATEWAY, node="node-000", pid=311, num_open=metrics.num_open),),
            routers=tuple(self._router(index, level) for index in range(2)),
            plans=PLANS,
        )

    def _router(self, index: int, level: OverloadLevel) -> RouterStatus:
        queued = self._random.randint(0, 14)
        status = RouterStatus(
            id=f"{index + 1:x}" * 32,
            node=f"node-00{index}",
            pid=300 + index,
            num_attempts=105,
            redis="up",
            counters={"decisions": self._num_routed // 2, "blind_decisions": 1},
            queue=QueueStatus(
                level=level, num_queued=queued, oldest_wait_s=queued / 40, tenants=self._tenants(queued)
            ),
        )
        status.routing.add(3, self._num_routed // 2)
        return status

    def _tenants(self, num_queued: int) -> tuple[TenantStatus, ...]:
        return tuple(
            TenantStatus(
                tenant=name,
                weight=index + 1.0,
                num_queued=num_queued // 4,
                num_active=40,
                oldest_wait_s=num_queued / 40,
                work_tokens=self._num_routed * (400 - 60 * index),
                num_dispatched=self._num_routed // 8,
                waited_s=self._num_routed / 800,
                num_met=self._num_routed // 9,
                num_missed=self._num_routed // 90,
            )
            for index, name in enumerate(TENANTS)
        )

    # Requests.

    def open(self, request: Request, sink: Sink, *, sticky_worker: str = "") -> RequestMarks:
        marks = RequestMarks(request.arrival_s)
        self._tasks[request.request_id] = asyncio.create_task(self._answer(request, sink, marks))
        return marks

    async def _answer(self, request: Request, sink: Sink, marks: RequestMarks) -> None:
        """Answer with made-up tokens, and tell the times of made-up workers."""
        num_tokens = request.sampling.max_tokens or 16
        begin_s = time.monotonic()
        marks.submitted(0, "router 11111111", begin_s)
        attempt = marks.attempts[-1]
        await asyncio.sleep(PROMPT_S)
        attempt.first_token_s = time.monotonic()
        attempt.prefill, attempt.decode = "prefill-0", "decode-0"
        attempt.router_clock = SAME_CLOCK
        attempt.routed = Routed(
            request_id=request.request_id,
            attempt=0,
            decode=self._decoders[0].id,
            received_s=begin_s,
            dispatched_s=begin_s + 0.1 * PROMPT_S,
            num_ahead=3,
            ahead_tenant="acme",
        )
        prompt = WorkerTimes(
            arrived_s=begin_s + 0.15 * PROMPT_S,
            started_s=begin_s + 0.3 * PROMPT_S,
            first_token_s=attempt.first_token_s - 0.05 * PROMPT_S,
            prompt_s=0.5 * PROMPT_S,
            hidden_s=0.2 * PROMPT_S,
        )
        attempt.workers.append(WorkerMarks("prefill-0", prompt, SAME_CLOCK))
        for index in range(num_tokens):
            is_last = index == num_tokens - 1
            if is_last:
                marks.last_token_s = now_s = time.monotonic()
                answer = WorkerTimes(
                    arrived_s=begin_s + 0.15 * PROMPT_S,
                    granted_s=attempt.first_token_s + 0.01 * PROMPT_S,
                    pages_s=attempt.first_token_s + 0.1 * PROMPT_S,
                    ended_s=now_s,
                    decode_s=0.7 * (now_s - attempt.first_token_s),
                )
                attempt.workers.append(WorkerMarks("decode-0", answer, SAME_CLOCK))
                marks.ended("finished", num_tokens, now_s)
            end = FinishReason.LENGTH if is_last else None
            sink.tokens([TokenEvent(request.request_id, 0, index, 5 + index % 20, end, 0)])
            await asyncio.sleep(TOKEN_S)
        self._tasks.pop(request.request_id, None)

    def cancel(self, request_id: str) -> None:
        task = self._tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    def decode_worker(self, request_id: str) -> str:
        return self._decoders[0].id

    def send_order(self, order: Sleep | Wake) -> None:
        """Do nothing: the workers of the picture never sleep."""

    async def find_requests(self, query: FindRequests, timeout_s: float) -> list[FoundRequests]:
        """Return nothing: no other gateway has an ended request."""
        return []

    async def explain(self, question: Explain, timeout_s: float) -> list[Decisions]:
        """Tell a decision among the first workers, for any request."""
        request_id = question.request_id
        prefill = [each for each in self.workers if each.role is WorkerRole.PREFILL][:3]
        pairs = [(decode, source) for decode in self._decoders[:2] for source in prefill]
        weighed = [
            Weighed(
                decode=decode.id,
                prefill=source.id,
                num_held_tokens=128 * index,
                terms=dict(zip(TERMS, (0.01 * index, 0.0, 0.05, 0.004, 0.01, 0.002, 0.001), strict=True)),
            )
            for index, (decode, source) in enumerate(pairs)
        ]
        times = PrefillTimes(request_id, 0, 0.004, 0.061, 872, 1000, moved_bytes=60 * PAGE_BYTES)
        decision = Decision(
            request_id=request_id,
            attempt=0,
            age_s=3.0,
            reason="cost",
            num_tokens=1000,
            chosen=weighed[0],
            weighed=tuple(weighed),
            first_token_s=0.071,
            measured=msgspec.structs.replace(times, exposed_s=0.003),
        )
        return [Decisions(decisions=(decision,))]


def _pages(active: int, cached: int, *, leased: int = 0, quarantined: int = 0) -> dict[str, int]:
    held = {"active": active, "cached": cached, "leased": leased, "quarantined": quarantined}
    return {"free": NUM_PAGES - sum(held.values()), **held}


@contextlib.asynccontextmanager
async def served(cluster: SimulatedCluster, *, history_s: float = HISTORY_S) -> AsyncIterator[Address]:
    """Serve the cluster on a free port, with a history, and let it live on. Yields the gateway's address."""
    config = GatewayConfig(
        model=str(resolve_model("tiny")),
        served_model_name="tiny",
        routers=(NOWHERE,),
        port=0,
        drain_timeout_s=1.0,
    )
    clock = PlayedClock()
    gateway = GatewayProcess(config, KEY, cluster, clock, name=short_id(GATEWAY))
    clock.behind_s = history_s
    while clock.behind_s > 0:
        cluster.step(gateway.metrics, STEP_S)
        await gateway.feed.take()
        clock.behind_s = max(0.0, clock.behind_s - STEP_S)
    cluster.step(gateway.metrics, STEP_S)
    address = await gateway.start()
    living = asyncio.create_task(_live(cluster, gateway))
    try:
        yield address
    finally:
        living.cancel()
        await gateway.drain()


async def _live(cluster: SimulatedCluster, gateway: GatewayProcess) -> None:
    while True:
        await asyncio.sleep(1.0)
        cluster.step(gateway.metrics, 1.0)
