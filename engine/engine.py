"""One model replica: requests in, tokens out.

1. `add` checks a request and makes one sequence a choice.
2. `step` plans, runs the model on all ranks, samples, and returns one StepOutput for each new token.
3. A request ends when every choice has had an output with a finish reason; `abort` ends it at any time.

For KV that comes from elsewhere or goes there:

4. `claim_prefix` holds what is known of a prompt; `make_room` clears pages for a reservation in `pages`, the
   ledger, for the rest. `add` takes both as FilledPages and goes on from there.
5. `add` returns how to follow each sequence. With `keeps_pages` its pages stay after its last token, until
   `release_kept`.

The engine knows nothing of prefill and decode as roles, of text, tenants or peers.
"""

import logging
import random
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from contextlib import suppress
from time import perf_counter
from typing import Final

import msgspec
from torch import Tensor

from baton.clock import Clock
from baton.engine.cache.host_tier import HostTier
from baton.engine.cache.page_events import PageChanges
from baton.engine.cache.page_pool import Owner, PagePool
from baton.engine.cache.prefix_cache import PrefixCache
from baton.engine.models.parameters import attention_mlp_crossover
from baton.engine.replica import EngineStats, LayerWatch, StepFigures, take_stats
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.sampler import Sampled, Sampler
from baton.engine.runner.step_inputs import StepBuilder, encode
from baton.engine.runner.tp_worker import STOP_COMMAND, TpWorkers
from baton.engine.scheduler.plan import Advance, Batch
from baton.engine.scheduler.preemption import PreemptionMeter
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequence import FilledPages, Sequence, SequenceProgress
from baton.engine.scheduler.step_planner import PressureMode
from baton.engine.scheduler.validation import check_request
from baton.errors import WorkerLost
from baton.pages import PageKeys
from baton.request import Request, StepOutput

# What the engine says of its sequences.


def output_of(advance: Advance, sampled: Sampled) -> StepOutput:
    sequence = advance.sequence
    return StepOutput(
        request_id=sequence.request_id,
        choice=sequence.choice,
        index=advance.index,
        token_id=advance.token_id,
        logprobs=sampled.logprobs.get(sequence.key),
        prompt_logprobs=sampled.prompt_logprobs.get(sequence.key),
        finish_reason=advance.finish_reason,
        num_cached_tokens=sequence.num_cached_tokens,
    )


def last_output_of(sequence: Sequence, error: str | None = None) -> StepOutput:
    """Of a sequence that has ended without another token."""
    return StepOutput(
        request_id=sequence.request_id,
        choice=sequence.choice,
        index=sequence.num_generated_tokens,
        token_id=None,
        finish_reason=sequence.finish_reason,
        num_cached_tokens=sequence.num_cached_tokens,
        error=error,
    )


logger = logging.getLogger(__name__)
BAD_LOGITS: Final = "the model's logits are not numbers: its KV pages or its weights are damaged"


class Engine:
    """`runner` is loaded and has its pool; it is rank 0 of its tensor-parallel group."""

    def __init__(
        self,
        runner: ModelRunner,
        clock: Clock,
        model_fingerprint: str,
        tp_workers: TpWorkers | None = None,
    ) -> None:
        self.runner = runner
        self.fingerprint = model_fingerprint
        self._clock = clock
        self._tp_workers = tp_workers
        self._why_lost: str | None = None  # what left the ranks out of step with each other
        self.wait_s: float | None = None  # after a step that did nothing: how long until one can
        self.on_batch: Callable[[int], None] = lambda num_tokens: None  # told of each that is about to run
        self._last_step: tuple[Batch, float] | None = None
        self._busy_since_s: float | None = None  # the end of the last step, if there was more to do
        self._seeds = random.Random(runner.config.seed)
        self._meter = PreemptionMeter(runner.pool)
        self._num_steps = 0  # that ran, of whatever kind
        config, layout = runner.config, runner.layout
        keys = None
        if config.cache.enable_prefix_caching:
            keys = PageKeys(
                model_fingerprint=model_fingerprint, dtype=layout.dtype, page_size=layout.page_size
            )
        pool = PagePool(len(runner.pool.device), layout.page_size, runner.steps)
        cache = PrefixCache(pool, keys, HostTier(len(runner.pool.host)))
        self.scheduler = Scheduler(config.scheduler, cache, clock, attention_mlp_crossover(runner.model))
        self._start_steps()

    def _start_steps(self) -> None:
        """With nothing remembered of earlier ones."""
        layout, max_num_seqs = self.runner.layout, self.runner.config.scheduler.max_num_seqs
        self._busy_since_s = None
        self._builder = StepBuilder(layout.page_size, max_num_seqs, layout.num_pages(self.max_model_len))
        self._sampler = Sampler(self.runner.device)

    @property
    def max_model_len(self) -> int:
        return self.runner.max_model_len

    def check(self, request: Request) -> None:
        """Raises InvalidRequest for what `add` would refuse because of the request itself."""
        check_request(request, vocab_size=self.runner.model.vocab_size, max_model_len=self.max_model_len)

    def add(
        self, request: Request, filled: FilledPages | None = None, *, keeps_pages: bool = False
    ) -> tuple[SequenceProgress, ...]:
        """Accept a request: one Progress a choice, to be read between steps.

        filled: KV that it brings, for one choice alone; the pages are the engine's once it is accepted.
        Raises InvalidRequest when it cannot run, ValueError for pages that cannot be what it starts with and
        IntegrityError when their owner does not use them all; nothing is kept or changed then.
        """
        if self._why_lost is not None:
            raise WorkerLost(f"{self._why_lost} and left the ranks apart: the engine must be loaded again")
        self.check(request)
        sampling = request.sampling
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._seeds.getrandbits(63))
            request = msgspec.structs.replace(request, sampling=sampling)
        if filled is not None and sampling.n > 1:
            raise ValueError(f"request {request.request_id}: {sampling.n} choices cannot share brought pages")
        sequences = []
        for choice in request.choices:
            sequence = Sequence.from_request(
                request,
                choice,
                max_model_len=self.max_model_len,
                eos_token_ids=self.runner.model.eos_token_ids,
            )
            sequence.keeps_pages = keeps_pages
            self.scheduler.add(sequence, filled)
            sequences.append(sequence)
        return tuple(sequences)

    def abort(self, request_id: str, choice: int | None = None) -> list[StepOutput]:
        """End the request, or one choice of it: a last output, without a token, for each that was alive."""
        ended = self.scheduler.abort(request_id, choice)
        for sequence in ended:
            self._sampler.forget(sequence)
        return [last_output_of(sequence) for sequence in ended]

    def relieve(self, pressure_mode: PressureMode) -> None:
        """What the steps from now on do because the machine is overloaded."""
        self.scheduler.pressure_mode = pressure_mode

    # KV that comes from elsewhere or goes there.

    @property
    def pages(self) -> PagePool:
        """The ledger of pages: the same one as long as the engine lives. Leases end at the clock's time."""
        return self.scheduler.pool

    def claim_prefix(
        self, token_ids: Ordered[int], salt: bytes, owner: Owner, *, multiple_of: int = 1
    ) -> FilledPages:
        """Hold the device's pages of the longest known prefix, whole pages that leave a token to compute and
        have a multiple of so many tokens; perhaps none. ValueError when the owner has a claim already.

        They are given to `add`, alone or followed by others that `owner` uses, or to `release`.
        """
        return self.scheduler.claim(token_ids, salt, owner, multiple_of=multiple_of)

    def release(self, filled: FilledPages) -> None:
        """Let go of pages that were not added. IntegrityError when they are not all the owner's."""
        self.scheduler.outside.release(filled.pages, filled.owner)

    def release_kept(self, request_id: str, choice: int = 0) -> None:
        """Let go of the pages that the sequence keeps since its last token, if it does."""
        self.scheduler.outside.release_kept((request_id, choice))

    @property
    def num_available_pages(self) -> int:
        """Pages that `make_room` grants now."""
        self._expire()
        return self.scheduler.outside.num_reservable()

    def make_room(self, num_pages: int) -> bool:
        """Have so many pages free in the ledger, to be reserved at once; False when that cannot be granted.

        See engine/scheduler/page_holds.py for what is left to running sequences.
        """
        if num_pages > self.num_available_pages:
            return False
        self.scheduler.cache.make_room(num_pages, keep=False)
        return True

    def page_keys(self, token_ids: Ordered[int], salt: bytes, page_size: int) -> list[bytes]:
        """What replicas of this model with pages of that size call those that these tokens fill."""
        return self.scheduler.cache.name(token_ids, salt, page_size)

    def lend(self, keys: Ordered[bytes], borrower: Owner) -> list[int] | None:
        """Pages of the device with what these keys name, which the borrower uses until it releases them in
        the ledger; what is on the host alone is copied there. None: it is not all here, or has no room.
        """
        self._expire()
        loan = self.scheduler.outside.lend(keys, borrower)
        if loan is not None and loan.copies:
            try:
                self._run(Batch(chunks=(), num_decodes=0, copies_to_device=loan.copies), None)
            except BaseException as error:
                self.pages.release(loan.pages, borrower)
                self._fall_apart(error)
                raise
        return None if loan is None else loan.pages

    def take_page_changes(self, *, is_afresh: bool = False) -> PageChanges:
        """What others could find here and could not when this was last called; is_afresh: all of it."""
        return self.scheduler.cache.take_changes(is_afresh=is_afresh)

    def stats(self) -> EngineStats:
        self._expire()
        return take_stats(self.scheduler)

    def last_step(self) -> StepFigures | None:
        """Of the latest step that computed anything; it is worked out now, so ask for few of them."""
        return None if self._last_step is None else StepFigures.of(*self._last_step)

    # Steps.

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self, watch: LayerWatch | None = None) -> list[StepOutput]:
        """Advance every scheduled sequence; the list is empty while prompts are still being computed.

        watch: asked what it wants to know of the step, and told while that runs.

        A sequence whose logits are not numbers ends in an error, alone, and its pages are not found again.
        When anything else goes wrong on the way, an interrupt included, all requests are lost: pages may be
        known by now whose contents were never written, so nothing that was known is trusted again. Pages that
        others hold, claimed, kept or leased, stay theirs. Several ranks are apart then, and `add` raises
        WorkerLost.
        """
        self._expire()
        keys = self.scheduler.keys()
        try:
            return self._step(watch)
        except BaseException as error:
            self.scheduler.lose(keys)
            self._start_steps()
            self._fall_apart(error)
            raise

    def _step(self, watch: LayerWatch | None) -> list[StepOutput]:
        self.scheduler.rates = self._meter.rates
        began_s = perf_counter() if self._busy_since_s is None else self._busy_since_s
        plan = self.scheduler.plan()
        self.wait_s = plan.wait_s
        batch = self.scheduler.apply(plan)
        self.on_batch(sum(chunk.num_tokens for chunk in batch.chunks))
        started_s = perf_counter()
        sampled = self._sampler.sample(batch, self._run(batch, watch))
        ended_s = perf_counter()
        step_s = ended_s - started_s
        self._meter.observe(batch, step_s)
        if batch.chunks:
            self._last_step = batch, step_s
        for sequence in sampled.failed:
            logger.error("logits that are not numbers", extra={"request_id": sequence.request_id})
            self.scheduler.fail(sequence)
        advances = self.scheduler.commit(batch, sampled.token_ids, ended_s - began_s)
        self._busy_since_s = ended_s if self.scheduler.has_work() else None
        outputs = [output_of(advance, sampled) for advance in advances]
        return outputs + [last_output_of(sequence, BAD_LOGITS) for sequence in sampled.failed]

    def close(self) -> None:
        """Let the other ranks go and wait until they have."""
        tp_workers, self._tp_workers = self._tp_workers, None
        if tp_workers is None:
            return
        if self._why_lost is not None:
            tp_workers.close(timeout_s=0.0)
            return
        with suppress(WorkerLost):  # a rank that is gone already needs no telling
            self.runner.tp.send_command(STOP_COMMAND)
        tp_workers.close()

    def _fall_apart(self, error: BaseException) -> None:
        """Several ranks no longer do the same, once one of them has not come to the end of a step."""
        if self.runner.tp.size > 1:
            interrupted = isinstance(error, KeyboardInterrupt)
            self._why_lost = "an interrupt ended a step" if interrupted else "a step failed"

    def _expire(self) -> None:
        self.scheduler.pool.expire(self._clock.now_s())

    def _run(self, batch: Batch, watch: LayerWatch | None) -> Tensor:
        num_groups = watch.begin(batch.chunks) if watch is not None and batch.chunks else 0
        self._num_steps += 1
        arrays = self._builder.build(batch)._replace(step=self._num_steps, num_layer_groups=num_groups)
        if self.runner.tp.size > 1:
            self.runner.tp.send_command(encode(arrays))
        if watch is None:
            return self.runner.execute(arrays)
        return self.runner.execute(arrays, watch.layers_written)
