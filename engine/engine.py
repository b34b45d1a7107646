"""One model replica: requests in, tokens out.

1. `add` checks a request and makes one sequence a choice.
2. `step` plans, runs the model on all ranks, samples, and returns one StepOutput for each new token.
3. A request ends when every choice has had an output with a finish reason; `abort` ends it at any time.

The engine knows nothing of prefill and decode as roles, of text, tenants or peers.
"""

import gc
import random
from contextlib import suppress
from time import perf_counter

import msgspec
from torch import Tensor

from baton.clock import Clock
from baton.engine.follower import STOP_COMMAND, Followers
from baton.engine.host_tier import HostTier
from baton.engine.model_runner import ModelRunner
from baton.engine.page_keys import PageKeys
from baton.engine.pages import PagePool
from baton.engine.plan import Advance, Batch
from baton.engine.preemption_meter import PreemptionMeter
from baton.engine.prefix_cache import PrefixCache
from baton.engine.request_checks import check_request
from baton.engine.sampler import Sampled, Sampler
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence
from baton.engine.step_arrays import StepBuilder, encode
from baton.errors import WorkerLost
from baton.request import FinishReason, Request, StepOutput


class Engine:
    """`runner` is loaded and has its pool; it is rank 0 of its tensor-parallel group."""

    def __init__(
        self,
        runner: ModelRunner,
        clock: Clock,
        model_fingerprint: str,
        followers: Followers | None = None,
    ) -> None:
        self.runner = runner
        self._clock = clock
        self._model_fingerprint = model_fingerprint
        self._followers = followers
        self._why_lost: str | None = None  # what left the ranks out of step with each other
        self.wait_s: float | None = None  # after a step that did nothing: how long until one can
        self._seeds = random.Random(runner.config.seed)
        self._meter = PreemptionMeter(runner.pool)
        self._start_afresh()

    def _start_afresh(self) -> None:
        """Know of no sequence and of no page's contents."""
        runner, config, layout = self.runner, self.runner.config, self.runner.layout
        keys = None
        if config.cache.enable_prefix_caching:
            keys = PageKeys(
                model_fingerprint=self._model_fingerprint, dtype=layout.dtype, page_size=layout.page_size
            )
        pool = PagePool(len(runner.pool.device), layout.page_size)
        cache = PrefixCache(pool, keys, HostTier(len(runner.pool.host)))
        self.scheduler = Scheduler(config.scheduler, cache, self._clock)
        max_num_seqs = config.scheduler.max_num_seqs
        self._builder = StepBuilder(layout.page_size, max_num_seqs, layout.num_pages(runner.max_model_len))
        self._sampler = Sampler(runner.device)

    def add(self, request: Request) -> None:
        """Accept a request; raises InvalidRequest and keeps nothing of it when it cannot run."""
        if self._why_lost is not None:
            raise WorkerLost(f"{self._why_lost} and left the ranks apart: the engine must be loaded again")
        model = self.runner.model
        check_request(request, vocab_size=model.vocab_size, max_model_len=self.runner.max_model_len)
        sampling = request.sampling
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._seeds.getrandbits(63))
            request = msgspec.structs.replace(request, sampling=sampling)
        for choice in request.choices:
            sequence = Sequence.from_request(
                request,
                choice,
                max_model_len=self.runner.max_model_len,
                eos_token_ids=model.eos_token_ids,
            )
            self.scheduler.add(sequence)

    def abort(self, request_id: str, choice: int | None = None) -> list[StepOutput]:
        """End the request, or one choice of it: a last output, without a token, for each that was alive."""
        outputs = []
        for sequence in self.scheduler.abort(request_id, choice):
            self._sampler.forget(sequence)
            outputs.append(
                StepOutput(
                    request_id=request_id,
                    choice=sequence.choice,
                    index=sequence.num_generated_tokens,
                    token_id=None,
                    finish_reason=FinishReason.ABORT,
                    num_cached_tokens=sequence.num_cached_tokens,
                )
            )
        return outputs

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> list[StepOutput]:
        """Advance every scheduled sequence; the list is empty while prompts are still being computed.

        When anything goes wrong on the way, an interrupt included, all requests are lost: pages may be
        known by now whose contents were never written, so nothing that was known is trusted again. Several
        ranks are apart then, and `add` raises WorkerLost.
        """
        try:
            return self._step()
        except BaseException as error:
            self._start_afresh()
            if self.runner.tp.size > 1:
                interrupted = isinstance(error, KeyboardInterrupt)
                self._why_lost = "an interrupt ended a step" if interrupted else "a step failed"
            raise

    def _step(self) -> list[StepOutput]:
        self.scheduler.rates = self._meter.rates
        plan = self.scheduler.plan()
        self.wait_s = plan.wait_s
        batch = self.scheduler.apply(plan)
        started_s = perf_counter()
        sampled = self._sampler.sample(batch, self._run(batch))
        self._meter.observe(batch, perf_counter() - started_s)
        advances = self.scheduler.commit(batch, sampled.token_ids)
        return [_output(advance, sampled) for advance in advances]

    def close(self) -> None:
        """Let the other ranks go and wait until they have; what loading froze can be collected again."""
        gc.unfreeze()
        followers, self._followers = self._followers, None
        if followers is None:
            return
        if self._why_lost is not None:
            followers.close(timeout_s=0.0)
            return
        with suppress(WorkerLost):  # a rank that is gone already needs no telling
            self.runner.tp.send_command(STOP_COMMAND)
        followers.close()

    def _run(self, batch: Batch) -> Tensor:
        arrays = self._builder.build(batch)
        if self.runner.tp.size > 1:
            self.runner.tp.send_command(encode(arrays))
        return self.runner.execute(arrays)


def _output(advance: Advance, sampled: Sampled) -> StepOutput:
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
