"""Decides each step and keeps the state of sequences and pages.

The life of a sequence:

1. `add` refuses a sequence that could never run and puts any other in the waiting queue.
2. `plan` decides the next step: which sequences are preempted and admitted, and how many tokens each one
   computes. It changes nothing.
3. `apply` carries the plan out on the ledgers (preempt, share prefix pages, evict, allocate) and returns the
   Batch: page copies, then chunks of tokens. The caller runs the model on the batch.
4. `commit` takes the sampled tokens: computed tokens advance, the prefix cache learns full pages, and
   sequences that are done release their pages.
5. A preempted sequence goes back to 2 with all its tokens. `abort` is legal at any point.

Every accepted sequence ends exactly once: as an Advance with a finish reason, or in the list that `abort`
returns.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from itertools import count
from math import inf
from operator import attrgetter

from baton.clock import Clock
from baton.config.engine import SchedulerConfig
from baton.engine.cache.page_pool import Owner, PagePool
from baton.engine.cache.prefix_cache import PrefixCache
from baton.engine.scheduler.page_holds import ExternalPageHolds
from baton.engine.scheduler.plan import Advance, Batch, Plan, PreemptMode, ScheduledChunk
from baton.engine.scheduler.policies import batch_policy
from baton.engine.scheduler.queues import SequenceQueues
from baton.engine.scheduler.sequence import Sequence, SequenceKey, SequenceStatus
from baton.engine.scheduler.step_planner import CostCap, PreemptionRates, PressureMode, StepPlanner
from baton.errors import IntegrityError, InvalidRequest
from baton.request import MAX_CHOICES, FilledPages, FinishReason


class SequencePages:
    """Allocates and frees the pages of sequences: the part of `apply` that changes the ledgers."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._host = cache.host

    def claim(self, sequence: Sequence) -> list[bytes]:
        """Share the known device pages of an admitted sequence and pin its host pages, so that no eviction
        takes them.

        Every admitted sequence claims before any of them allocates. Returns the keys of the host pages, for
        `restore`.
        """
        if sequence.page_table:
            return []
        if sequence.status is SequenceStatus.SWAPPED:
            match = self._cache.match_swapped(sequence)
        else:
            match = self._cache.match(sequence)
        self._pool.share(match.device_pages, sequence.key)
        sequence.page_table += match.device_pages
        for key in match.host_keys:
            self._host.pin(key)
        return match.host_keys

    def restore(self, sequence: Sequence, host_keys: list[bytes]) -> None:
        """Copy host pages back and set `num_computed_tokens`."""
        if sequence.status is SequenceStatus.SWAPPED:
            self._swap_in(sequence)
        elif not sequence.num_computed_tokens:
            for key in host_keys:
                self._fetch(sequence, key)
            num_pages = len(sequence.page_table)
            sequence.num_computed_tokens = num_pages * self._pool.page_size
            sequence.num_known_pages = num_pages
            if not sequence.num_preemptions:
                if not sequence.needs_prompt_logprobs:
                    self._cache.count(sequence.num_tokens, sequence.num_computed_tokens)
                num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
                sequence.num_cached_tokens = num_cached_tokens

    def grow(self, sequence: Sequence, num_pages: int) -> None:
        """Append fresh pages; the caller has made room."""
        sequence.page_table += self._pool.allocate(num_pages, sequence.key)

    def drop(self, sequence: Sequence) -> None:
        """Release everything that the sequence holds, on the device and on the host."""
        if sequence.status is SequenceStatus.SWAPPED:
            self._host.give_up(sequence.key)
            sequence.host_pages.clear()
        self._pool.release(sequence.page_table, sequence.key)
        self._clear_table(sequence)
        sequence.num_computed_tokens = 0

    def swap_out(self, sequence: Sequence) -> None:
        """Copy the computed pages to the host and release the device pages."""
        num_pages = self._pool.pages_for(sequence.num_computed_tokens)
        sequence.host_pages = self._host.swap_out(sequence.key, sequence.page_table[:num_pages])
        self._pool.release(sequence.page_table, sequence.key)
        self._clear_table(sequence)

    def _swap_in(self, sequence: Sequence) -> None:
        """Share the full pages that the device still knows, copy the others back and register them."""
        table = sequence.page_table
        for page in self._cache.match_swapped(sequence).device_pages[len(table) :]:
            self._pool.share((page,), sequence.key)
            table.append(page)
        sequence.num_known_pages = len(table)
        num_missing = self._pool.pages_for(sequence.num_computed_tokens) - len(table)
        self._cache.make_room(num_missing)
        pages = self._pool.allocate(num_missing, sequence.key)
        self._host.swap_in(sequence.key, pages)
        sequence.host_pages.clear()
        table += pages
        self._cache.register(sequence)

    def _fetch(self, sequence: Sequence, key: bytes) -> None:
        page = self._cache.page_of(key)
        if page is not None:  # another sequence admitted by the same plan has brought it back
            self._pool.share((page,), sequence.key)
            sequence.page_table.append(page)
            return
        self._cache.make_room(1)
        self.grow(sequence, 1)
        self._host.fetch(key, sequence.page_table[-1])
        self._cache.learn_fetched(sequence, key)

    def _clear_table(self, sequence: Sequence) -> None:
        sequence.page_table.clear()
        sequence.table_version += 1
        sequence.num_known_pages = 0


def attribute_step_cost(batch: Batch, step_s: float, cost: Callable[[int, int], float]) -> None:
    """Add to `own_s` of each prompt in the batch its part of the step's time, in proportion to its cost.

    The time from a prompt's first step to its first token includes the prompts that were computed in between,
    so `own_s` is what predictions use. Decodes count nothing; a batch without longer chunks is a step of
    decodes. cost: of so many tokens from a start on, as `CostCap.cost`.
    """
    if batch.num_decodes == len(batch.chunks):
        return
    prompts = [each for each in batch.chunks if each.num_tokens > 1 or not each.sequence.num_generated_tokens]
    costs = [cost(each.start, each.num_tokens) for each in prompts]
    total = sum(costs)
    for each, own in zip(prompts, costs, strict=True):
        each.sequence.own_s += step_s * own / total


def most_tokens(sequence: Sequence, pool: PagePool) -> int:
    """The length that the sequence can reach in this pool. InvalidRequest if it could not run alone."""
    if not sequence.num_prompt_tokens:
        raise InvalidRequest(f"request {sequence.request_id}: the prompt is empty")
    quota = sequence.max_kv_pages
    num_pages = pool.num_pages if quota is None else min(quota, pool.num_pages)
    most = min(sequence.max_num_tokens, num_pages * pool.page_size)
    if sequence.num_tokens < most:
        return most
    begun = sequence.num_generated_tokens
    holder = "the model and its KV pages hold"
    if quota is not None and quota < pool.num_pages:
        holder = f"the quota max_kv_pages of {quota} pages, and the model, hold"
    raise InvalidRequest(
        f"request {sequence.request_id}: a prompt of {sequence.num_prompt_tokens} tokens"
        f"{f' and {begun} of the answer' if begun else ''}; {holder} {most}, one of them for the answer"
    )


_RUNNING = SequenceStatus.RUNNING
_num_computed_tokens = attrgetter("num_computed_tokens")


class Scheduler:
    """Owns the queues of sequences and changes the ledgers of pages."""

    def __init__(
        self, config: SchedulerConfig, cache: PrefixCache, clock: Clock, attention_mlp_crossover: float = inf
    ) -> None:
        """attention_mlp_crossover: see `Model.attention_mlp_crossover`; inf: all tokens cost the same."""
        self.rates: PreemptionRates | None = None  # set once measured; until then preemption recomputes
        self.pressure_mode = PressureMode()
        self._config = config
        self.cache = cache
        self.pool = cache.pool  # the ledger; transfers hold pages in it too
        self.num_preemptions = 0
        self._clock = clock
        self._queues = SequenceQueues()
        self.holds = ExternalPageHolds(cache, self._queues)
        self._pages = SequencePages(cache)
        self._policy = batch_policy(config)
        # The other policies serve comparison only: no key overtakes another there.
        is_continuous = config.policy == "continuous"
        self._cost_cap = CostCap(self._queues.shares, attention_mlp_crossover if is_continuous else inf)
        self._to_preempt: dict[SequenceKey, PreemptMode] = {}
        self._serials = count()
        self._version = 0

    # Sequences.

    def add(self, sequence: Sequence, filled: FilledPages | None = None) -> None:
        """Accept a sequence. Raises InvalidRequest when it could not run even with all pages to itself.

        filled: KV that the request brings; the pages belong to the sequence once it is accepted, not before.
        """
        if sequence.key in self._queues.by_key or sequence.key in self.holds.kept:
            raise ValueError(f"sequence {sequence.key} is already here")
        max_num_tokens = most_tokens(sequence, self.pool)
        if filled is not None:
            self.holds.check(filled, sequence)
        sequence.max_num_tokens = max_num_tokens
        sequence.enqueued_s = self._clock.now_s()
        serial = next(self._serials)
        sequence.rank = (
            sequence.scheduling_class,
            sequence.priority,
            sequence.due_s,
            sequence.arrival_s,
            serial,
        )
        sequence.table_version = serial << 32
        self.cache.extend_keys(sequence, sequence.num_tokens // self.pool.page_size)
        self.cache.weigh(sequence.cache_salt, sequence.weight)
        if filled is not None:
            self.holds.settle(filled, sequence)
        else:
            self.pool.accounts.book(sequence.key, sequence.scheduling_key)
        self._queues.wait(sequence)
        self._version += 1

    def claim(
        self, token_ids: Ordered[int], salt: bytes, owner: Owner, *, multiple_of: int = 1
    ) -> FilledPages:
        """Hold the known prefix of a prompt before there is a sequence; see `Replica.claim_prefix`."""
        known = self.cache.find(token_ids, salt)
        while len(known) * self.pool.page_size % multiple_of:
            known.pop()
        claim = self.holds.claim(known, owner)
        self.cache.count(len(token_ids), claim.num_tokens)
        self._version += 1
        return claim

    def abort(self, request_id: str, choice: int | None = None) -> list[Sequence]:
        """End the live choices of the request, or one choice, and return them; unknown ids return none."""
        choices = range(MAX_CHOICES) if choice is None else (choice,)
        keys = [(request_id, each) for each in choices]
        aborted = [self._queues.by_key[key] for key in keys if key in self._queues.by_key]
        for sequence in aborted:
            self._finish(sequence, FinishReason.ABORT)
        self._version += 1
        return aborted

    def fail(self, sequence: Sequence) -> None:
        """End a live sequence with invalid KV; the prefix cache forgets its pages."""
        self.cache.forget(sequence.page_table)
        self._finish(sequence, FinishReason.ERROR)
        self._version += 1

    def lose(self, keys: Iterable[SequenceKey]) -> None:
        """Reset after a step that failed half-way: no sequence is live, `keys` own no page, no contents are
        known.
        """
        self._queues.clear()
        self._to_preempt.clear()
        for key in keys:
            self.holds.kept.pop(key, None)
        self.pool.lose(keys)
        self.cache.clear()
        self._version += 1

    def has_work(self) -> bool:
        return bool(self._queues.by_key)

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting)

    @property
    def num_running(self) -> int:
        return self._queues.num_running

    def sequences(self) -> tuple[Sequence, ...]:
        """Every sequence that has not ended, in order of arrival."""
        return tuple(self._queues.by_key.values())

    def keys(self) -> tuple[SequenceKey, ...]:
        return tuple(self._queues.by_key)

    def preempt(self, key: SequenceKey, mode: PreemptMode) -> None:
        """Make the next plan preempt this running sequence, with or without need.

        A sequence that recomputes repeatedly advances only if one step is long enough for all its tokens.
        """
        sequence = self._queues.by_key[key]
        if not sequence.is_running:
            raise ValueError(f"sequence {key} is {sequence.status.value}, not running")
        self._to_preempt[key] = mode
        self._version += 1

    # One step.

    def plan(self) -> Plan:
        """Decide the next step from the state as it is. Pure: calling it twice gives the same plan."""
        queues = self._queues
        planner = StepPlanner(
            queues,
            self.cache,
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            rates=self.rates,
            pressure_mode=self.pressure_mode,
            cost_cap=self._cost_cap,
        )
        for key, mode in self._to_preempt.items():
            sequence = queues.by_key.get(key)
            if sequence is not None and sequence.is_running:
                planner.preempt(sequence, mode)
        if queues.have_quotas:
            planner.quotas.enforce()
        wait_s = self._policy.fill(planner, self._clock.now_s())
        return planner.finish(self._version, wait_s)

    def apply(self, plan: Plan) -> Batch:
        """Carry out the latest plan. ValueError when something has changed since it was made."""
        if plan.version != self._version:
            raise ValueError(f"the plan is stale: made at version {plan.version}, now {self._version}")
        self._version += 1
        by_key = self._queues.by_key
        self.cache.host.begin_step()
        self._to_preempt.clear()
        if plan.preempted_for is not None:
            self._queues.preempted_for = plan.preempted_for
        for key, mode in plan.preempted.items():
            self._preempt(by_key[key], mode)
        if plan.admitted:
            self._admit([by_key[key] for key in plan.admitted])
        if plan.page_needs:
            self._allocate(plan)
        sequences = [by_key[key] for key in plan.scheduled]
        if sequences:
            self._charge(plan)
        starts = map(_num_computed_tokens, sequences)
        to_host, to_device = self.cache.host.take_copies()
        return Batch(
            chunks=tuple(map(ScheduledChunk, sequences, starts, plan.scheduled.values())),
            num_decodes=plan.num_decodes,
            copies_to_host=to_host,
            copies_to_device=to_device,
            num_padded_tokens=plan.num_padded_tokens,
        )

    def commit(self, batch: Batch, sampled: Ordered[int | None], step_s: float = 0.0) -> list[Advance]:
        """Record that the batch has run; `sampled[i]` is the token of `batch.chunks[i]` if it samples.

        Chunks of sequences that were aborted since are ignored. Returns one Advance per new token.
        step_s: the time since the last batch ended, or since there was work.
        """
        attribute_step_cost(batch, step_s, self._cost_cap.cost)
        advances: list[Advance] = []
        page_size = self.pool.page_size
        for chunk, token_id in zip(batch.chunks, sampled, strict=True):
            sequence, num_computed = chunk.sequence, chunk.start + chunk.num_tokens
            if sequence.status is not _RUNNING or sequence.num_computed_tokens != chunk.start:
                continue
            sequence.num_computed_tokens = num_computed
            if chunk.num_tokens > 1 or not num_computed % page_size:
                self.cache.register(sequence)
            if num_computed == len(sequence.token_ids):
                if token_id is None:
                    raise IntegrityError(f"sequence {sequence.key} got no token at position {num_computed}")
                advances.append(self._append(sequence, token_id))
        if self._queues.prefilling:
            self._queues.promote()
        self._version += 1
        return advances

    def check_integrity(self) -> None:
        """All ledgers agree with each other and with the sequences; raises IntegrityError."""
        self.pool.check_integrity()
        self.cache.check_integrity()
        self.cache.host.check_integrity()
        for sequence in (*self._queues.by_key.values(), *self.holds.kept.values()):
            for page in sequence.page_table:
                if sequence.key not in self.pool.owners(page):
                    raise IntegrityError(f"sequence {sequence.key} uses page {page} without owning it")
            pages = sequence.host_pages or sequence.page_table
            if len(pages) < self.pool.pages_for(sequence.num_computed_tokens):
                raise IntegrityError(f"sequence {sequence.key} has fewer pages than computed tokens")

    def _charge(self, plan: Plan) -> None:
        by_key, shares, now_s = self._queues.by_key, self._queues.shares, self._clock.now_s()
        if shares.are_several:
            shares.charge(((by_key[key].share, num) for key, num in plan.scheduled.items()), now_s)
        else:
            shares.charge_only(sum(plan.scheduled.values()), now_s)

    def _preempt(self, sequence: Sequence, mode: PreemptMode) -> None:
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        if mode is PreemptMode.SWAP:
            self._pages.swap_out(sequence)
            self._queues.stop(sequence, SequenceStatus.SWAPPED)
        else:
            self._pages.drop(sequence)
            self._queues.stop(sequence, SequenceStatus.WAITING)

    def _admit(self, sequences: list[Sequence]) -> None:
        # All claim before any restores, because restoring evicts.
        host_keys = [self._pages.claim(sequence) for sequence in sequences]
        for sequence, keys in zip(sequences, host_keys, strict=True):
            self._pages.restore(sequence, keys)
            self._queues.run(sequence)
        self._queues.num_last_admitted = len(sequences)

    def _allocate(self, plan: Plan) -> None:
        # Admitted sequences may have some of their pages already, copied from the host.
        missing = []
        for key in plan.page_needs:
            sequence = self._queues.by_key[key]
            num_tokens = sequence.num_computed_tokens + plan.scheduled[key]
            num_pages = self.pool.pages_for(num_tokens) - len(sequence.page_table)
            missing.append((sequence, max(0, num_pages)))
        self.cache.make_room(sum(num_pages for _, num_pages in missing))
        for sequence, num_pages in missing:
            self._pages.grow(sequence, num_pages)

    def _append(self, sequence: Sequence, token_id: int) -> Advance:
        token_ids = sequence.token_ids
        token_ids.append(token_id)
        num_tokens, reason = len(token_ids), None
        if token_id in sequence.stop_ids and num_tokens >= sequence.min_num_tokens:
            reason = FinishReason.STOP
        elif num_tokens >= sequence.max_num_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(sequence, reason)
        return Advance(sequence, token_id, num_tokens - sequence.num_prompt_tokens - 1, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._queues.remove(sequence)
        self.pool.accounts.close(sequence.key)
        if sequence.keeps_pages and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.holds.keep(sequence)
        else:
            self._pages.drop(sequence)
        self._to_preempt.pop(sequence.key, None)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
