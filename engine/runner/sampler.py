"""From logits to tokens: logits processors first, then one draw a row, then log probabilities.

A step of greedy rows without logits processors touches the logits once. Rows are the sequences that sample.
Shapes: R rows, V vocabulary, T tokens.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import compress
from typing import Final, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from baton.engine.runner.logits_processors import LOGITS_PROCESSORS, LogitsProcessor, process_rows, upload
from baton.engine.scheduler.sequence import Batch, ScheduledChunk, Sequence, SequenceKey
from baton.kernels.sample import NOT_A_TOKEN, SamplingTensors, sample, warm_up
from baton.request import StepOutput, TokenLogprobs

PromptLogprobs: TypeAlias = tuple[TokenLogprobs | None, ...]
ROWS_AT_ONCE: Final = 256  # bounds the fp32 copies of [R, V] of a long prompt


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host, which is complete once an event that is recorded after it has passed."""
    return tensor.to("cpu", non_blocking=True)


class LogprobRows:
    """The log probability and rank of each row's token, and the `num_top` likeliest tokens.

    The logits are those of the model, before temperature and logits processors.
    """

    def __init__(self, logits_RV: Tensor, token_ids_R: Tensor, num_top: int) -> None:
        """Compute on the device of the logits and copy to the host; wait for nothing. token_ids_R: int64."""
        pairs = zip(logits_RV.split(ROWS_AT_ONCE), token_ids_R.split(ROWS_AT_ONCE), strict=True)
        self._parts = [tuple(map(to_host, _logprobs(*pair, num_top))) for pair in pairs]

    def read(self) -> list[TokenLogprobs]:
        """Return the rows, once the copies have ended."""
        results: list[TokenLogprobs] = []
        for part in self._parts:
            for token_id, logprob, rank, ids, values in zip(*(each.tolist() for each in part), strict=True):
                top = tuple(zip(ids, values, strict=True))
                results.append(TokenLogprobs(token_id=token_id, logprob=logprob, rank=rank, top=top))
        return results


PromptPart: TypeAlias = tuple[int, LogprobRows]  # the position of the first row's logits, and the rows


def _logprobs(logits_RV: Tensor, token_ids_R: Tensor, num_top: int) -> tuple[Tensor, ...]:
    """[R] token id, logprob and rank; [R, num_top] ids and logprobs."""
    logprobs_RV = logits_RV.log_softmax(-1)
    chosen_R1 = logprobs_RV.gather(1, token_ids_R.clamp(min=0)[:, None])
    rank_R = (logprobs_RV > chosen_R1).sum(-1) + 1
    top = logprobs_RV.topk(min(num_top, logprobs_RV.shape[1]), dim=-1)
    return token_ids_R, chosen_R1[:, 0], rank_R, top.indices, top.values


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of one step; the mappings hold only sequences that asked for logprobs."""

    token_ids: list[int | None]  # one a chunk of the batch; None: the chunk does not sample, or failed
    failed: list[Sequence]  # with a logit that is not a number
    logprobs: dict[SequenceKey, TokenLogprobs]
    prompt_logprobs: dict[SequenceKey, PromptLogprobs]  # with the first token

    def with_logprobs(self, output: StepOutput) -> StepOutput:
        """Return the output with the log probabilities that its request asked for."""
        key = output.request_id, output.choice
        return msgspec.structs.replace(
            output, logprobs=self.logprobs.get(key), prompt_logprobs=self.prompt_logprobs.get(key)
        )


class Draws:
    """The tokens of one step, drawn on the device and on their way to the host."""

    def __init__(
        self,
        token_ids_R: Tensor,
        sequences: list[Sequence],
        is_sampled: list[bool] | None,
        asked: tuple[list[Sequence], LogprobRows] | None,
        prompts: dict[SequenceKey, list[PromptPart]],
    ) -> None:
        """is_sampled: for each chunk of the batch, whether it has a row; None: every chunk has one.

        asked: the sequences that want log probabilities, and theirs.
        """
        self.token_ids_R = token_ids_R  # int64, on the device; NOT_A_TOKEN for a row that failed
        self._sequences = sequences
        self._is_sampled = is_sampled
        self._asked = asked
        self._prompts = prompts
        self._on_host_R = to_host(token_ids_R)
        self._copied = torch.cuda.Event() if token_ids_R.device.type == "cuda" else None
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> Sampled:
        """Wait until the tokens are on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        drawn: list[int | None] = self._on_host_R.tolist()
        failed = []
        if NOT_A_TOKEN in drawn:
            failed = [row for row, token_id in enumerate(drawn) if token_id == NOT_A_TOKEN]
            for row in failed:
                drawn[row] = None
        token_ids = drawn
        if self._is_sampled is not None:
            each = iter(drawn)
            token_ids = [next(each) if is_sampled else None for is_sampled in self._is_sampled]
        return Sampled(
            token_ids=token_ids,
            failed=[self._sequences[row] for row in failed],
            logprobs={} if self._asked is None else _by_key(*self._asked),
            prompt_logprobs={key: _join(parts) for key, parts in self._prompts.items()},
        )


def _by_key(sequences: list[Sequence], rows: LogprobRows) -> dict[SequenceKey, TokenLogprobs]:
    """Each sequence with its own number of alternatives, without those that failed."""
    return {
        sequence.key: msgspec.structs.replace(row, top=row.top[: sequence.sampling.logprobs])
        for sequence, row in zip(sequences, rows.read(), strict=True)
        if row.token_id != NOT_A_TOKEN
    }


def _join(parts: list[PromptPart]) -> PromptLogprobs:
    known: list[TokenLogprobs | None] = [None]  # the first token has no logprobs
    for start, rows in parts:
        del known[start + 1 :]  # computed again after a preemption
        known += rows.read()
    return tuple(known)


class Sampler:
    """Draws tokens. Keeps the sampling parameters as tensors as long as the same sequences sample."""

    def __init__(self, device: torch.device, of_model: tuple[LogitsProcessor, ...] = ()) -> None:
        """of_model: processors that need the model; they run after those of the registry."""
        self._device = device
        self._of_model = of_model
        self._sequences: list[Sequence] = []  # by identity: a key may be used again
        self._tensors: SamplingTensors | None = None
        self._processed: list[tuple[LogitsProcessor, dict[int, Sequence]]] = []  # each with its rows
        self._asking: list[Sequence] = []  # want log probabilities
        self._asking_rows_A = torch.empty(0, dtype=torch.int64)  # on the device
        self._asking_prompt: list[Sequence] = []  # want prompt log probabilities
        self._prompts: dict[SequenceKey, list[PromptPart]] = {}

    @torch.inference_mode()
    def warm_up(self, vocab_size: int) -> None:
        """Compile what a GPU needs for any later `sample`."""
        warm_up(torch.zeros((1, vocab_size), device=self._device))

    @torch.inference_mode()
    def sample(self, batch: Batch, logits_RV: Tensor) -> Draws:
        """Draw a token for each chunk that samples; wait for no GPU.

        logits_RV has the rows that StepArrays asked for, and is changed.
        """
        is_sampled = None if batch.is_pure_decode else [chunk.samples for chunk in batch.chunks]
        sequences = batch.sequences if is_sampled is None else [*compress(batch.sequences, is_sampled)]
        if len(logits_RV) != len(sequences):
            logits_RV = self._take_prompt_rows(batch, logits_RV)
        tensors = self._parameters(sequences)
        raw_AV = logits_RV[self._asking_rows_A] if self._asking else None  # a copy, before the processors
        for processor, rows in self._processed:
            process_rows(processor, logits_RV, rows)
        drawn_R = sample(logits_RV, tensors)
        asked = None
        if raw_AV is not None:
            num_top = max(each.sampling.logprobs or 0 for each in self._asking)
            asked = self._asking, LogprobRows(raw_AV, drawn_R[self._asking_rows_A], num_top)
        prompts = {
            each.key: self._prompts.pop(each.key, [])
            for each in self._asking_prompt
            if each.needs_prompt_logprobs
        }
        return Draws(drawn_R, sequences, is_sampled, asked, prompts)

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that ended before its first token."""
        self._prompts.pop(sequence.key, None)

    def _take_prompt_rows(self, batch: Batch, logits_RV: Tensor) -> Tensor:
        """Record prompt log probabilities; return the rows that sample."""
        first, sampling_rows = 0, []
        for chunk in batch.chunks:
            wants_prompt = chunk.sequence.needs_prompt_logprobs
            num_rows = chunk.num_tokens if wants_prompt else int(chunk.samples)
            if wants_prompt:
                self._record_prompt(chunk, logits_RV[first : first + num_rows])
            first += num_rows
            if chunk.samples:
                sampling_rows.append(first - 1)
        return logits_RV[self._upload(sampling_rows)]

    def _record_prompt(self, chunk: ScheduledChunk, logits_TV: Tensor) -> None:
        # The row of position p has the logits of token p + 1.
        sequence, start = chunk.sequence, chunk.start
        following = sequence.token_ids[start + 1 : start + chunk.num_tokens + 1]
        num_top = sequence.sampling.prompt_logprobs or 0
        rows = LogprobRows(logits_TV[: len(following)], self._upload(following), num_top)
        self._prompts.setdefault(sequence.key, []).append((start, rows))

    def _upload(self, values: list[int]) -> Tensor:
        return upload(np.array(values, np.int64), self._device)

    def _parameters(self, sequences: list[Sequence]) -> SamplingTensors:
        if self._tensors is not None and sequences == self._sequences:
            self._tensors.position_B.add_(1)  # every one that sampled has one more token
            return self._tensors
        self._sequences = sequences
        self._tensors = _tensors(sequences, self._device)
        processors = (*LOGITS_PROCESSORS.values(), *self._of_model)
        self._processed = _processed_rows(processors, sequences)
        asking = {row: each for row, each in enumerate(sequences) if each.sampling.logprobs is not None}
        self._asking, self._asking_rows_A = list(asking.values()), self._upload(list(asking))
        self._asking_prompt = [each for each in sequences if each.sampling.prompt_logprobs is not None]
        return self._tensors


def _processed_rows(
    processors: Iterable[LogitsProcessor], sequences: Ordered[Sequence]
) -> list[tuple[LogitsProcessor, dict[int, Sequence]]]:
    """Each processor that applies to any row, with its rows."""
    applying = [
        (processor, {row: each for row, each in enumerate(sequences) if processor.applies(each.sampling)})
        for processor in processors
    ]
    return [(processor, rows) for processor, rows in applying if rows]


def _tensors(sequences: Ordered[Sequence], device: torch.device) -> SamplingTensors:
    params = [sequence.sampling for sequence in sequences]

    def tensor(values: list[float] | list[int], dtype: type[np.generic]) -> Tensor:
        return upload(np.array(values, dtype), device)

    return SamplingTensors(
        temperature_B=tensor([p.temperature for p in params], np.float32),
        top_k_B=tensor([max(0, p.top_k) for p in params], np.int32),
        top_p_B=tensor([p.top_p for p in params], np.float32),
        min_p_B=tensor([p.min_p for p in params], np.float32),
        seed_B=tensor([p.seed or 0 for p in params], np.int64),
        choice_B=tensor([sequence.choice for sequence in sequences], np.int32),
        position_B=tensor([len(sequence.token_ids) for sequence in sequences], np.int64),
        has_random=any(p.temperature > 0 for p in params),
        has_top_k=any(p.top_k > 0 for p in params),
        has_top_p=any(p.top_p < 1 for p in params),
    )
