"""Decides each step and keeps the state of sequences and pages.

The life of a sequence:

1. `add` refuses a sequence that could never run and puts any other in the waiting queue.
2. `plan` decides the next step: which sequences are preempted and admitted, and how many tokens each one
   computes. It changes nothing.
3. `apply` carries the plan out on the ledgers (preempt, share prefix pages, evict, allocate) and returns the
   Batch: page copies, then chunks of tokens. The caller runs the model on the batch.
4. `advance` counts the tokens of the batch as computed. A caller that plans the next step while this one
   runs calls it once the step is launched; tokens that are still to come have placeholders until then. In a
   pipeline the caller calls `launch` instead: sequences that sample are in no other step until `commit`.
5. `commit` takes the sampled tokens, of a batch that has advanced or not: the prefix cache learns full pages,
   and sequences that are done release their pages.
6. A preempted sequence releases its pages and goes back to 2 with all its tokens. The prefix cache knows its
   full pages and keeps them while there is room, on the device or in the host tier. `abort` is legal at any
   point.

Every accepted sequence ends exactly once: as a StepOutput with a finish reason, or in the list that `abort`
returns.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ordered
from itertools import count
from math import inf

import numpy as np

from baton.clock import Clock
from baton.config.engine import SchedulerConfig
from baton.engine.cache.prefix_cache import PrefixCache
from baton.engine.scheduler.page_holds import ExternalPageHolds
from baton.engine.scheduler.policies import POLICIES, QueueWindow
from baton.engine.scheduler.preemption import most_tokens
from baton.engine.scheduler.sequence import (
    Batch,
    Drafter,
    Int64s,
    Plan,
    Sequence,
    SequenceKey,
    SequenceQueues,
    SequenceStatus,
    attribute_step_cost,
)
from baton.engine.scheduler.step_planner import CostCap, PressureMode, StepPlanner
from baton.errors import IntegrityError
from baton.request import MAX_CHOICES, FilledPages, FinishReason, StepOutput

_RUNNING, _ENDING, _FINISHED = SequenceStatus.RUNNING, SequenceStatus.ENDING, SequenceStatus.FINISHED


class Scheduler:
    """Owns the queues of sequences and changes the ledgers of pages."""

    def __init__(
        self, config: SchedulerConfig, cache: PrefixCache, clock: Clock, attention_mlp_crossover: float = inf
    ) -> None:
        """attention_mlp_crossover: see `Model.attention_mlp_crossover`; inf: all tokens cost the same."""
        self.pressure_mode = PressureMode()
        self.drafter: Drafter | None = None  # proposes tokens to decodes; None: no speculative decoding
        self.num_batches = 1  # over which the running sequences are spread
        self._config = config
        self.cache = cache
        self.pool = cache.pool  # the ledger; transfers hold pages in it too
        self.num_preemptions = 0
        self.num_drafts = 0  # chunks that had drafts
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0  # drafts that were sampled, too
        self._clock = clock
        self._queues = SequenceQueues(cache.pool.page_size)
        self.holds = ExternalPageHolds(cache, self._queues)
        self._pages = SequencePages(cache)
        self._plan_batch = POLICIES[config.policy]
        self._window = QueueWindow(config.max_queue_delay_ms / 1e3, config.preferred_batch_sizes)
        # The other policies serve comparison only: no key overtakes another there.
        is_continuous = config.policy == "continuous"
        self._cost_cap = CostCap(self._queues.shares, attention_mlp_crossover if is_continuous else inf)
        self._to_preempt: dict[SequenceKey, None] = {}
        self._advanced: Batch | None = None  # its tokens count as computed, and it is not committed
        self._launched: deque[Batch] = deque()  # in flight, oldest first
        self._wait_s: float | None = None  # of the plan that was applied last
        self._serials = count()

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
        sequence.rank = (*sequence.rank[:4], serial)
        sequence.table_version = serial << 32
        self.cache.extend_keys(sequence, sequence.num_tokens // self.pool.page_size)
        self.cache.set_weight(sequence.cache_group, sequence.weight)
        if filled is not None:
            self.holds.settle(filled, sequence)
        else:
            self.pool.accounts.book(sequence.key, sequence.scheduling_key)
        self._queues.wait(sequence)

    def abort(self, request_id: str, choice: int | None = None) -> list[Sequence]:
        """End the live choices of the request, or one choice, and return them; unknown ids return none."""
        choices = range(MAX_CHOICES) if choice is None else (choice,)
        keys = [(request_id, each) for each in choices]
        aborted = [self._queues.by_key[key] for key in keys if key in self._queues.by_key]
        for sequence in aborted:
            self._finish(sequence, FinishReason.ABORT)
        return aborted

    def fail(self, sequence: Sequence, *, has_valid_pages: bool = False) -> None:
        """End a live sequence in an error; the prefix cache forgets its pages unless they are valid."""
        if not has_valid_pages:
            self.cache.forget(sequence.page_table)
        self._finish(sequence, FinishReason.ERROR)

    def has_work(self) -> bool:
        return bool(self._queues.by_key)

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting)

    @property
    def num_running(self) -> int:
        return self._queues.num_running

    @property
    def is_blocked(self) -> bool:
        """True when no sequence runs and a waiting sequence lacks only pages: it is not held, and no queue
        window delays it. Valid after a step.
        """
        is_ready = any(not each.is_held for each in self._queues.waiting)
        return is_ready and not self.num_running and self._wait_s is None

    def sequences(self) -> tuple[Sequence, ...]:
        """Every sequence that has not ended, in order of arrival."""
        return tuple(self._queues.by_key.values())

    def preempt(self, key: SequenceKey) -> None:
        """For tests: make the next plan preempt this running sequence, with or without need.

        A sequence that is preempted again and again advances only if one step computes all that it lacks.
        """
        sequence = self._queues.by_key[key]
        if not sequence.is_running:
            raise ValueError(f"sequence {key} is {sequence.status.value}, not running")
        self._to_preempt[key] = None

    # One step.

    def plan(self) -> Plan:
        """Decide the next step from the state as it is; change nothing but what the drafter keeps."""
        queues = self._queues
        planner = StepPlanner(
            queues,
            self.cache,
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            pressure_mode=self.pressure_mode,
            cost_cap=self._cost_cap,
            num_batches=self.num_batches,
        )
        for key in self._to_preempt:
            sequence = queues.by_key.get(key)
            if sequence is not None and sequence.is_running and key not in queues.in_flight:
                planner.preempt(sequence)
        planner.enforce_quotas()
        wait_s = self._plan_batch(planner, self._window, self._clock.now_s())
        if self.drafter is not None:
            planner.schedule_drafts(self.drafter)
        return planner.finish(wait_s)

    def apply(self, plan: Plan) -> Batch:
        """Carry out the plan that `plan` has just returned: nothing may have changed in between."""
        self._wait_s = plan.wait_s
        by_key = self._queues.by_key
        self.cache.host.begin_step()
        self._to_preempt = {key: None for key in self._to_preempt if key in self._queues.in_flight}
        for key in plan.preempted:
            self._preempt(by_key[key])
        if plan.admitted:
            self._admit([by_key[key] for key in plan.admitted])
        if plan.page_needs:
            self._allocate(plan)
        decodes = self._queues.decodes
        sequences, starts = decodes.sequences, decodes.starts
        num_own: Int64s | int = 1
        if not plan.is_pure_decode or list(plan.scheduled) != list(decodes.lengths):
            sequences = [by_key[key] for key in plan.scheduled]
            starts = np.array([sequence.num_computed_tokens for sequence in sequences], np.int64)
            num_own = np.array(list(plan.own_tokens.values()), np.int64)
        ends = starts + num_own
        if sequences:
            self._charge(plan.own_tokens)
        to_host, to_device = self.cache.host.take_copies()
        return Batch(
            sequences=sequences,
            starts=starts,
            ends=ends,
            # A chunk that starts and ends in the same page differs in the lower bits alone.
            page_ends=((starts ^ ends) >= self.pool.page_size).nonzero()[0].tolist(),
            lengths=list(plan.scheduled.values()),
            num_decodes=plan.num_decodes,
            is_pure_decode=plan.is_pure_decode,
            drafts=dict(enumerate(plan.drafts.values(), plan.num_decodes)) if plan.drafts else {},
            copies_to_host=to_host,
            copies_to_device=to_device,
            num_padded_tokens=plan.num_padded_tokens,
        )

    def launch(self, batch: Batch) -> None:
        """Keep the sequences that sample in the latest batch out of other batches until its `commit`.

        Chunks that do not sample count as computed: later chunks of their prompts may follow in the next
        batches. Launched batches are committed in order.
        """
        for chunk in () if batch.is_pure_decode else batch.chunks:
            if not chunk.samples:
                chunk.sequence.num_computed_tokens = chunk.start + chunk.num_tokens
        self._queues.launch(batch)
        self._launched.append(batch)

    def advance(self, batch: Batch, *, only_sampling: bool = False) -> None:
        """Count the tokens of the latest batch as computed, as the next plan needs while the batch runs.

        Each chunk that samples appends a placeholder to its sequence: -1 - i for the i-th of these chunks.
        Drafts count as computed once they are accepted. Chunks of sequences that have ended are ignored.
        only_sampling: `launch` has counted the other chunks.
        """
        self._advanced = batch
        chunks = zip(batch.sequences, batch.ends.tolist(), batch.placeholders(), strict=True)
        if self._queues.are_decodes_with_room(batch):
            for sequence, num_computed, placeholder in chunks:
                sequence.num_computed_tokens = num_computed
                sequence.token_ids.append(placeholder)
        else:
            self._advance_each(each for each in chunks if each[2] or not only_sampling)
        self._queues.advance(batch)

    def commit(
        self,
        batch: Batch,
        sampled: Ordered[int | None],
        step_s: float = 0.0,
        accepted: Mapping[int, Ordered[int]] = {},
        computed_s: float = 0.0,
    ) -> list[StepOutput]:
        """Record that the batch has run; `sampled[i]` is the token of chunk i if it samples.

        accepted: chunk -> the tokens that follow its sampled one, each sampled after an accepted draft. The
        KV of the other drafts lies beyond the computed tokens; no page of it is registered, and the next
        tokens overwrite it.
        Chunks of sequences that have ended since are ignored. Returns one StepOutput for each new token,
        without log probabilities.
        step_s: the time since the last batch ended, or since there was work. computed_s: the part of it in
        which the batch ran.
        """
        is_launched = bool(self._launched) and batch is self._launched[0]
        if is_launched:
            self._queues.land(self._launched.popleft())
        if batch is not self._advanced:
            self.advance(batch, only_sampling=is_launched)
        self._advanced = None
        attribute_step_cost(batch, step_s, self._cost_cap.cost)
        for chunk in batch.page_ends:
            if batch.sequences[chunk].status in (_RUNNING, _ENDING):
                self.cache.register(batch.sequences[chunk])
        if self._queues.continue_decodes(sampled, batch):
            token_s = step_s / max(1, len(batch.sequences))
            for sequence, token_id in zip(batch.sequences, sampled, strict=True):
                sequence.computed_s += computed_s
                sequence.used_s += token_s
                sequence.token_ids[-1] = token_id
            outputs = self._queues.decodes.outputs(batch.ends, sampled)
        else:
            outputs = self._commit_each(batch, sampled, step_s, computed_s)
        if batch.drafts:
            outputs += self._commit_drafts(batch, accepted)
        return outputs

    def _advance_each(self, chunks: Iterable[tuple[Sequence, int, int]]) -> None:
        """chunks: sequence, the number of its tokens that are computed then, placeholder or 0."""
        for sequence, num_computed, placeholder in chunks:
            if sequence.status is not _RUNNING:
                continue
            sequence.num_computed_tokens = num_computed
            if placeholder:
                sequence.token_ids.append(placeholder)
                if num_computed + 1 >= sequence.max_num_tokens:
                    self._queues.end(sequence)

    def _commit_each(
        self, batch: Batch, sampled: Ordered[int | None], step_s: float, computed_s: float
    ) -> list[StepOutput]:
        outputs: list[StepOutput] = []
        token_s = step_s / max(1, batch.num_tokens)
        columns = batch.sequences, batch.lengths, batch.ends.tolist(), sampled
        for sequence, num_tokens, num_computed, token_id in zip(*columns, strict=True):
            sequence.computed_s += computed_s
            sequence.used_s += num_tokens * token_s
            reason = None
            if token_id is None or token_id in sequence.stop_ids or sequence.status is not _RUNNING:
                if sequence.status is _FINISHED:
                    continue
                if token_id is None:
                    if sequence.token_ids[-1] < 0:
                        raise IntegrityError(
                            f"sequence {sequence.key} got no token at position {num_computed}"
                        )
                    continue
                reason = sequence.end_with(token_id)
            sequence.token_ids[-1] = token_id
            if reason is not None:
                self._finish(sequence, reason)
            request_id, choice = sequence.key
            index = num_computed - sequence.num_prompt_tokens
            outputs.append(
                StepOutput(request_id, choice, index, token_id, reason, sequence.num_cached_tokens)
            )
        return outputs

    def check_integrity(self) -> None:
        """All ledgers agree with each other and with the sequences; raises IntegrityError."""
        self.pool.check_integrity()
        self.cache.check_integrity()
        self.cache.host.check_integrity()
        self._queues.check_integrity()
        for sequence in (*self._queues.by_key.values(), *self.holds.kept.values()):
            for page in sequence.page_table:
                if sequence.key not in self.pool.owners(page):
                    raise IntegrityError(f"sequence {sequence.key} uses page {page} without owning it")
            if len(sequence.page_table) < self.pool.pages_for(sequence.num_computed_tokens):
                raise IntegrityError(f"sequence {sequence.key} has fewer pages than computed tokens")

    def _commit_drafts(self, batch: Batch, accepted: Mapping[int, Ordered[int]]) -> list[StepOutput]:
        """Append the tokens that follow accepted draft tokens. A token that ends its sequence is the last."""
        self.num_drafts += len(batch.drafts)
        for chunk, drafts in batch.drafts.items():
            self.num_draft_tokens += len(drafts)
            batch.sequences[chunk].num_draft_tokens += len(drafts)
        outputs: list[StepOutput] = []
        num_accepted: dict[SequenceKey, int] = {}
        ending: list[tuple[Sequence, FinishReason]] = []
        for chunk, token_ids in accepted.items():
            sequence = batch.sequences[chunk]
            if sequence.status is _FINISHED:
                continue
            request_id, choice = sequence.key
            for token_id in token_ids:
                index = len(sequence.token_ids) - sequence.num_prompt_tokens
                sequence.num_computed_tokens += 1
                sequence.token_ids.append(token_id)
                reason = sequence.end_with(token_id)
                output = StepOutput(request_id, choice, index, token_id, reason, sequence.num_cached_tokens)
                outputs.append(output)
                num_accepted[sequence.key] = num_accepted.get(sequence.key, 0) + 1
                if reason is not None:
                    ending.append((sequence, reason))
                    break
            sequence.num_accepted_tokens += num_accepted.get(sequence.key, 0)
            self.cache.register(sequence)
        self.num_accepted_tokens += len(outputs)
        self._charge(num_accepted)
        for sequence, reason in ending:
            self._finish(sequence, reason)
        return outputs

    def _charge(self, num_tokens: Mapping[SequenceKey, int]) -> None:
        by_key, shares, now_s = self._queues.by_key, self._queues.shares, self._clock.now_s()
        if shares.are_several:
            shares.charge(((by_key[key].share, num) for key, num in num_tokens.items()), now_s)
        else:
            shares.charge_only(sum(num_tokens.values()), now_s)

    def _preempt(self, sequence: Sequence) -> None:
        sequence.num_preemptions += 1
        sequence.preempted_since_s = self._clock.now_s()
        self.num_preemptions += 1
        self._pages.drop(sequence)
        self._queues.stop(sequence)

    def _admit(self, sequences: list[Sequence]) -> None:
        # All claim before any restores, because restoring evicts.
        host_keys = [self._pages.claim(sequence) for sequence in sequences]
        for sequence, keys in zip(sequences, host_keys, strict=True):
            self._pages.restore(sequence, keys)
            self._queues.run(sequence)
            if sequence.started_s is None:
                sequence.started_s = self._clock.now_s()
            if sequence.preempted_since_s is not None:
                sequence.preempted_s += self._clock.now_s() - sequence.preempted_since_s
                sequence.preempted_since_s = None
        self._queues.num_last_admitted = len(sequences)

    def _allocate(self, plan: Plan) -> None:
        by_key, missing = self._queues.by_key, {**plan.page_needs}
        # Admitted sequences may have some of their pages already, copied from the host.
        for key in missing.keys() & plan.admitted:
            sequence = by_key[key]
            num_tokens = sequence.num_computed_tokens + plan.scheduled[key]
            missing[key] = self.pool.num_missing(num_tokens, len(sequence.page_table))
        self.cache.make_room(sum(missing.values()))
        for key, num_pages in missing.items():
            by_key[key].page_table += self.pool.allocate(num_pages, key)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._queues.remove(sequence)
        self.pool.accounts.close(sequence.key)
        if sequence.keeps_pages and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.holds.kept[sequence.key] = sequence
        else:
            self._pages.drop(sequence)
        self._to_preempt.pop(sequence.key, None)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason


# The pages of sequences.


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
        device_pages, host_keys = self._cache.match(sequence)
        self._pool.share(device_pages, sequence.key)
        sequence.page_table += device_pages
        for key in host_keys:
            self._host.pin(key)
        return host_keys

    def restore(self, sequence: Sequence, host_keys: list[bytes]) -> None:
        """Copy host pages back and set `num_computed_tokens`."""
        if not sequence.num_computed_tokens:
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

    def drop(self, sequence: Sequence) -> None:
        """Release all pages of the sequence."""
        self._pool.release(sequence.page_table, sequence.key)
        sequence.page_table.clear()
        sequence.table_version += 1
        sequence.num_known_pages = 0
        sequence.num_computed_tokens = 0

    def _fetch(self, sequence: Sequence, key: bytes) -> None:
        page = self._cache.page_of(key)
        if page is not None:  # another sequence admitted by the same plan has brought it back
            self._pool.share((page,), sequence.key)
            sequence.page_table.append(page)
            return
        self._cache.make_room(1)
        sequence.page_table += self._pool.allocate(1, sequence.key)
        self._host.fetch(key, sequence.page_table[-1])
        self._cache.learn_fetched(sequence, key)
