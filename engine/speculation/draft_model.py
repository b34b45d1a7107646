"""A smaller model that proposes tokens, with KV pages of its own.

It samples as the target does: with the same parameters, and with the randomness of the same seed, choice and
position. Where the two distributions are close, both models sample the same token at any temperature.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Final

import msgspec
import numpy as np

from baton.config.engine import EngineConfig
from baton.engine.cache.page_pool import PagePool
from baton.engine.models.registry import ModelConfig, choose_max_model_len, read_draft_model_config
from baton.engine.runner.model_runner import ModelRunner, count_pages
from baton.engine.runner.replica_rank import ReplicaRank
from baton.engine.runner.sampler import Sampler
from baton.engine.runner.step_inputs import StepBuilder
from baton.engine.scheduler.sequence import Batch, Sequence, SequenceKey
from baton.engine.speculation.draft_lengths import (
    FORCED_RATE,
    WEIGHT,
    Acceptance,
    ForcedTokens,
    StepCosts,
)

POOL_DIVISOR: Final = 8  # the draft model's pages take an eighth of the memory for pages, or one sequence's
TRIED_RATE: Final = 0.8  # the acceptance rate that a try begins with; a try succeeds with a higher rate
TRIED_TOKENS: Final = 2  # draft tokens in a step of a try
# Each step without draft tokens multiplies the measured seconds of one, so that drafting is tried again.
TOKEN_S_DECAY: Final = 0.998
PRIOR_WEIGHT: Final = 0.1  # of an observed rate in the rate that new sequences begin with
FIRST_WAIT: Final = 16  # tokens from a failed try to the next one; each failure multiplies them by four
LONGEST_WAIT: Final = 512
CATCH_UP_TOKENS: Final = 256  # of prompts in one step, for which the other decodes wait


def load_draft_model(config: EngineConfig, target: ModelConfig) -> ModelRunner | None:
    """Load the draft model that the configuration names, if any, with a pool on this process's device.

    Raises as `read_draft_model_config`.
    """
    model = read_draft_model_config(config, target)
    if model is None:
        return None
    assert config.speculative is not None and config.speculative.model is not None
    directory = Path(config.speculative.model).resolve()
    own = msgspec.structs.replace(config, max_model_len=None)
    most = min(choose_max_model_len(config, target), choose_max_model_len(own, model))
    config = msgspec.structs.replace(
        config,
        model=str(directory),
        speculative=None,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        nnodes=1,
        enable_expert_parallel=False,
        max_model_len=most,
    )
    unsized = ModelRunner(config, model, ReplicaRank())
    layout = unsized.layout
    num_pages = count_pages(config.cache, layout, unsized.device) // POOL_DIVISOR
    num_pages = min(num_pages, config.scheduler.largest_batch * layout.num_pages(most))
    num_pages = max(num_pages, layout.num_pages(most))
    cache = msgspec.structs.replace(
        config.cache,
        kv_cache_memory_bytes=num_pages * layout.page_bytes,
        host_cache_memory_bytes=0,
        kv_disk_path=None,
    )
    runner = ModelRunner(msgspec.structs.replace(config, cache=cache), model, ReplicaRank())
    runner.load()
    runner.allocate()
    return runner


@dataclass(slots=True)
class _Drafted:
    """The draft model's side of one sequence of the target."""

    mirror: Sequence  # the tokens of the target's sequence, then drafts; its pages are the draft model's
    acceptance: Acceptance
    num_known: int = 0  # the target's tokens in the mirror
    is_proven: bool = False  # a try has succeeded
    wait: int = FIRST_WAIT  # tokens between tries while drafts do not pay
    next_try: int = 0  # the length of the sequence from which on it is tried

    @property
    def drafts(self) -> list[int]:
        return self.mirror.token_ids[self.num_known :]

    def catch_up(self, sequence: Sequence) -> None:
        """Append the new tokens of the target's sequence. The KV of accepted draft tokens stays."""
        mirror, gained, drafts = self.mirror, sequence.token_ids[self.num_known :], self.drafts
        num_same = 0
        for draft, token_id in zip(drafts, gained, strict=False):
            if draft != token_id:
                break
            num_same += 1
        num_computed = min(mirror.num_computed_tokens, self.num_known + num_same)
        if num_same < len(drafts):  # state that is kept of a sequence assumes that tokens are only appended
            mirror = self.mirror = replace(mirror, token_ids=list(sequence.token_ids))
        else:
            mirror.token_ids += gained[num_same:]
        mirror.num_computed_tokens = num_computed
        self.num_known = len(mirror.token_ids)

    def wait_after(self, num_tokens: int) -> None:
        """Pause drafting if the acceptance rate is low; do nothing if only the load is high."""
        if self.acceptance.rate < TRIED_RATE:
            self.next_try = num_tokens + self.wait
            self.wait = min(4 * self.wait, LONGEST_WAIT)
            self.acceptance.rate, self.is_proven = TRIED_RATE, False


class ModelDrafter:
    """Proposes the tokens that a smaller model samples."""

    def __init__(
        self, runner: ModelRunner, costs: StepCosts, forced_tokens: ForcedTokens, num_speculative_tokens: int
    ) -> None:
        """runner: of the draft model, loaded and with its pool."""
        scheduler, layout = runner.config.scheduler, runner.layout
        self._runner = runner
        self._costs = costs
        self._forced_tokens = forced_tokens
        self._most = num_speculative_tokens
        # Sequences that are preempted keep their pages for a while.
        self._max_sequences = 2 * scheduler.largest_batch
        self._pool = PagePool(len(runner.pool.device), layout.page_size, runner.steps)
        self._builder = StepBuilder(
            layout.page_size, self._max_sequences, layout.num_pages(runner.max_model_len)
        )
        self._drafted: OrderedDict[Sequence, _Drafted] = OrderedDict()  # the longest unused first
        self._serials = count(1)
        self._num_steps = 0
        self._token_s = 0.0  # measured seconds of a draft token
        self._proposing_s = 0.0  # in the last step
        self._prior_rate = TRIED_RATE  # the acceptance rate that new sequences begin with

    def propose(self, decodes: Ordered[Sequence], num_tokens: int) -> Mapping[SequenceKey, Ordered[int]]:
        """As `Drafter.propose`."""
        started_s = perf_counter()
        while len(self._drafted) > self._max_sequences:
            self.finish(next(iter(self._drafted)))
        proposals = {each: self._forced_tokens(each)[: self._most] for each in decodes}
        rates: list[float] = []
        most: list[int] = []
        for sequence in decodes:
            drafted = None if proposals[sequence] else self._tried(sequence)
            rates.append(FORCED_RATE if drafted is None else drafted.acceptance.rate)
            most.append(len(proposals[sequence]) if drafted is None else self._most_drafts(sequence, drafted))
        nums = self._costs.choose_num_drafts(
            rates, most, num_decodes=len(decodes), num_tokens=num_tokens, token_s=self._token_s
        )
        wanted: dict[Sequence, int] = {}
        for sequence, limit, num in zip(decodes, most, nums, strict=True):
            if proposals[sequence] or not limit:
                continue
            if num:
                wanted[sequence] = num
            else:
                self._drafted[sequence].wait_after(sequence.num_tokens)
        if not wanted:
            self._token_s *= TOKEN_S_DECAY
        self._draft(wanted)
        for sequence in wanted:
            drafted = self._drafted[sequence]
            proposals[sequence] = drafted.drafts
            drafted.acceptance.remember(sequence.token_ids, drafted.drafts)
        self._proposing_s = perf_counter() - started_s
        return {
            sequence.key: proposals[sequence][:num]
            for sequence, num in zip(decodes, nums, strict=True)
            if num and proposals[sequence]
        }

    def observe(self, batch: Batch, step_s: float) -> None:
        """As `Drafter.observe`."""
        if not batch.prompt_chunks:
            step_s -= self._proposing_s  # the seconds of a draft token are known apart
            self._costs.observe(batch.num_tokens, step_s, has_drafts=bool(batch.drafts))

    def finish(self, sequence: Sequence) -> None:
        """Release the pages that the draft model has for a sequence."""
        drafted = self._drafted.pop(sequence, None)
        if drafted is not None:
            self._release_pages(drafted)

    def _tried(self, sequence: Sequence) -> _Drafted | None:
        """The draft model's side of a sequence; None while its draft tokens are not tried."""
        drafted = self._drafted.get(sequence)
        if drafted is None:
            acceptance = Acceptance(self._prior_rate)
            drafted = self._drafted[sequence] = _Drafted(self._mirror(sequence), acceptance)
        if drafted.acceptance.is_open:
            drafted.acceptance.observe(sequence.token_ids)
            self._prior_rate += PRIOR_WEIGHT * (drafted.acceptance.rate - self._prior_rate)
        if drafted.acceptance.rate > TRIED_RATE:
            drafted.wait, drafted.is_proven = FIRST_WAIT, True
        return drafted if sequence.num_tokens >= drafted.next_try else None

    def _mirror(self, sequence: Sequence) -> Sequence:
        sampling = msgspec.structs.replace(
            sequence.sampling, logprobs=None, prompt_logprobs=None, structured_outputs=None
        )
        return Sequence(
            key=sequence.key,
            sampling=sampling,
            token_ids=[],
            num_prompt_tokens=sequence.num_prompt_tokens,
            min_num_tokens=sequence.min_num_tokens,
            max_num_tokens=sequence.max_num_tokens,
            stop_ids=sequence.stop_ids,
            table_version=next(self._serials) << 32,
        )

    def _most_drafts(self, sequence: Sequence, drafted: _Drafted) -> int:
        """The most draft tokens that have room in the answer and in the draft model.

        0 if the answer would end before the draft model has computed the prompt.
        """
        most = min(sequence.max_num_tokens, self._runner.max_model_len) - sequence.num_tokens - 1
        limit = self._most if drafted.is_proven else min(self._most, TRIED_TOKENS)
        num_steps = (sequence.num_tokens - drafted.mirror.num_computed_tokens) / CATCH_UP_TOKENS
        return max(0, min(limit, most)) if num_steps <= most else 0

    def _draft(self, wanted: Mapping[Sequence, int]) -> None:
        """Let the mirrors catch up and sample as many drafts as are wanted, fewer where pages are short."""
        started_s = perf_counter()
        sampler, budget = Sampler(self._runner.device), CATCH_UP_TOKENS
        chunks: list[tuple[Sequence, int]] = []
        lengths: dict[Sequence, int] = {}  # of each mirror, with its drafts
        for sequence, length in wanted.items():
            self._drafted.move_to_end(sequence)
            drafted = self._drafted[sequence]
            drafted.catch_up(sequence)
            mirror = drafted.mirror
            lengths[mirror] = mirror.num_tokens + length
            num_tokens = min(mirror.num_uncomputed_tokens, max(budget, self._most + 1))
            if num_tokens and self._take_pages(mirror, lengths[mirror], wanted):
                chunks.append((mirror, num_tokens))
                budget -= num_tokens
        computes_prompts = any(num_tokens > self._most + 1 for _, num_tokens in chunks)
        num_drafts = 0
        while chunks:
            sampled = self._run(sampler, chunks, goes_on=num_drafts > 0)
            num_drafts += len(sampled)
            chunks = [
                (mirror, 1)
                for mirror in sampled
                if mirror.num_tokens < lengths[mirror] and mirror.token_ids[-1] not in mirror.stop_ids
            ]
        if num_drafts and not computes_prompts:
            token_s = (perf_counter() - started_s) / num_drafts
            self._token_s += WEIGHT * (token_s - self._token_s) if self._token_s else token_s

    def _run(self, sampler: Sampler, chunks: list[tuple[Sequence, int]], *, goes_on: bool) -> list[Sequence]:
        """Compute so many tokens of each mirror; return those that have sampled another one.

        goes_on: each chunk is the draft token of the last run.
        """
        chunks.sort(key=lambda chunk: chunk[1] > 1)
        mirrors, lengths = [mirror for mirror, _ in chunks], [num_tokens for _, num_tokens in chunks]
        batch = Batch(
            sequences=mirrors,
            starts=np.array([mirror.num_computed_tokens for mirror in mirrors], np.int64),
            lengths=lengths,
            num_decodes=lengths.count(1),
            is_pure_decode=goes_on,
        )
        self._num_steps += 1
        logits_RV = self._runner.execute(self._builder.build(batch, step=self._num_steps))
        token_ids = sampler.sample(batch, logits_RV).wait().token_ids
        sampled = []
        for (mirror, num_tokens), token_id in zip(chunks, token_ids, strict=True):
            mirror.num_computed_tokens += num_tokens
            if token_id is not None:
                mirror.token_ids.append(token_id)
                sampled.append(mirror)
        return sampled

    def _take_pages(self, mirror: Sequence, num_tokens: int, wanted: Collection[Sequence]) -> bool:
        """Give the mirror pages for so many tokens, from sequences that are not drafted now if need be."""
        num_missing = self._pool.num_missing(num_tokens, len(mirror.page_table))
        if num_missing > self._pool.num_free:
            for sequence, drafted in self._drafted.items():
                if sequence not in wanted:
                    self._release_pages(drafted)
                if num_missing <= self._pool.num_free:
                    break
            else:
                return False
        mirror.page_table += self._pool.allocate(num_missing, mirror.key)
        return True

    def _release_pages(self, drafted: _Drafted) -> None:
        mirror = drafted.mirror
        self._pool.release(mirror.page_table, mirror.key)
        mirror.page_table, mirror.num_computed_tokens = [], 0
        mirror.table_version = next(self._serials) << 32
