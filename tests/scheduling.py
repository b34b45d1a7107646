"""A scheduler with its ledgers and a HashModel, and a slow oracle that recomputes the books every step."""

import random
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from math import inf
from typing import Any, Self

from baton.clock import ManualClock
from baton.config.engine import SchedulerConfig
from baton.engine.cache.page_pool import Owner, PagePool, PageState
from baton.engine.cache.prefix_cache import HostTier, PrefixCache
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequence import (
    Batch,
    Plan,
    Sequence,
    SequenceKey,
    SequenceRank,
    SequenceStatus,
)
from baton.engine.scheduler.step_planner import CHUNK_DIVISOR, MAX_STRETCH
from baton.pages import PageKeys
from baton.request import FinishReason, Request, SamplingParams, StepOutput, TokenIds
from tests.fakes import HashModel

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@dataclass(kw_only=True)
class Settings:
    num_pages: int = 64
    page_size: int = 4
    num_host_pages: int = 0
    prefix_caching: bool = True
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    is_async: bool = False  # each step is planned while the one before runs
    num_drafts: int = 0  # the most that decodes get; some are wrong
    attention_mlp_crossover: float = inf


class Harness:
    """Runs steps; every step is checked against the oracle, every finished sequence against the model."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.clock = ManualClock()
        self.step_s = 0.0  # that each step takes
        self.pool = PagePool(settings.num_pages, settings.page_size)
        keys = PageKeys(model_fingerprint="hash-model", dtype="float32", page_size=settings.page_size)
        self.host = HostTier(settings.num_host_pages)
        self.cache = PrefixCache(self.pool, keys if settings.prefix_caching else None, self.host)
        self.scheduler = Scheduler(
            settings.scheduler, self.cache, self.clock, settings.attention_mlp_crossover
        )
        self.model = HashModel(self.pool, settings.num_host_pages)
        if settings.num_drafts:
            self.scheduler.drafter = GuessingDrafter(self.model, settings.num_drafts)
        self.live: dict[SequenceKey, Sequence] = {}
        self.finished: list[Sequence] = []
        self.kept: dict[SequenceKey, list[int]] = {}  # page tables of ended sequences that keep them
        self.used: dict[Owner, set[int]] = {}  # pages used outside the scheduler: claimed or received
        self.leased: dict[Owner, set[int]] = {}  # reserved, or leased by a reader
        self.num_steps = 0
        self.in_flight: tuple[Batch, list[int | None]] | None = None

    @classmethod
    def of(
        cls, num_pages: int = 64, *, num_host_pages: int = 0, prefix_caching: bool = True, **config: Any
    ) -> Self:
        """Return a harness with pages of 4 tokens; without `config`, 8 sequences and 64 tokens a step."""
        scheduler = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **config})
        settings = Settings(
            num_pages=num_pages,
            num_host_pages=num_host_pages,
            prefix_caching=prefix_caching,
            scheduler=scheduler,
        )
        return cls(settings)

    def add(
        self,
        request_id: str,
        token_ids: Iterable[int],
        sampling: SamplingParams | None = None,
        **fields: object,
    ) -> list[Sequence]:
        """Add every choice of a request; `fields` are further fields of Request."""
        request = Request(
            request_id=request_id,
            token_ids=TokenIds.of(token_ids),
            sampling=sampling or SamplingParams(max_tokens=4),
            **fields,  # type: ignore[arg-type]
        )
        sequences = [
            Sequence.from_request(request, choice, max_model_len=1 << 20)
            for choice in range(request.sampling.n)
        ]
        for sequence in sequences:
            self.scheduler.add(sequence)
            self.live[sequence.key] = sequence
        return sequences

    def abort(self, request_id: str) -> None:
        for sequence in self.scheduler.abort(request_id):
            del self.live[sequence.key]

    def plan(self) -> Plan:
        plan = self.scheduler.plan()
        assert plan == self.scheduler.plan(), "planning twice must give the same plan"
        self._check_plan(plan)
        return plan

    def step(self) -> tuple[Plan, Batch, list[StepOutput]]:
        plan = self.plan()
        expected_hits = self._expected_hits(plan)
        batch = self.scheduler.apply(plan)
        self._check_batch(plan, batch, expected_hits)
        self.scheduler.check_integrity()
        outputs = self._commit(batch, self.model.run(batch))
        for output in outputs:
            if output.finish_reason is not None:
                sequence = self.live.pop((output.request_id, output.choice))
                self.finished.append(sequence)
                if sequence.keeps_pages:
                    self.kept[sequence.key] = list(sequence.page_table)
        self._check_books()
        self.num_steps += 1
        self.clock.advance(self.step_s)
        return plan, batch, outputs

    @property
    def is_running(self) -> bool:
        """The tokens of a step are still to come."""
        return self.in_flight is not None and bool(self.in_flight[0].chunks)

    def _commit(self, batch: Batch, sampled: list[int | None]) -> list[StepOutput]:
        if not self.settings.is_async:
            return self.scheduler.commit(batch, sampled, accepted=self.model.accepted)
        outputs = [] if self.in_flight is None else self.scheduler.commit(*self.in_flight)
        self.scheduler.advance(batch)
        self.in_flight = batch, sampled
        return outputs

    def run(self, max_steps: int = 10_000) -> None:
        """Step until everything has finished, then check that every page is back and every answer right."""
        while self.scheduler.has_work():
            was_running = self.is_running
            plan, _, _ = self.step()
            assert was_running or plan.scheduled or plan.preempted or plan.wait_s, "a deadlock"
            if plan.wait_s is not None:
                self.clock.advance(plan.wait_s)
            assert self.num_steps < max_steps, "no end in sight: a livelock"
        assert not self.live
        assert self.pool.count(PageState.ACTIVE) == 0
        assert self.pool.num_available == self.pool.num_pages
        self.host.begin_step()
        assert self.host.num_available == self.host.num_pages
        assert self.cache.num_cut_pages == 0, "eviction took a page before the pages that follow it"
        self.check_answers()

    def check_answers(self) -> None:
        for sequence in self.finished:
            assert sequence.token_ids == self.model.generate(sequence, sequence.num_tokens)
            if sequence.finish_reason is FinishReason.LENGTH:
                assert sequence.num_tokens == sequence.max_num_tokens

    # The oracle.

    def _check_plan(self, plan: Plan) -> None:
        config = self.settings.scheduler
        running = {key for key, s in self.live.items() if s.status is SequenceStatus.RUNNING}
        nums = list(plan.scheduled.values())
        assert all(num > 0 for num in nums)
        assert sum(nums) <= config.max_num_batched_tokens
        assert nums[: plan.num_decodes] == [1] * plan.num_decodes and 1 not in nums[plan.num_decodes :]
        assert set(plan.scheduled) <= running | set(plan.admitted)
        assert config.policy != "continuous" or set(plan.admitted) <= set(plan.scheduled)
        holders = {key for key, s in self.live.items() if s.page_table}
        assert set(plan.preempted) <= (running | holders) - set(plan.scheduled)
        seated = (running | set(plan.admitted)) - (running & set(plan.preempted))
        num_clients = sum(not self.live[key].is_health_check for key in seated)
        assert num_clients <= config.max_num_seqs and len(seated) <= config.largest_batch
        kept = {p for key in holders - set(plan.preempted) for p in self.live[key].page_table}
        kept = kept.union(*self.kept.values(), *self.used.values(), *self.leased.values())
        freed = {p for key in plan.preempted for p in self.live[key].page_table} - kept
        shared = {p for key in plan.admitted for p in self._shared_pages(self.live[key])}
        claimed = {p for p in shared if p in freed or self.pool.is_available(p)}
        num_pages = sum(plan.page_needs.values()) + len(claimed)
        assert num_pages <= self.pool.num_available + len(freed)
        if config.policy == "continuous" and num_pages < self.pool.num_available + len(freed):
            self._check_share_of_the_first(plan, running)
        if config.policy == "continuous":
            self._check_cost(plan)

    def _check_share_of_the_first(self, plan: Plan, running: set[SequenceKey]) -> None:
        """With pages to spare, the best-ranked prefill gets half of what decodes leave, or all it needs.

        Of an account beyond its share it gets as much of the budget, which buys fewer tokens.
        """
        decoding = {key for key in running if self.live[key].num_uncomputed_tokens == 1}
        prefills = (running - decoding - set(plan.preempted)) | set(plan.admitted)
        first = min(prefills, key=lambda key: self._turn_of(self.live[key]), default=None)
        if first is not None and first in running and self.live[first].max_kv_pages is None:
            num_decodes = len(decoding & set(plan.scheduled))
            budget = self.settings.scheduler.max_num_batched_tokens
            left = budget - num_decodes
            if num_decodes and self.scheduler.pressure_mode.small_chunks:
                left = min(left, max(1, budget // CHUNK_DIVISOR))
            share = min(self.live[first].num_uncomputed_tokens, (left + 1) // 2)
            if self._is_beyond_share(self.live[first]):
                last = self.live[first].num_computed_tokens + (left + 1) // 2
                cost = 1 + last / self.settings.attention_mlp_crossover  # of any of these tokens, at most
                share = min(share, max(1, int(MAX_STRETCH * ((left + 1) // 2) / cost)))
            assert plan.scheduled.get(first, 0) >= share, f"{first} is starved"

    def _check_cost(self, plan: Plan) -> None:
        """The work of accounts beyond their shares costs at most the limit, plus one token."""
        limit, total, dearest = MAX_STRETCH * self.settings.scheduler.max_num_batched_tokens, 0.0, 0.0
        for key, num_tokens in list(plan.scheduled.items())[plan.num_decodes :]:
            start = self.live[key].num_computed_tokens if self.live[key].page_table else 0  # or later
            if key not in plan.drafts and self._is_beyond_share(self.live[key]):
                total += num_tokens * (1 + (start + num_tokens / 2) / self.settings.attention_mlp_crossover)
                dearest = max(dearest, 1 + (start + num_tokens) / self.settings.attention_mlp_crossover)
        assert total <= limit + dearest, f"others would wait for {total} of {limit}"

    def _is_beyond_share(self, sequence: Sequence) -> bool:
        return self.scheduler._queues.shares.is_beyond_share(sequence.share)

    def _turn_of(self, sequence: Sequence) -> tuple[int, float, SequenceRank]:
        """Ranks alone order one account."""
        if len({each.scheduling_key for each in self.live.values()}) == 1:
            return 0, 0.0, sequence.rank
        return sequence.rank[0], sequence.share.work, sequence.rank

    def _expected_hits(self, plan: Plan) -> dict[SequenceKey, int]:
        """Tokens of each admitted new sequence that are on the device or the host, by looking at contents."""
        new = [self.live[key] for key in plan.admitted if not self.live[key].page_table]
        if not new or self.settings.num_host_pages:
            return {}
        if not self.settings.prefix_caching:
            return {each.key: 0 for each in new}
        contexts = self._contexts()
        return {each.key: self._num_hit_tokens(each, contexts) for each in new}

    def _contexts(self) -> set[int]:
        """The contexts of the pages that a new sequence can start with."""
        held = set().union(*self.used.values())
        read = set().union(*(pages for who, pages in self.leased.items() if "reader" in str(who)))
        if self.settings.is_async:
            # A sequence that is preempted in flight leaves its last pages unknown, also to a reader.
            read = {page for page in read if self.pool.is_known(page)}
        kept = (each for each in self.finished if each.key in self.kept)
        computed = (
            each.page_table[: self._num_committed(each) // self.pool.page_size]
            for each in (*self.live.values(), *kept)
        )
        found = held.union(read, *computed)
        pages = (page for page in range(self.pool.num_pages) if page in found or self._is_cached(page))
        lasts = (self.model.device[page][-1] for page in pages)
        return {last.context for last in lasts if last is not None}

    def _is_cached(self, page: int) -> bool:
        return self.pool.state(page) is PageState.CACHED

    def _shared_pages(self, sequence: Sequence) -> list[int]:
        """The known pages that a waiting sequence would start with."""
        if sequence.page_table:
            return []
        return self.cache.match(sequence)[0]

    def _num_committed(self, sequence: Sequence) -> int:
        chunks = [] if self.in_flight is None else self.in_flight[0].chunks
        is_running = sequence.status in (SequenceStatus.RUNNING, SequenceStatus.ENDING)
        num_in_flight = sum(each.num_tokens for each in chunks if each.sequence is sequence and is_running)
        return sequence.num_computed_tokens - num_in_flight

    def _num_hit_tokens(self, sequence: Sequence, contexts: set[int]) -> int:
        size, num_tokens = self.pool.page_size, 0
        if sequence.needs_prompt_logprobs:
            return 0
        while num_tokens + size < sequence.num_tokens:
            prefix = sequence.token_ids[: num_tokens + size]
            if self.model.context_of(prefix, sequence.cache_salt) not in contexts:
                break
            num_tokens += size
        return num_tokens

    def _check_batch(self, plan: Plan, batch: Batch, expected_hits: dict[SequenceKey, int]) -> None:
        assert [c.sequence.key for c in batch.chunks] == list(plan.scheduled)
        assert [c.num_tokens for c in batch.chunks] == list(plan.scheduled.values())
        for chunk in batch.chunks:
            sequence = chunk.sequence
            assert chunk.start == sequence.num_computed_tokens
            assert chunk.start + chunk.num_own_tokens <= sequence.num_tokens
            assert chunk.start + chunk.num_tokens < sequence.max_num_tokens
            if sequence.key in expected_hits and not plan.preempted:
                assert chunk.start == expected_hits[sequence.key], f"{sequence.key} missed a prefix"

    def _check_books(self) -> None:
        """Owners, states and sizes of tables, derived from nothing but the sequences and who else holds."""
        self.scheduler.check_integrity()
        owners: dict[int, set[Owner]] = defaultdict(set)
        for sequence in self.live.values():
            assert len(set(sequence.page_table)) == len(sequence.page_table)
            held = sequence.num_computed_tokens
            # The pages of rejected drafts stay, for the tokens that come instead.
            num_spare = len(sequence.page_table) - self.pool.pages_for(held)
            assert 0 <= num_spare <= (self.pool.pages_for(self.settings.num_drafts) if held else 0)
            for page in sequence.page_table:
                owners[page].add(sequence.key)
        for users in (self.kept, self.used):
            for user, pages in users.items():
                for page in pages:
                    owners[page].add(user)
        lessees: dict[int, set[Owner]] = defaultdict(set)
        for lessee, pages in self.leased.items():
            for page in pages:
                lessees[page].add(lessee)
        for page in range(self.pool.num_pages):
            assert self.pool.owners(page) == owners[page] | lessees[page]
            assert (self.pool.state(page) is PageState.ACTIVE) == bool(owners[page])
            owners[page] |= lessees[page]
        assert self.pool.num_available == self.pool.num_pages - sum(map(bool, owners.values()))


class GuessingDrafter:
    """Proposes up to `most` tokens to each decode, right ones and, at places that vary, a wrong one."""

    def __init__(self, model: HashModel, most: int) -> None:
        self._model = model
        self._most = most

    def propose(self, decodes: Ordered[Sequence], num_tokens: int) -> dict[SequenceKey, list[int]]:
        drafts = {}
        for sequence in decodes:
            num_known = sequence.num_tokens
            guess = self._model.generate(sequence, num_known + self._most)[num_known:]
            rng = random.Random(f"{sequence.key} {num_known}")
            wrong = rng.randrange(2 * self._most)
            if wrong < self._most:
                guess[wrong] += 1
            drafts[sequence.key] = guess[: rng.randint(0, self._most)]
        return {key: guess for key, guess in drafts.items() if guess}

    def observe(self, batch: Batch, step_s: float) -> None:
        pass

    def finish(self, sequence: Sequence) -> None:
        pass


class BareScheduler:
    """A scheduler without a model and without an oracle, for long runs. Every sampled token is 7."""

    def __init__(
        self,
        step_tokens: int,
        *,
        attention_mlp_crossover: float = inf,
        num_pages: int = 8000,
        page_size: int = 16,
        max_num_seqs: int = 256,
    ) -> None:
        self.clock = ManualClock()
        cache = PrefixCache(PagePool(num_pages, page_size), None)
        config = SchedulerConfig(max_num_batched_tokens=step_tokens, max_num_seqs=max_num_seqs)
        self.scheduler = Scheduler(config, cache, self.clock, attention_mlp_crossover)
        self.num_asked = 0

    def ask(self, num_tokens: int, tenant: str = "", max_tokens: int = 1) -> Sequence:
        self.num_asked += 1
        request = Request(
            request_id=str(self.num_asked),
            token_ids=TokenIds.of((5,) * num_tokens),
            tenant=tenant,
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        sequence = Sequence.from_request(request, 0, max_model_len=1 << 16)
        self.scheduler.add(sequence)
        return sequence

    def step(self, step_s: float = 0.0) -> tuple[Batch, list[StepOutput]]:
        batch = self.scheduler.apply(self.scheduler.plan())
        return batch, self.scheduler.commit(batch, [7] * len(batch.chunks), step_s)
