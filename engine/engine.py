"""One model replica on this machine's devices: `load_engine` makes an Engine, which is a `Replica`.

Each call of `Engine.step` adds a step to a queue of steps in flight:

1. The scheduler plans a batch, with placeholders for the tokens of the step in flight, and applies the plan.
2. The runner launches the batch.
3. Without a pipeline, the engine takes the step in flight from the queue, waits for its tokens and commits
   them. Then it samples the new step and adds it to the queue. The next call takes its tokens; without
   asynchronous scheduling this call does.
4. In a pipeline of N stages, the engine adds the new step to the queue. When N steps are in flight, it
   samples the oldest one, waits for its tokens and commits them.
"""

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final

import msgspec
import torch
from torch import Tensor

from baton.clock import Clock, SystemClock
from baton.config.engine import EngineConfig, RankSidecar, SpeculativeConfig
from baton.config.environment import cache_directory, prepare_nccl
from baton.engine.cache.disk_tier import DiskTier, open_store
from baton.engine.cache.page_pool import Owner, PagePool
from baton.engine.cache.prefix_cache import HostTier, PrefixCache
from baton.engine.models.loading.weights import Checkpoint, HostCheckpoint, Progress
from baton.engine.models.model import attention_mlp_crossover
from baton.engine.models.registry import RANK_CHECKS, read_model_config
from baton.engine.replica import LayerWatch, Replica, last_output
from baton.engine.runner.adapter_slots import AdapterSlots
from baton.engine.runner.logits_processors import LOGITS_PROCESSORS, load_logits_processor
from baton.engine.runner.model_runner import (
    KvPool,
    ModelRunner,
    ZerosOnCpu,
    check_memory,
    choose_device,
    model_fingerprint,
    open_checkpoint,
    page_bytes,
)
from baton.engine.runner.rank_process import RankNodes
from baton.engine.runner.replica_rank import PendingTensor, ReplicaRank
from baton.engine.runner.sampler import Draws, Sampled, Sampler
from baton.engine.runner.step_inputs import StepArrays, StepBuilder, encode
from baton.engine.runner.structured_output import StructuredOutputMask
from baton.engine.runner.tp_worker import TpWorkers
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequence import Batch, Drafter, PageCopy, Sequence
from baton.engine.speculation.draft_lengths import time_steps
from baton.engine.speculation.draft_model import ModelDrafter, load_draft_model
from baton.engine.speculation.lookup import LookupDrafter
from baton.errors import BatonError, ConfigError, InvalidRequest, WorkerLost
from baton.kernels import native
from baton.kernels.decoder_stack import OnLayers
from baton.kernels.native import huge_zeros
from baton.kernels.sample import SamplingTensors
from baton.messages.workers import Load, Tier
from baton.pages import PageKeys
from baton.request import FilledPages, Request, StepOutput

logger = logging.getLogger(__name__)
HELD_POLL_S: Final = 0.001  # wait of an idle engine before it checks held sequences again
MAX_LOAD_S: Final = 5.0  # longest wait of a request for its pages on disk; then its prompt is computed
FLUSH_S: Final = 5.0  # longest time in which `close` writes pages to the disk
BAD_LOGITS: Final = "the model's logits are not numbers: its KV pages or its weights are damaged"
ALL_BANNED: Final = (
    "no token is allowed here: the request's bans (allowed_token_ids, bad_words, logit_bias, min_tokens, "
    "structured_outputs, extra_args) leave none"
)


def load_engine(
    config: EngineConfig,
    *,
    clock: Clock | None = None,
    progress: Progress | None = None,
    zeros_on_cpu: ZerosOnCpu = huge_zeros,
    sidecar: RankSidecar | None = None,
    nodes: RankNodes | None = None,
    checkpoint: Checkpoint | None = None,
) -> "Engine":
    """Load the model on all ranks; ranks other than 0 are processes that end when the engine is closed.

    Raises ModelError for an invalid model directory, ConfigError for a configuration that does not fit the
    machine, and WorkerLost when another rank ends or hangs.

    zeros_on_cpu: makes the memory of rank 0's KV pool on a CPU. sidecar: runs in each process of another rank
    of this node, has started on return, and makes the memory of that rank's pool. nodes: starts the ranks on
    other nodes (`nnodes`), with sidecars of their own. checkpoint: the weights of rank 0; None: read them
    from the model's files.
    """
    native.keep_builds_in(cache_directory())
    prepare_nccl()
    directory = Path(config.model).resolve()
    config = msgspec.structs.replace(config, model=str(directory))  # other ranks start in another folder
    model_config = read_model_config(directory)
    for check in RANK_CHECKS.values():
        check(model_config, config)
    check_memory(config, model_config)
    tp_workers = TpWorkers(config, sidecar, nodes) if config.num_ranks > 1 else None
    try:
        runner = ModelRunner(config, model_config, tp_workers.rank if tp_workers else ReplicaRank())
        with tp_workers.explains_loss() if tp_workers else nullcontext():
            runner.load(progress, checkpoint)
            draft_model = load_draft_model(config, model_config)
            _allocate(runner, zeros_on_cpu)
            if sidecar is not None:
                runner.rank.smallest(0)  # the ranks meet here once their sidecars have started
        name = model_fingerprint(config)
        return Engine(runner, clock or SystemClock(), name, tp_workers, draft_model)
    except BaseException:
        if tp_workers:
            tp_workers.close(timeout_s=0.0)
        raise


def copy_weights(config: EngineConfig) -> Checkpoint | None:
    """Return a copy of the model's files in host memory, for `load_engine`; None where it would save nothing.

    On a CPU the system's file cache already keeps the files; dummy weights have no files.
    """
    device = choose_device(config.device, 0)
    if device.type == "cpu" or config.load_format == "dummy":
        return None
    return HostCheckpoint(open_checkpoint(config, read_model_config(Path(config.model)), device))


class Engine(Replica):
    """A replica with a model. `runner` is rank 0 of the replica; it has its weights and its pool."""

    def __init__(
        self,
        runner: ModelRunner,
        clock: Clock,
        model_fingerprint: str,
        tp_workers: TpWorkers | None = None,
        draft_model: ModelRunner | None = None,
    ) -> None:
        """draft_model: loaded, with its pool; see `SpeculativeConfig`."""
        config, model_config = runner.config, runner.model_config
        scheduler = _make_scheduler(runner, clock, model_fingerprint, len(runner.pool.host))
        super().__init__(scheduler, vocab_size=model_config.vocab_size, max_model_len=runner.max_model_len)
        self._clock = clock
        self.runner = runner
        self.fingerprint = model_fingerprint
        self.wait_s: float | None = None  # after a step that computed nothing: the time until one can
        self.on_batch: Callable[[int], None] = lambda num_tokens: None  # called before each batch runs
        self._tp_workers = tp_workers
        self._explains_loss: Callable[[], AbstractContextManager[None]] = (
            nullcontext if tp_workers is None else tp_workers.explains_loss
        )
        self._why_lost: str | None = None  # the failure after which the ranks may have different states
        self._busy_since_s: float | None = None  # the end of the last step, if there was more work
        self._in_flight: deque[_Step] = deque()  # launched; their tokens are still to come
        self._is_async = choose_async(config, runner.device)
        self._seeds = random.Random(config.seed)
        self._page_costs = PageCosts(runner.pool)
        self._num_steps = 0
        directory, self._eos_token_ids = Path(config.model), model_config.eos_token_ids
        self._form_mask = StructuredOutputMask(directory, model_config.vocab_size, self._eos_token_ids)
        self._adapters = AdapterSlots(runner, config.max_loras, config.num_cpu_loras)
        self._outside_processors = [*map(load_logits_processor, config.logits_processors)]
        self._start_steps()
        self._sampler.warm_up(model_config.vocab_size)
        if config.speculative is not None:
            scheduler.drafter = self._make_drafter(config.speculative, draft_model)
        self._open_disk()

    def _open_disk(self) -> None:
        """Give the host tier a disk below it, if there is to be one."""
        runner, host = self.runner, self.scheduler.cache.host
        path = runner.config.cache.kv_disk_path
        if path is None:
            return
        if not host.num_pages:
            raise ConfigError(
                f"cache.kv_disk_path: pages on disk pass through host memory, which has no room for one of "
                f"{runner.layout.page_bytes:,} bytes: set cache.host_cache_memory_bytes"
            )
        identity = msgspec.json.encode((self.fingerprint, runner.layout))
        max_bytes = runner.config.cache.kv_disk_bytes
        host_pools = [runner.pool.host]
        if self._tp_workers is not None:
            host_pools += self._tp_workers.host_pools(runner.pool.host, runner.layout)
        store = open_store(Path(path), identity, runner.tp.size * runner.layout.page_bytes, max_bytes)
        has_passed = runner.replica_steps.has_passed
        host.disk = DiskTier(store, [*map(page_bytes, host_pools)], has_passed, host.is_current)

    def _start_steps(self) -> None:
        """Reset everything that is remembered from step to step."""
        layout, largest_batch = self.runner.layout, self.runner.config.scheduler.largest_batch
        self._busy_since_s = None
        self._in_flight.clear()
        self._held: dict[Sequence, list[Callable[[], bool]]] = {}  # may start once all of these are True
        max_pages, num_batches = layout.num_pages(self.max_model_len), self.scheduler.num_batches
        # One for each step in flight, in turn, so that the same sequences come back to the same builder.
        self._builders = deque(
            StepBuilder(layout.page_size, largest_batch, max_pages, shares_steps=num_batches > 1)
            for _ in range(num_batches)
        )
        processors = (*LOGITS_PROCESSORS.values(), *self._outside_processors)
        self._sampler = Sampler(self.runner.device, processors, self._form_mask)

    def add(
        self, request: Request, filled: FilledPages | None = None, *, keeps_pages: bool = False
    ) -> tuple[Sequence, ...]:
        """As `Replica.add`; draws missing seeds. Raises WorkerLost after a step that failed on some ranks."""
        if self._why_lost is not None:
            raise WorkerLost(f"{self._why_lost}: the ranks may differ, the engine must be loaded again")
        self.check(request)
        sampling = request.sampling
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._seeds.getrandbits(63))
            request = msgspec.structs.replace(request, sampling=sampling)
        sequences = self._add(request, filled, keeps_pages, self.runner.model_config.eos_token_ids)
        for sequence in sequences:
            conditions: list[Callable[[], bool]] = []
            if sampling.structured_outputs is not None:
                conditions.append(self._form_mask.prepare(sequence))
            if request.adapter is not None:
                conditions.append(partial(self._adapters.is_placed, request.adapter))
            if filled is None and self.scheduler.cache.prefetch(sequence):
                conditions.append(partial(self._is_loaded, sequence, perf_counter()))
            if conditions:
                sequence.is_held, self._held[sequence] = True, conditions
        return sequences

    def check(self, request: Request) -> None:
        super().check(request)
        if request.adapter is not None:
            self._adapters.check(request.adapter)
        sampling = request.sampling
        if sampling.structured_outputs is not None:
            self._form_mask.check()
        if sampling.allowed_token_ids is not None and sampling.min_tokens:
            ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_token_ids)}
            if ends.issuperset(sampling.allowed_token_ids):
                raise InvalidRequest(
                    "allowed_token_ids: each of them ends the answer, and min_tokens bans it"
                )
        if sampling.extra_args and not any(each.applies(sampling) for each in self._outside_processors):
            names = ", ".join(sampling.extra_args)
            raise InvalidRequest(f"extra_args: no logits processor of this server takes {names}")

    def step(self, watch: LayerWatch | None = None) -> list[StepOutput]:
        """As `Replica.step`. With asynchronous scheduling, the tokens of a step come with the next call. In a
        pipeline of N stages they come with the call that launches the (N - 1)th step after it.

        A sequence with logits that are not numbers ends in an error, alone, and the prefix cache forgets its
        pages. A sequence also ends in an error when its request bans every token or its form fails; its pages
        stay known. Any other failure, an interrupt included, loses all requests and all holds on pages. The
        engine then goes on with a new ledger and an empty prefix cache, because the old cache may know pages
        that were never written. With several ranks, the error is the one that a lost rank has reported, if
        any, and `add` raises WorkerLost from then on.
        """
        sequences = self.scheduler.sequences()
        try:
            with self._explains_loss():
                return self._step(watch)
        except BaseException as error:
            self._finish_drafting(sequences)
            self._start_again(error)
            raise

    def _start_again(self, error: BaseException) -> None:
        """Replace the ledgers of pages and sequences, which a step that failed half-way may have damaged.

        A disk that hangs may still write to the host pages, so none of them is used from then on.
        """
        self._note_loss(error)
        drafter, host = self.scheduler.drafter, self.scheduler.cache.host
        num_host_pages = 0
        try:
            if host.disk is None or host.disk.stop():
                num_host_pages = host.num_pages
        finally:  # also when an interrupt ends the wait for the disk
            self.scheduler = _make_scheduler(self.runner, self._clock, self.fingerprint, num_host_pages)
            self.scheduler.drafter = drafter
            self._start_steps()
        if host.disk is not None and num_host_pages:
            self._open_disk_again(host.disk)

    def _open_disk_again(self, stopped: DiskTier) -> None:
        """Replace the disk tier; log an error instead of raising it, because the step's own error counts."""
        try:
            stopped.close()
            if self._why_lost is None:
                self._open_disk()
        except (BatonError, OSError, RuntimeError) as error:  # RuntimeError: no thread can start
            logger.error("the disk tier of KV pages is off until the worker starts again: %s", error)

    def has_work(self) -> bool:
        return bool(self._in_flight) or super().has_work()

    def _step(self, watch: LayerWatch | None) -> list[StepOutput]:
        """Launch a step, take the tokens of the one in flight, then sample.

        The scheduler plans with placeholders for the tokens in flight. The device reads these tokens where
        they were sampled, so it computes without a pause. Sampling needs the tokens of the sequences on the
        host, and so waits for them.

        In a pipeline several steps are in flight, with different sequences. A step is sampled once the last
        stage has computed it.
        """
        began_s = perf_counter()
        if (token_s := self._page_costs.compute_token_s) is not None:
            self.scheduler.cache.host.compute_page_s = token_s * self.pages.page_size
        self.scheduler.cache.poll()
        refused = self._release_held() if self._held else []
        plan = self.scheduler.plan()
        self.wait_s = plan.wait_s
        if self._held and not plan.scheduled:
            self.wait_s = HELD_POLL_S
        batch = self.scheduler.apply(plan)
        meter = self._step_meter
        if batch.is_empty:
            meter.end()
            if self._in_flight and self.scheduler.num_batches > 1:
                self.wait_s = None
            return refused + self._collect()
        num_tokens = batch.num_tokens
        self.on_batch(num_tokens)
        launched_s = perf_counter()
        meter.begin(began_s)
        meter.lap("schedule", launched_s)
        sampling = self._sampler.parameters_of_draws(batch) if self.runner.pp.size > 1 else None
        answer = self._run(batch, watch, sampling)
        step = _Step(batch, num_tokens, answer, sampling is not None, began_s, launched_s)
        if self.scheduler.num_batches > 1:
            self.scheduler.launch(batch)
            self._in_flight.append(step)
            outputs = self._collect() if len(self._in_flight) == self.scheduler.num_batches else []
        else:
            outputs = self._collect()
            if batch.sequences:
                self._sample(step)
                self._in_flight.append(step)
            else:
                step.answer.wait()
            if self._is_async:
                self.scheduler.advance(batch)
            else:
                outputs = self._collect()
        meter.end()
        return refused + outputs if refused else outputs

    def _sample(self, step: "_Step") -> Draws:
        answer = step.answer.wait()
        draws = self._sampler.drawn if step.is_drawn else self._sampler.sample
        step.draws = draws(step.batch, answer)
        self._step_meter.lap("sample")
        return step.draws

    def _release_held(self) -> list[StepOutput]:
        """Let sequences be admitted once their grammars are compiled, their adapters are placed and their
        pages are read from the disk; return the last outputs of sequences that cannot run.
        """
        refused = []
        self._place_adapters()
        for sequence, conditions in list(self._held.items()):
            if sequence.finish_reason is None:
                try:
                    conditions[:] = [each for each in conditions if not each()]
                except InvalidRequest as error:
                    self.scheduler.fail(sequence, has_valid_pages=True)
                    refused.append(last_output(sequence, str(error), is_invalid=True))
            if not conditions or sequence.finish_reason is not None:
                del self._held[sequence]
                sequence.is_held = False
        return refused

    def _place_adapters(self) -> None:
        """Place the adapters of held sequences that have been read."""
        held = [each for each in self._held if each.finish_reason is None]
        wanted = dict.fromkeys(each.adapter for each in held if each.adapter is not None)
        if wanted:
            sequences = self.scheduler.sequences()
            live = {each.adapter.digest for each in sequences if each.adapter is not None}
            self._adapters.place(wanted, live)

    def _is_loaded(self, sequence: Sequence, since_s: float) -> bool:
        """Return True once no page of the sequence is to come from the disk.

        A disk that takes longer than MAX_LOAD_S is stalled: no request waits for it until it has read or
        written a page.
        """
        host = self.scheduler.cache.host
        if host.disk is None or host.disk.is_stalled or not host.is_loading(sequence.page_keys):
            return True
        host.disk.is_stalled = perf_counter() - since_s > MAX_LOAD_S
        return host.disk.is_stalled

    def _collect(self) -> list[StepOutput]:
        """Wait for the tokens of the oldest step in flight, if any, and commit them."""
        if not self._in_flight:
            return []
        step = self._in_flight.popleft()
        if not step.batch.sequences:  # copies alone
            step.answer.wait()
            return self.scheduler.commit(step.batch, [])
        sampled = (step.draws or self._sample(step)).wait()
        ended_s = perf_counter()
        step_s = ended_s - max(step.launched_s, self._busy_since_s or 0.0)
        self._page_costs.observe(step.batch, step_s)
        if self.scheduler.drafter is None:
            self._last_step = step.batch, step_s
        else:  # proposing is part of the step
            whole_s = ended_s - max(step.began_s, self._busy_since_s or 0.0)
            # A full pipeline and an empty one take about as long from the plan of a step to its tokens.
            self.scheduler.drafter.observe(step.batch, ended_s - step.began_s)
            self._last_step = (
                step.batch,
                whole_s / (1 if step.batch.prompt_chunks else sampled.tokens_a_sequence),
            )
        failed = self._fail(sampled) if sampled.failed or sampled.banned else []
        since_s = step.began_s if self._busy_since_s is None else self._busy_since_s
        busy_s, meter = ended_s - since_s, self._step_meter
        outputs = self.scheduler.commit(step.batch, sampled.token_ids, busy_s, sampled.accepted, step_s)
        meter.observe(busy_s, step.num_tokens)
        meter.num_padded_tokens += step.batch.num_padded_tokens
        self._finish_drafting(each for each in step.batch.sequences if each.finish_reason is not None)
        self._busy_since_s = ended_s if self.scheduler.has_work() else None
        if sampled.logprobs or sampled.prompt_logprobs:
            outputs = [sampled.with_logprobs(each) for each in outputs]
        meter.lap("device", ended_s)
        meter.lap("output")
        return outputs + failed if failed else outputs

    def _fail(self, sampled: Sampled) -> list[StepOutput]:
        """End the live sequences that got no token; return their last outputs."""
        outputs = []
        for sequence in sampled.failed:
            if sequence.finish_reason is None:
                logger.error("logits that are not numbers", extra={"request_id": sequence.request_id})
                self.scheduler.fail(sequence)
                outputs.append(last_output(sequence, BAD_LOGITS))
        for sequence in sampled.banned:
            if sequence.finish_reason is None:
                self.scheduler.fail(sequence, has_valid_pages=True)
                form_error = self._form_mask.error_of(sequence)
                error = ALL_BANNED if form_error is None else form_error
                outputs.append(last_output(sequence, error, is_invalid=form_error is None))
        return outputs

    def load(self) -> Load:
        counts, disk = self._form_mask.counts, self.scheduler.cache.host.disk
        counters = {} if disk is None else disk.counts()
        if self.runner.adapters is not None:
            counters["lora_reads"] = self._adapters.num_reads
        return msgspec.structs.replace(
            super().load(),
            num_masks=counts.num_masks,
            mask_us=round(1e6 * counts.mask_s),
            num_compiled_forms=counts.num_compiled,
            compile_us=round(1e6 * counts.compile_s),
            num_failed_forms=counts.num_failed,
            counters=counters,
            tier_token_ns=self._tier_token_ns(),
        )

    def _tier_token_ns(self) -> dict[Tier, int]:
        host_s, disk = self._page_costs.copy_page_s, self.scheduler.cache.host.disk
        if host_s is None:
            return {}
        page_s = {Tier.HOST: host_s} if disk is None else {Tier.HOST: host_s, Tier.DISK: host_s + disk.page_s}
        return {tier: round(1e9 * each / self.pages.page_size) for tier, each in page_s.items()}

    def close(self) -> None:
        """Write what the disk tier lacks, within FLUSH_S; stop the other ranks and wait until they have
        ended.
        """
        self._close_disk()
        self._adapters.close()
        tp_workers, self._tp_workers = self._tp_workers, None
        if tp_workers is None:
            return
        if self._why_lost is None:
            tp_workers.stop()
        else:
            tp_workers.close(timeout_s=0.0)

    def _close_disk(self) -> None:
        cache, disk = self.scheduler.cache, self.scheduler.cache.host.disk
        cache.host.disk = None
        if disk is None or not disk.stop():
            return
        if self._why_lost is None:
            until_s = time.monotonic() + FLUSH_S
            with suppress(WorkerLost):
                cache.flush(disk, partial(self._copy_to_host, until_s), until_s)
        disk.close()

    def _copy_to_host(self, until_s: float, copies: tuple[PageCopy, ...]) -> None:
        """Copy pages to the host after the steps in flight, and wait.

        Ranks that are not done at `until_s` are killed: WorkerLost.
        """
        with nullcontext() if self._tp_workers is None else self._tp_workers.deadline(until_s):
            for step in self._in_flight:
                step.answer.wait()
            if copies:
                self._run(Batch(copies_to_host=copies), None).wait()
            if self.runner.device.type == "cuda":
                torch.cuda.synchronize(self.runner.device)

    def _abort(self, request_id: str, choice: int | None) -> list[Sequence]:
        ended = super()._abort(request_id, choice)
        for sequence in ended:
            self._sampler.forget(sequence)
        self._finish_drafting(ended)
        return ended

    def _finish_drafting(self, ended: Iterable[Sequence]) -> None:
        if self.scheduler.drafter is not None:
            for sequence in ended:
                self.scheduler.drafter.finish(sequence)

    def _copy_to_device(self, copies: tuple[PageCopy, ...], pages: list[int], reader: Owner) -> None:
        self._step_meter.end()
        try:
            with self._explains_loss():
                self._run(Batch(copies_to_device=copies), None).wait()
        except BaseException as error:
            self.pages.release(pages, reader)
            self._note_loss(error)
            raise

    def _note_loss(self, error: BaseException) -> None:
        """Record that the ranks, if there are several, may differ: one may not have completed the step."""
        if self.runner.rank.size > 1:
            interrupted = isinstance(error, KeyboardInterrupt)
            self._why_lost = "an interrupt ended a step" if interrupted else "a step failed"

    def _run(
        self, batch: Batch, watch: LayerWatch | None, sampling: SamplingTensors | None = None
    ) -> PendingTensor:
        """Launch a step on all ranks; return the logits, or the tokens that the last stage draws with
        `sampling`.
        """
        num_groups = watch.begin(batch.chunks) if watch is not None and batch.sequences else 0
        self._num_steps += 1
        last = self._in_flight[-1].draws if self._in_flight else None
        tokens_R = None if last is None else last.token_ids_R
        num_last = 0 if tokens_R is None else tokens_R.shape[0]
        self._builders.rotate()
        arrays = self._builders[0].build(
            batch, step=self._num_steps, num_last_tokens=num_last, num_layer_groups=num_groups
        )
        if self.runner.adapters is not None:
            arrays = self._adapters.with_adapters(arrays, batch)
        if sampling is not None:
            arrays = arrays._replace(sampling=sampling)
        self._step_meter.lap("build")
        answer = self._launch(arrays, None if watch is None else watch.layers_written, tokens_R)
        self._step_meter.lap("forward")
        if batch.copies_to_host:
            self.pages.note_copies(device_page for device_page, _ in batch.copies_to_host)
        return answer

    def _launch(
        self, arrays: StepArrays, on_layers: OnLayers | None = None, tokens_R: Tensor | None = None
    ) -> PendingTensor:
        """Run rank 0's part of a step that all ranks compute; return the answer, as `_run`."""
        if self.runner.rank.size > 1:
            self.runner.rank.send_command(encode(arrays))
        out = self.runner.execute(arrays, on_layers, tokens_R)
        return PendingTensor(out) if self.runner.pp.size == 1 else self.runner.answer(arrays)

    def _make_drafter(self, config: SpeculativeConfig, draft_model: ModelRunner | None) -> Drafter:
        costs = time_steps(self.time_step, self.runner.config.scheduler)
        forced_tokens = self._form_mask.forced_tokens
        if draft_model is not None:
            return ModelDrafter(draft_model, costs, forced_tokens, config.num_speculative_tokens)
        return LookupDrafter(config, costs, forced_tokens)

    def time_step(self, arrays: StepArrays) -> float:
        """The seconds of a step of padding, from its launch to its answer."""
        if self.runner.pp.size > 1:  # as in most steps, the last stage sends tokens
            arrays = arrays._replace(sampling=SamplingTensors.greedy(len(arrays.logit_rows)))
        started_s = perf_counter()
        self._launch(arrays).wait()
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)
        return perf_counter() - started_s


def _make_scheduler(
    runner: ModelRunner, clock: Clock, model_fingerprint: str, num_host_pages: int
) -> Scheduler:
    """Return a scheduler with new ledgers: no page is in use, and no contents are known."""
    config, layout = runner.config, runner.layout
    keys = None
    if config.cache.enable_prefix_caching:
        keys = PageKeys(
            model_fingerprint=model_fingerprint, dtype=layout.kv_dtype, page_size=layout.page_size
        )
    pool = PagePool(len(runner.pool.device), layout.page_size, runner.steps)
    cache = PrefixCache(pool, keys, HostTier(num_host_pages))
    scheduler = Scheduler(config.scheduler, cache, clock, attention_mlp_crossover(runner.model_config))
    # Steps in flight: one for each stage of a pipeline. The policies for comparison keep one in flight.
    scheduler.num_batches = runner.pp.size if config.scheduler.policy == "continuous" else 1
    return scheduler


@dataclass(slots=True)
class _Step:
    """A step that was launched."""

    batch: Batch
    num_tokens: int
    answer: PendingTensor  # logits, or tokens
    is_drawn: bool  # the answer has tokens
    began_s: float  # when it was planned
    launched_s: float
    draws: Draws | None = None  # once it is sampled


WEIGHT: Final = 0.2  # of a new observation in the running mean
MIN_PREFILL_TOKENS: Final = 16  # fewer tokens say little about the cost of a token
NUM_PROBE_PAGES: Final = 4


class PageCosts:
    """The seconds to compute a token and to copy a page, measured on this machine while the engine runs.

    `compute_token_s` is None until the second step that computes a prompt, and always without host pages.
    """

    def __init__(self, pool: KvPool) -> None:
        self.compute_token_s: float | None = None
        self._num_seen = 0
        # Between host and device, one way; None: there are no host pages.
        self.copy_page_s = _time_copy(pool) if len(pool.host) else None

    def observe(self, batch: Batch, step_s: float) -> None:
        """Learn the cost of a token from a step that computed prompts in `step_s` seconds."""
        if self.copy_page_s is None:
            return
        if sum(chunk.num_tokens for chunk in batch.prompt_chunks) < MIN_PREFILL_TOKENS:
            return
        self._num_seen += 1
        if self._num_seen == 1:
            return  # the first prefill compiles kernels
        cost_s = step_s / batch.num_tokens
        mean_s = self.compute_token_s
        self.compute_token_s = cost_s if mean_s is None else mean_s + WEIGHT * (cost_s - mean_s)


def _time_copy(pool: KvPool) -> float:
    """Seconds a page takes one way, from a round trip of empty pages."""
    num_pages = min(NUM_PROBE_PAGES, len(pool.host), len(pool.device))
    copies = [(page, page) for page in range(num_pages)]
    for _ in range(2):  # the first round excludes the first touch of the memory
        started_s = perf_counter()
        pool.copy(copies, copies)
        if pool.device.device.type == "cuda":
            torch.cuda.synchronize(pool.device.device)
    return (perf_counter() - started_s) / (2 * num_pages)


def choose_async(config: EngineConfig, device: torch.device) -> bool:
    """Return whether the next step is planned while one runs; by default only on a GPU.

    A CPU plans and computes in one thread, so it would only delay tokens. Speculation needs the tokens of the
    step before to propose drafts. A pipeline has several steps in flight in any case.
    """
    if config.speculative is not None or config.pipeline_parallel_size > 1:
        return False
    chosen = config.scheduler.async_scheduling
    return device.type == "cuda" if chosen is None else chosen


def _allocate(runner: ModelRunner, zeros_on_cpu: ZerosOnCpu) -> None:
    try:
        runner.allocate(zeros_on_cpu)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the device has no memory for the largest step: lower scheduler.max_num_batched_tokens or "
            f"scheduler.max_num_seqs: {error}"
        ) from error
