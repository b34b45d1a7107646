"""A cluster of production nodes on a virtual clock: the full mode of a rehearsal.

The nodes of the fault simulation (sim/deployment.py), without faults: the gateway's streams, the router, the
workers' loops, the engine's scheduler and prefix cache, and the transfer protocol are the production code.
Time models stand for the steps of the engine and for the bytes on their way.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Final, NamedTuple

from baton.config.router import RouterConfig
from baton.engine.replica import LayerWatch
from baton.engine.scheduler.sequence import Batch
from baton.errors import BatonError
from baton.gateway.metrics.requests import EndedRequest
from baton.gateway.streams.request_stream import ReplayLimits, RequestMarks
from baton.messages.workers import Worker, WorkerRole
from baton.request import Request, SamplingParams, StepOutput, TokenEvent, TokenIds
from baton.sim.deployment import SimContext, SimGateway, SimRouter, SimWorker
from baton.sim.engine import SimEngine
from baton.sim.network import Network, Recorder
from baton.sim.process import Events, TimedProcess
from baton.sim.timed.fleet import BODY_S, CallOutcome, ClientCall, Fleet
from baton.sim.timed.times import Contention, StepWork, WorkTimes

IDLE_S: Final = 1e-3  # a step that computes nothing
JOINS_S: Final = 3.0  # until the processes are connected
LIMITS: Final = ReplayLimits(max_streams=2**20, max_wait_s=1e6, max_begun_wait_s=1e6, max_silence_s=1e6)
VOCAB_SIZE: Final = 2**31
LOOK_S: Final = 1.0


def work_of(batch: Batch) -> StepWork:
    """Return the work of a batch."""
    num_decodes = batch.num_decodes
    num_context = int(batch.starts[:num_decodes].sum()) + num_decodes
    num_new, num_pairs = 0, 0.0
    for start, length in zip(batch.starts[num_decodes:].tolist(), batch.lengths[num_decodes:], strict=True):
        num_new += length
        num_pairs += length * (start + length / 2)
    return StepWork(len(batch.sequences), num_context, num_new, num_pairs)


class SteadyNetwork(Network):
    """A network without faults, on which only pages take long."""

    def __init__(self, events: Events, random: Random, times: WorkTimes) -> None:
        super().__init__(events, random)
        self._times = times

    def delay_s(self) -> float:
        return BODY_S

    def nap_s(self, random: Random) -> float:
        return 0.0

    def moves_s(self, num_tokens: int, num_transfers: int) -> float:
        return self._times.handoff_s(num_tokens, num_transfers)


class TimedContext(SimContext):
    """The shared parts of a cluster in which turns take time."""

    def new_process(self, name: str) -> TimedProcess:
        return TimedProcess(name, self.events)


class _Launched(NamedTuple):
    batch: Batch
    launched_s: float
    ends_s: float  # in the last stage


class TimedEngine(SimEngine):
    """A replica with the engine's scheduler and ledger of pages, and seconds in place of a model.

    It is a pipeline of stages, and keeps as many steps in flight as `Engine` does. Each stage takes the same
    part of a step's seconds, and computes one step after the other. The ledgers are not checked, for speed.
    """

    def __init__(
        self,
        worker: Worker,
        process: TimedProcess,
        step_s: Callable[[StepWork], float],
        has_prefix_cache: bool,
        num_stages: int,
    ) -> None:
        super().__init__(worker, process.clock, process.spend, has_prefix_cache=has_prefix_cache)
        self._clock = process.clock
        self.vocab_size = VOCAB_SIZE
        self.busy_s = 0.0
        self._work_s = step_s
        self.scheduler.num_batches = num_stages
        self._in_flight: deque[_Launched] = deque()
        self._free_s = [0.0] * num_stages  # when each stage has computed the launched steps
        self._busy_since_s: float | None = None  # the end of the last step, if there was more work

    def has_work(self) -> bool:
        return bool(self._in_flight) or super().has_work()

    def step(self, watch: LayerWatch | None = None) -> list[StepOutput]:
        """Launch a step, and take the tokens of the oldest one when there are as many as stages."""
        batch = self.scheduler.apply(self.scheduler.plan())
        if not batch.sequences:
            if self._in_flight:
                return self._collect()
            self._spend(IDLE_S)
            return []
        now_s = end_s = self._clock.now_s()
        stage_s = self._work_s(work_of(batch)) / len(self._free_s)
        for stage, free_s in enumerate(self._free_s):
            end_s = self._free_s[stage] = max(end_s, free_s) + stage_s
        self.busy_s += stage_s
        self.scheduler.launch(batch)
        self._in_flight.append(_Launched(batch, now_s, end_s))
        self._spend(self._free_s[0] - now_s)  # rank 0 is in the first stage
        return self._collect() if len(self._in_flight) == len(self._free_s) else []

    def _collect(self) -> list[StepOutput]:
        batch, launched_s, ends_s = self._in_flight.popleft()
        self._spend(max(0.0, ends_s - self._clock.now_s()))
        ended_s = self._clock.now_s()
        step_s = ended_s - max(launched_s, self._busy_since_s or 0.0)
        self._last_step = batch, step_s
        self._step_meter.observe(step_s, batch.num_tokens)
        sampled: list[int | None] = [1] * len(batch.sequences)
        if not batch.is_pure_decode:
            sampled = [1 if chunk.samples else None for chunk in batch.chunks]
        outputs = self.scheduler.commit(batch, sampled, step_s, computed_s=step_s)
        self._busy_since_s = ended_s if self.scheduler.has_work() else None
        return outputs


class FullClient:
    """The client of one request."""

    def __init__(self, cluster: "FullCluster", call: ClientCall) -> None:
        self.outcome = CallOutcome(call=call, asked_s=cluster.events.now_s)
        self.marks: RequestMarks | None = None
        self._cluster = cluster

    def tokens(self, events: Sequence[TokenEvent]) -> None:
        outcome, now_s = self.outcome, self._cluster.events.now_s
        if outcome.first_token_s < 0:
            outcome.first_token_s = now_s
            outcome.first_wait_s = self._cluster.contention.wait_s(now_s)
        if events[-1].finish_reason is not None:
            outcome.ended_s, outcome.last_wait_s = now_s, self._cluster.contention.wait_s(now_s)
            self._cluster.events.at(now_s, partial(self._cluster.ended, self))  # the marks are whole by then

    def failed(self, error: BatonError) -> None:
        self.outcome.refusal = type(error).__name__
        self._cluster.ended(self)


class FullCluster:
    """Processes, their clients and the virtual time; `outcomes` has every request."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        times: Mapping[WorkerRole, WorkTimes],
        page_size: int = 16,
        seed: int = 0,
        contention: Contention | None = None,
    ) -> None:
        """See FastCluster."""
        self.events = Events()
        self.outcomes: list[CallOutcome] = []
        self.parts: dict[str, float] = {}  # seconds of all requests, by the names of timelines
        self.contention = contention or Contention()
        self._numbers = 0
        self._num_open = 0
        random = Random(seed)
        network = SteadyNetwork(self.events, random, times[WorkerRole.DECODE])
        context = TimedContext(self.events, network, random, Recorder(self.events), LIMITS)
        context.direct_chance = 1.0
        workers = list(fleet.workers(page_size, 1.0))
        num_pages = min(2**20, max(4096, sum(each.num_pages for each in workers)))
        self._router = SimRouter(context, "router", config, context.routers[0], num_pages, 512)
        self._gateway = SimGateway(context, "gateway")
        self._processes: list[TimedProcess] = []
        self.workers: dict[str, SimWorker] = {}
        for worker in workers:
            is_prefill = worker.role is WorkerRole.PREFILL
            keeps = fleet.prefill_keeps if is_prefill else fleet.decode_keeps
            make_engine = partial(self._make_engine, times[worker.role], keeps)
            self.workers[worker.name] = SimWorker(context, worker, make_engine)
        self.events.run_until(JOINS_S)
        self.begin_s = self.events.now_s

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds of each worker's steps."""
        engines = {name: worker.engine for name, worker in self.workers.items()}
        return {name: each.busy_s for name, each in engines.items() if isinstance(each, TimedEngine)}

    def run(self, calls: Iterable[ClientCall]) -> list[CallOutcome]:
        """Make all calls, at moments that count from now; return the outcomes once all have ended."""
        for call in calls:
            self._num_open += 1
            self.events.at(self.begin_s + call.at_s, partial(self._ask, call))
        while self._num_open:
            self.events.run_until(self.events.now_s + LOOK_S)
        return self.outcomes

    def ended(self, client: FullClient) -> None:
        """Take the end of a request, and add the parts of its timeline."""
        self._num_open -= 1
        outcome = client.outcome
        if client.marks is not None and not outcome.refusal:
            ended = EndedRequest(
                marks=client.marks,
                received_s=outcome.asked_s,
                read_s=outcome.asked_s,
                ended_s=outcome.ended_s,
            )
            for part in ended.parts().added:
                self.parts[part.name] = self.parts.get(part.name, 0.0) + part.seconds

    def _ask(self, call: ClientCall) -> None:
        client = FullClient(self, call)
        client.outcome.way_s = self.contention.ask(self._num_busy, self.events.now_s)
        self.outcomes.append(client.outcome)
        self._numbers += 1
        request = Request(
            request_id=f"{self._numbers:032x}",
            token_ids=TokenIds.of(call.token_ids),
            sampling=SamplingParams(max_tokens=call.num_answered, ignore_eos=True, temperature=0.0),
            tenant=call.tenant,
            sla=call.sla,
            scheduling_key=call.scheduling_key,
        )
        self._gateway.process.post(partial(self._open, request, client))

    def _open(self, request: Request, client: FullClient) -> None:
        try:
            client.marks = self._gateway.frontend.open(request, client)
        except BatonError as error:
            client.failed(error)

    def _make_engine(
        self, times: WorkTimes, keeps: bool, worker: Worker, process: TimedProcess
    ) -> TimedEngine:
        self._processes.append(process)
        return TimedEngine(worker, process, partial(self._step_s, times), keeps, times.num_stages)

    def _step_s(self, times: WorkTimes, work: StepWork) -> float:
        """Return the seconds of a step that begins now, beside the workers that are busy now."""
        num_busy, now_s = self._num_busy, self.events.now_s
        seconds = self.contention.stretched_s(times.step_s(work), num_busy, now_s)
        self.contention.add_steps(1, work.num_sequences, num_busy, now_s)
        return seconds

    @property
    def _num_busy(self) -> int:
        """Workers in a step."""
        return sum(process.is_busy for process in self._processes)
