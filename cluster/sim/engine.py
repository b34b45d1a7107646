"""A replica of the simulation: the engine's own scheduler and ledgers, and a model of numbers (model.py)."""

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Final

from baton.clock import Clock
from baton.cluster.sim.model import POISON, UNSAMPLEABLE, VOCAB_SIZE, KvMemory, run_chunk
from baton.cluster.sim.process import Crash
from baton.config import SchedulerConfig
from baton.engine.host_tier import HostTier
from baton.engine.layer_watch import LayerWatch
from baton.engine.leases import Owner
from baton.engine.page_events import PageChanges
from baton.engine.pages import PagePool
from baton.engine.plan import Advance, Batch, ScheduledChunk
from baton.engine.prefix_cache import PrefixCache
from baton.engine.relief import Relief
from baton.engine.request_checks import check_request
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import FilledPages, Progress, Sequence
from baton.engine.stats import EngineStats, StepFigures, take_stats
from baton.page_keys import PageKeys
from baton.request import Request, StepOutput

FINGERPRINT: Final = "numbers"
IDLE_STEP_S: Final = 0.02  # one that finds no pages for anybody
STEPS_PER_CHECK: Final = 16  # the books are derived anew so often


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a replica runs on."""

    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    step_s: float  # of an empty batch
    token_s: float  # for each token in it more


class SimEngine:
    """See Replica. `spend` is told how long each step takes."""

    def __init__(self, machine: Machine, clock: Clock, spend: Callable[[float], None]) -> None:
        self.machine = machine
        self.memory = KvMemory(machine.num_pages, machine.page_size)
        self.more_s = 0.0  # that each step takes beyond what it should: a fault
        self._clock = clock
        self._spend = spend
        self._num_steps = 0
        self._last_step: StepFigures | None = None
        pool = PagePool(machine.num_pages, machine.page_size)
        keys = PageKeys(model_fingerprint=FINGERPRINT, dtype="float32", page_size=machine.page_size)
        config = SchedulerConfig(
            max_num_seqs=machine.max_num_seqs, max_num_batched_tokens=machine.max_num_batched_tokens
        )
        self.scheduler = Scheduler(config, PrefixCache(pool, keys, HostTier()), clock)

    @property
    def pages(self) -> PagePool:
        return self.scheduler.pool

    @property
    def max_model_len(self) -> int:
        return self.machine.max_model_len

    @property
    def num_available_pages(self) -> int:
        self._expire()
        return self.scheduler.outside.num_reservable()

    def check(self, request: Request) -> None:
        check_request(request, vocab_size=VOCAB_SIZE, max_model_len=self.max_model_len)

    def add(
        self, request: Request, filled: FilledPages | None = None, *, keeps_pages: bool = False
    ) -> tuple[Progress, ...]:
        self.check(request)
        assert request.sampling.n == 1, "gateways ask for one choice at a time"
        sequence = Sequence.from_request(request, request.choice, max_model_len=self.max_model_len)
        sequence.keeps_pages = keeps_pages
        self.scheduler.add(sequence, filled)
        return (sequence,)

    def abort(self, request_id: str, choice: int | None = None) -> list[StepOutput]:
        return [_last_output(sequence) for sequence in self.scheduler.abort(request_id, choice)]

    def relieve(self, relief: Relief) -> None:
        self.scheduler.relief = relief

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self, watch: LayerWatch | None = None) -> list[StepOutput]:
        assert watch is None, "the model has one layer: nothing leaves in groups"
        self._expire()
        batch = self.scheduler.apply(self.scheduler.plan())
        duration_s = self._duration_s(batch)
        self._spend(duration_s)
        if batch.chunks:
            self._last_step = StepFigures.of(batch, duration_s)
        failed = [chunk.sequence for chunk in batch.chunks if chunk.samples and _fails(chunk.sequence)]
        sampled = [self._run(chunk) for chunk in batch.chunks]
        for sequence in failed:
            self.scheduler.fail(sequence)
        advances = self.scheduler.commit(batch, sampled, duration_s)
        self._num_steps += 1
        if not self._num_steps % STEPS_PER_CHECK:
            self.scheduler.check_integrity()
        return [_output(advance) for advance in advances] + [_last_output(sequence) for sequence in failed]

    def claim_prefix(
        self, token_ids: Ordered[int], salt: bytes, owner: Owner, *, multiple_of: int = 1
    ) -> FilledPages:
        return self.scheduler.claim(token_ids, salt, owner, multiple_of=multiple_of)

    def release(self, filled: FilledPages) -> None:
        self.scheduler.outside.release(filled.pages, filled.owner)

    def release_kept(self, request_id: str, choice: int = 0) -> None:
        self.scheduler.outside.release_kept((request_id, choice))

    def make_room(self, num_pages: int) -> bool:
        if num_pages > self.num_available_pages:
            return False
        self.scheduler.cache.make_room(num_pages, keep=False)
        return True

    def page_keys(self, token_ids: Ordered[int], salt: bytes, page_size: int) -> list[bytes]:
        return self.scheduler.cache.name(token_ids, salt, page_size)

    def lend(self, keys: Ordered[bytes], borrower: Owner) -> list[int] | None:
        self._expire()
        loan = self.scheduler.outside.lend(keys, borrower)
        return None if loan is None else loan.pages

    def take_page_changes(self, *, is_afresh: bool = False) -> PageChanges:
        return self.scheduler.cache.take_changes(is_afresh=is_afresh)

    def stats(self) -> EngineStats:
        self._expire()
        return take_stats(self.scheduler)

    def last_step(self) -> StepFigures | None:
        return self._last_step

    def _expire(self) -> None:
        self.pages.expire(self._clock.now_s())

    def _duration_s(self, batch: Batch) -> float:
        if not batch.chunks:
            return IDLE_STEP_S
        num_tokens = sum(chunk.num_tokens for chunk in batch.chunks)
        return self.machine.step_s + self.machine.token_s * num_tokens + self.more_s

    def _run(self, chunk: ScheduledChunk) -> int | None:
        sequence, pool, size = chunk.sequence, self.pages, self.machine.page_size
        if POISON in sequence.token_ids:
            raise Crash(sequence.request_id)
        last = chunk.start + chunk.num_tokens - 1
        for index, page in enumerate(sequence.page_table[: last // size + 1]):
            is_written = index >= chunk.start // size
            owners = pool.owners(page)
            assert sequence.key in owners, f"{sequence.key} reads page {page} of {owners}"
            assert not is_written or len(owners) == 1, f"{sequence.key} writes page {page} of {owners}"
        return run_chunk(self.memory, chunk)


def _fails(sequence: Sequence) -> bool:
    return UNSAMPLEABLE in sequence.token_ids


def _output(advance: Advance) -> StepOutput:
    sequence = advance.sequence
    return StepOutput(
        request_id=sequence.request_id,
        choice=sequence.choice,
        index=advance.index,
        token_id=advance.token_id,
        finish_reason=advance.finish_reason,
        num_cached_tokens=sequence.num_cached_tokens,
    )


def _last_output(sequence: Sequence) -> StepOutput:
    return StepOutput(
        request_id=sequence.request_id,
        choice=sequence.choice,
        index=sequence.num_generated_tokens,
        token_id=None,
        finish_reason=sequence.finish_reason,
        num_cached_tokens=sequence.num_cached_tokens,
    )
