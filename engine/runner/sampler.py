"""From logits to tokens: logits processors first, then one draw a row, then log probabilities.

A step of greedy rows without logits processors touches the logits once. Rows are the sequences that sample.
Shapes: R rows, V vocabulary, T tokens.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from baton.engine.runner.logits_processors import LOGITS_PROCESSORS, process_rows, upload
from baton.engine.scheduler.sequence import Batch, ScheduledChunk, Sequence, SequenceKey
from baton.kernels.sample import NOT_A_TOKEN, SamplingTensors, sample, warm_up
from baton.request import StepOutput, TokenLogprobs

PromptLogprobs: TypeAlias = tuple[TokenLogprobs | None, ...]
FIRST_TOKEN: Final[PromptLogprobs] = (None,)  # has no logprobs
ROWS_AT_ONCE: Final = 256  # bounds the fp32 copies of [R, V] of a long prompt


def token_logprobs(logits_RV: Tensor, token_ids: Ordered[int], num_top: int) -> list[TokenLogprobs]:
    """Log probability and rank of each row's token, and the `num_top` likeliest tokens.

    The logits are those of the model, before temperature and logits processors.
    """
    results: list[TokenLogprobs] = []
    for first in range(0, len(token_ids), ROWS_AT_ONCE):
        last = first + ROWS_AT_ONCE
        results += _rows_logprobs(logits_RV[first:last], token_ids[first:last], num_top)
    return results


def _rows_logprobs(logits_RV: Tensor, token_ids: Ordered[int], num_top: int) -> list[TokenLogprobs]:
    logprobs_RV = logits_RV.log_softmax(-1)
    chosen_R1 = torch.tensor(token_ids, device=logits_RV.device)[:, None]
    chosen_logprob_R1 = logprobs_RV.gather(1, chosen_R1)
    rank_R = (logprobs_RV > chosen_logprob_R1).sum(-1) + 1
    top = logprobs_RV.topk(min(num_top, logprobs_RV.shape[1]), dim=-1)
    return [
        TokenLogprobs(token_id=token_id, logprob=logprob, rank=rank, top=tuple(zip(ids, values, strict=True)))
        for token_id, logprob, rank, ids, values in zip(
            token_ids,
            chosen_logprob_R1[:, 0].tolist(),
            rank_R.tolist(),
            top.indices.tolist(),
            top.values.tolist(),
            strict=True,
        )
    ]


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


class Sampler:
    """Draws tokens. Keeps the sampling parameters as tensors as long as the same sequences sample."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sequences: list[Sequence] = []  # by identity: a key may be used again
        self._tensors: SamplingTensors | None = None
        self._processed: dict[str, dict[int, Sequence]] = {}  # name of a processor -> its rows
        self._asking: list[int] = []  # rows that want log probabilities
        self._asking_prompt: list[int] = []  # rows that want prompt log probabilities
        self._prompts: dict[SequenceKey, list[TokenLogprobs | None]] = {}

    @torch.inference_mode()
    def warm_up(self, vocab_size: int) -> None:
        """Compile what a GPU needs for any later `sample`."""
        warm_up(torch.zeros((1, vocab_size), device=self._device))

    @torch.inference_mode()
    def sample(self, batch: Batch, logits_RV: Tensor) -> Sampled:
        """Draw a token for each chunk that samples; logits_RV has the rows that StepArrays asked for."""
        chunks = batch.chunks
        sampled = chunks if batch.is_pure_decode else [chunk for chunk in chunks if chunk.samples]
        sequences = [chunk.sequence for chunk in sampled]
        if len(logits_RV) != len(sequences):
            logits_RV = self._take_prompt_rows(batch, logits_RV)
        tensors = self._parameters(sequences)
        raw_RV = logits_RV[self._asking] if self._asking else logits_RV[:0]  # a copy, before the processors
        for name, rows in self._processed.items():
            process_rows(LOGITS_PROCESSORS[name], logits_RV, rows)
        drawn: list[int | None] = sample(logits_RV, tensors).tolist()
        failed = []
        if NOT_A_TOKEN in drawn:
            failed = [row for row, token_id in enumerate(drawn) if token_id == NOT_A_TOKEN]
            for row in failed:
                drawn[row] = None
        token_ids = drawn
        if not batch.is_pure_decode:
            each = iter(drawn)
            token_ids = [next(each) if chunk.samples else None for chunk in chunks]
        return Sampled(
            token_ids=token_ids,
            failed=[sequences[row] for row in failed],
            logprobs=_logprobs(raw_RV, [(sequences[row], drawn[row]) for row in self._asking]),
            prompt_logprobs={
                sequences[row].key: tuple(self._prompts.pop(sequences[row].key, FIRST_TOKEN))
                for row in self._asking_prompt
                if sequences[row].needs_prompt_logprobs
            },
        )

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
        return logits_RV[sampling_rows]

    def _record_prompt(self, chunk: ScheduledChunk, logits_TV: Tensor) -> None:
        # The row of position p has the logits of token p + 1.
        sequence, start = chunk.sequence, chunk.start
        known = self._prompts.setdefault(sequence.key, [*FIRST_TOKEN])
        del known[start + 1 :]  # computed again after a preemption
        following = sequence.token_ids[start + 1 : start + chunk.num_tokens + 1]
        num_top = sequence.sampling.prompt_logprobs or 0
        known += token_logprobs(logits_TV[: len(following)], following, num_top)

    def _parameters(self, sequences: list[Sequence]) -> SamplingTensors:
        if self._tensors is not None and sequences == self._sequences:
            self._tensors.position_B.add_(1)  # every one that sampled has one more token
            return self._tensors
        self._sequences, samplings = sequences, [sequence.sampling for sequence in sequences]
        self._tensors = _tensors(sequences, self._device)
        self._processed = _processed_rows(sequences)
        self._asking = [row for row, each in enumerate(samplings) if each.logprobs is not None]
        self._asking_prompt = [row for row, each in enumerate(samplings) if each.prompt_logprobs is not None]
        return self._tensors


def _logprobs(raw_RV: Tensor, asked: list[tuple[Sequence, int | None]]) -> dict[SequenceKey, TokenLogprobs]:
    """raw_RV: the rows of the sequences that asked, each with its own number of alternatives.

    A sequence without a token has failed and is left out.
    """
    drawn = [(row, sequence, id_) for row, (sequence, id_) in enumerate(asked) if id_ is not None]
    if not drawn:
        return {}
    if len(drawn) < len(asked):
        raw_RV = raw_RV[[row for row, _, _ in drawn]]
    num_top = max(sequence.sampling.logprobs or 0 for _, sequence, _ in drawn)
    rows = token_logprobs(raw_RV, [token_id for _, _, token_id in drawn], num_top)
    return {
        sequence.key: msgspec.structs.replace(row, top=row.top[: sequence.sampling.logprobs])
        for (_, sequence, _), row in zip(drawn, rows, strict=True)
    }


def _processed_rows(sequences: Ordered[Sequence]) -> dict[str, dict[int, Sequence]]:
    """Name of each processor that applies to any row, in the order of the registry -> its rows."""
    applying = {
        name: {row: each for row, each in enumerate(sequences) if processor.applies(each.sampling)}
        for name, processor in LOGITS_PROCESSORS.items()
    }
    return {name: rows for name, rows in applying.items() if rows}


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
