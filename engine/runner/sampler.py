"""From logits to tokens: logits processors first, then one draw a row, then log probabilities.

A step of greedy rows without logits processors touches the logits once. A sequence that samples has one row,
and one more for each of its drafts. A draft is accepted if the row before it draws the same token, so drafts
change no token.
Shapes: R rows, V vocabulary, T tokens.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ordered
from itertools import compress
from typing import Final, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from baton.engine.runner.logits_processors import LOGITS_PROCESSORS, BatchLogitsProcessor, upload
from baton.engine.runner.structured_output import StructuredOutputMask
from baton.engine.scheduler.sequence import Batch, Row, ScheduledChunk, Sequence, SequenceKey
from baton.kernels.sample import (
    ALL_BANNED,
    NOT_A_TOKEN,
    SamplingTensors,
    sample,
    sample_rows,
    warm_up,
)
from baton.request import SamplingParams, StepOutput, TokenLogprobs

Value = TypeVar("Value")
PromptLogprobs: TypeAlias = tuple[TokenLogprobs | None, ...]
ROWS_AT_ONCE: Final = 256  # bounds the fp32 copies of [R, V] of a long prompt


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host, which is complete once an event that is recorded after it has passed."""
    return tensor.to("cpu", non_blocking=True)


RowKey: TypeAlias = tuple[str, int, int]  # (request_id, choice, index of the token in the answer)
AskingRow: TypeAlias = tuple[RowKey, int]  # a row that wants log probabilities, and how many alternatives
LogprobCopies: TypeAlias = list[tuple[Tensor, ...]]  # of ROWS_AT_ONCE rows each, see `_logprobs`
PromptPart: TypeAlias = tuple[int, LogprobCopies]  # the position of the first row's logits, and the rows


def copy_logprobs(logits_RV: Tensor, token_ids_R: Tensor, num_top: int) -> LogprobCopies:
    """The log probability and rank of each row's token, and the `num_top` likeliest tokens.

    The logits are those of the model, before temperature and logits processors. All is computed on their
    device and copied to the host; nothing is waited for. token_ids_R: int64.
    """
    pairs = zip(logits_RV.split(ROWS_AT_ONCE), token_ids_R.split(ROWS_AT_ONCE), strict=True)
    return [tuple(map(to_host, _logprobs(*pair, num_top))) for pair in pairs]


def read_logprobs(copies: LogprobCopies) -> list[TokenLogprobs]:
    """The rows, once the copies have ended."""
    results: list[TokenLogprobs] = []
    for part in copies:
        for token_id, logprob, rank, ids, values in zip(*(each.tolist() for each in part), strict=True):
            top = tuple(zip(ids, values, strict=True))
            results.append(TokenLogprobs(token_id=token_id, logprob=logprob, rank=rank, top=top))
    return results


def _logprobs(logits_RV: Tensor, token_ids_R: Tensor, num_top: int) -> tuple[Tensor, ...]:
    """[R] token id, logprob and rank; [R, num_top] ids and logprobs."""
    logprobs_RV = logits_RV.log_softmax(-1)
    chosen_R1 = logprobs_RV.gather(1, token_ids_R.clamp(min=0)[:, None])
    rank_R = (logprobs_RV > chosen_R1).sum(-1) + 1
    top = logprobs_RV.topk(min(num_top, logprobs_RV.shape[1]), dim=-1)
    return token_ids_R, chosen_R1[:, 0], rank_R, top.indices, top.values


class Sampled(NamedTuple):
    """The result of one step; the logprobs hold only sequences that asked for them."""

    token_ids: list[int | None]  # one a chunk of the batch; None: the chunk does not sample, or failed
    accepted: dict[int, list[int]]  # chunk with accepted drafts -> the tokens after its first
    failed: list[Sequence]  # with a logit that is not a number
    banned: list[Sequence]  # without a token that is allowed
    logprobs: dict[RowKey, TokenLogprobs]
    prompt_logprobs: dict[SequenceKey, PromptLogprobs]  # with the first token

    @property
    def tokens_a_sequence(self) -> float:
        """The mean number of new tokens of a sequence that sampled."""
        if not self.accepted:
            return 1.0
        num_sampled = len(self.token_ids) - self.token_ids.count(None)
        return 1.0 + sum(map(len, self.accepted.values())) / num_sampled

    def with_logprobs(self, output: StepOutput) -> StepOutput:
        """Return the output with the log probabilities that its request asked for."""
        key = output.request_id, output.choice
        return msgspec.structs.replace(
            output,
            logprobs=self.logprobs.get((*key, output.index)),
            prompt_logprobs=self.prompt_logprobs.get(key),
        )


class Draws:
    """The tokens of one step, drawn on the device and on their way to the host."""

    def __init__(
        self,
        batch: Batch,
        rows: list[Row],
        token_ids_R: Tensor,
        asked: tuple[list[AskingRow], LogprobCopies] | None = None,
        prompts: Mapping[SequenceKey, list[PromptPart]] = {},
    ) -> None:
        """rows: of the batch. asked: the rows that want log probabilities, and theirs."""
        self.token_ids_R = token_ids_R  # int64, on the device; negative for a row without a token
        self._rows = rows
        # For each chunk, whether it has rows; None: every chunk has.
        self._is_sampled = None if batch.is_pure_decode else [chunk.samples for chunk in batch.chunks]
        self._has_drafts = bool(batch.drafts)
        self._asked = asked
        self._prompts = prompts
        is_cuda = token_ids_R.device.type == "cuda"
        self._on_host_R = to_host(token_ids_R) if is_cuda else token_ids_R
        self._copied = torch.cuda.Event() if is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> Sampled:
        """Wait until the tokens are on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        drawn = self._on_host_R.tolist()
        runs = _accept(self._rows, drawn) if self._has_drafts else None
        firsts: list[int] = drawn if runs is None else [run[0] for run in runs]
        ended: dict[int, list[Sequence]] = {NOT_A_TOKEN: [], ALL_BANNED: []}
        if min(firsts, default=0) < 0:
            sequences = [row.sequence for row in self._rows if not row.drafts]
            for sequence, first in zip(sequences, firsts, strict=True):
                if first < 0:
                    ended[first].append(sequence)
        tokens = [None if first < 0 else first for first in firsts]
        later = [] if runs is None else self._of_chunks([run[1:] for run in runs], [])
        return Sampled(
            token_ids=self._of_chunks(tokens, None),
            accepted={chunk: token_ids for chunk, token_ids in enumerate(later) if token_ids},
            failed=ended[NOT_A_TOKEN],
            banned=ended[ALL_BANNED],
            logprobs={} if self._asked is None else _by_key(*self._asked),
            prompt_logprobs={key: _join(parts) for key, parts in self._prompts.items()},
        )

    def _of_chunks(self, values: list[Value], otherwise: Value) -> list[Value]:
        """The values of the chunks that have rows, at their places in the batch."""
        if self._is_sampled is None:
            return values
        each = iter(values)
        return [next(each) if is_sampled else otherwise for is_sampled in self._is_sampled]


def _accept(rows: list[Row], drawn: list[int]) -> list[list[int]]:
    """The tokens of each sequence: its first one, and those after accepted drafts.

    A row without a token after a draft ends the run: the sequence ends when it computes that row next.
    """
    runs: list[list[int]] = []
    for (_, drafts), token_id in zip(rows, drawn, strict=True):
        if not drafts:
            runs.append([token_id])
        elif runs[-1] == [*drafts] and token_id >= 0:
            runs[-1].append(token_id)
    return runs


def _by_key(asking: list[AskingRow], copies: LogprobCopies) -> dict[RowKey, TokenLogprobs]:
    """Each row with its own number of alternatives, without those that have no token."""
    return {
        key: msgspec.structs.replace(row, top=row.top[:num_top])
        for (key, num_top), row in zip(asking, read_logprobs(copies), strict=True)
        if row.token_id >= 0
    }


def _join(parts: list[PromptPart]) -> PromptLogprobs:
    known: list[TokenLogprobs | None] = [None]  # the first token has no logprobs
    for start, copies in parts:
        del known[start + 1 :]  # computed again after a preemption
        known += read_logprobs(copies)
    return tuple(known)


class Sampler:
    """Draws tokens. Keeps the sampling parameters as tensors as long as the same sequences sample."""

    def __init__(
        self,
        device: torch.device,
        processors: Iterable[BatchLogitsProcessor] = LOGITS_PROCESSORS.values(),
        form_mask: StructuredOutputMask | None = None,
    ) -> None:
        """processors: they run in this order, and then the mask."""
        self._device = device
        self._processors = processors
        self._form_mask = form_mask
        # Of the last step, unless it had drafts; by identity: a key may be used again.
        self._sequences: list[Sequence] | None = None
        self._rows: list[Row] = []
        self._tensors: SamplingTensors | None = None
        self._processed: list[tuple[BatchLogitsProcessor, dict[int, Row]]] = []  # each with its rows
        self._masked: dict[int, Row] = {}  # rows with a form
        self._asking: list[Row] = []  # want log probabilities
        self._asking_rows_A = torch.empty(0, dtype=torch.int64)  # on the device
        self._asking_prompt: list[Sequence] = []  # want prompt log probabilities
        self._prompts: dict[SequenceKey, list[PromptPart]] = {}

    @torch.inference_mode()
    def warm_up(self, vocab_size: int) -> None:
        """Compile what a GPU needs for any later `sample`."""
        warm_up(torch.zeros((1, vocab_size), device=self._device))

    @torch.inference_mode()
    def sample(self, batch: Batch, logits_RV: Tensor) -> Draws:
        """Draw a token for each row of the chunks that sample; wait for no GPU.

        logits_RV has the rows that StepArrays asked for, and is changed.
        """
        sequences = _sampling_sequences(batch)
        tensors = self._parameters(batch, sequences)
        if logits_RV.shape[0] != len(self._rows):
            logits_RV = self._take_prompt_rows(batch, logits_RV)
        raw_AV = logits_RV[self._asking_rows_A] if self._asking else None  # a copy, before the processors
        for processor, rows in self._processed:
            processor.process_rows(logits_RV, rows)
        drawn_R = self._draw(logits_RV, tensors)
        asked = None
        if raw_AV is not None:
            num_top = max(row.sequence.sampling.logprobs or 0 for row in self._asking)
            copies = copy_logprobs(raw_AV, drawn_R[self._asking_rows_A], num_top)
            asked = [*map(_asking, self._asking)], copies
        prompts = {
            each.key: self._prompts.pop(each.key, [])
            for each in self._asking_prompt
            if each.needs_prompt_logprobs
        }
        return Draws(batch, self._rows, drawn_R, asked, prompts)

    def parameters_of_draws(self, batch: Batch) -> SamplingTensors | None:
        """Return the parameters with which `kernels.sample.sample` can draw the batch's tokens.

        None when the batch needs more than logits, such as logits processors, or draws nothing.
        """
        if any(sequence.needs_prompt_logprobs for sequence in batch.sequences):
            return None
        processors = [*self._processors, *([] if self._form_mask is None else [self._form_mask])]
        for sequence in _sampling_sequences(batch):
            sampling = sequence.sampling
            if sampling.logprobs is not None or any(each.applies(sampling) for each in processors):
                return None
        rows = _rows(batch)
        return _tensors(rows, self._device) if rows else None

    def drawn(self, batch: Batch, token_ids_R: Tensor) -> Draws:
        """Return the draws of a batch that was drawn with `parameters_of_draws`."""
        self._sequences = None  # their positions are no longer those of the kept tensors
        return Draws(batch, _rows(batch), token_ids_R)

    def _draw(self, logits_RV: Tensor, tensors: SamplingTensors) -> Tensor:
        if not self._masked or self._form_mask is None:
            return sample(logits_RV, tensors)
        if self._device.type == "cpu":
            return self._draw_before_masks(logits_RV, tensors, self._form_mask)
        self._form_mask.process_rows(logits_RV, self._masked)
        return sample(logits_RV, tensors)

    def _draw_before_masks(
        self, logits_RV: Tensor, tensors: SamplingTensors, form_mask: StructuredOutputMask
    ) -> Tensor:
        """Draw. Rows with a form are masked where their tokens are, or most likely would be, banned.

        Scores of tokens depend on the largest logit alone. So a draw from all tokens is the draw from those
        that are not banned, if neither the drawn token nor that of the largest logit is banned. What top_k
        and top_p keep depends on every token.
        """
        masked: dict[int, Row] = {}
        others: dict[int, Row] = {}
        for index, row in self._masked.items():
            (masked if _counts_tokens(row.sequence.sampling) else others)[index] = row
        masked |= form_mask.likely_banned(others)
        tokens_R, peaks_R = torch.empty((2, len(logits_RV)), dtype=torch.int64).unbind()
        free = [index for index in range(len(logits_RV)) if index not in masked]
        sample_rows(logits_RV, tensors, tokens_R, peaks_R, self._upload(free))
        checked = {index: row for index, row in others.items() if index not in masked}
        if checked:
            drawn = [*map(set, zip(tokens_R.tolist(), peaks_R.tolist(), strict=True))]
            masked |= form_mask.banned(checked, drawn)
        if masked:
            masks_NW = form_mask.masks(logits_RV, masked)
            sample_rows(logits_RV, tensors, tokens_R, peaks_R, self._upload([*masked]), masks_NW)
        return tokens_R

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that ended before its first token."""
        self._prompts.pop(sequence.key, None)

    def _take_prompt_rows(self, batch: Batch, logits_RV: Tensor) -> Tensor:
        """Record prompt log probabilities; return the rows that sample."""
        first = 0
        sampling_rows: list[int] = []
        for chunk in batch.chunks:
            wants_prompt = chunk.sequence.needs_prompt_logprobs
            num_rows = chunk.num_tokens if wants_prompt else 1 + len(chunk.drafts) if chunk.samples else 0
            if wants_prompt and chunk.sequence.finish_reason is None:  # an ended sequence takes no rows
                self._record_prompt(chunk, logits_RV[first : first + num_rows])
            first += num_rows
            if chunk.samples:
                sampling_rows += range(first - 1 - len(chunk.drafts), first)
        return logits_RV[self._upload(sampling_rows)]

    def _record_prompt(self, chunk: ScheduledChunk, logits_TV: Tensor) -> None:
        # The row of position p has the logits of token p + 1.
        sequence, start = chunk.sequence, chunk.start
        following = sequence.token_ids[start + 1 : start + chunk.num_tokens + 1]
        num_top = sequence.sampling.prompt_logprobs or 0
        copies = copy_logprobs(logits_TV[: len(following)], self._upload(following), num_top)
        self._prompts.setdefault(sequence.key, []).append((start, copies))

    def _upload(self, values: list[int]) -> Tensor:
        return upload(np.array(values, np.int64), self._device)

    def _parameters(self, batch: Batch, sequences: list[Sequence]) -> SamplingTensors:
        if self._tensors is not None and not batch.drafts and sequences == self._sequences:
            self._tensors.position_B.add_(1)  # every one that sampled has one more token
            return self._tensors
        self._sequences = None if batch.drafts else sequences
        rows = self._rows = _rows(batch)
        self._tensors = _tensors(rows, self._device)
        changed = [(processor, _rows_of(processor, rows)) for processor in self._processors]
        self._processed = [(processor, its_rows) for processor, its_rows in changed if its_rows]
        self._masked = {} if self._form_mask is None else _rows_of(self._form_mask, rows)
        asking = {index: row for index, row in enumerate(rows) if row.sequence.sampling.logprobs is not None}
        self._asking, self._asking_rows_A = list(asking.values()), self._upload(list(asking))
        self._asking_prompt = [
            row.sequence
            for row in rows
            if row.sequence.sampling.prompt_logprobs is not None and not row.drafts
        ]
        return self._tensors


def _sampling_sequences(batch: Batch) -> list[Sequence]:
    if batch.is_pure_decode:
        return batch.sequences
    return [*compress(batch.sequences, (chunk.samples for chunk in batch.chunks))]


def _rows(batch: Batch) -> list[Row]:
    """The rows of the chunks that sample: one after the sequence's own tokens, and one after each draft."""
    if not batch.drafts:
        return [*map(Row, _sampling_sequences(batch))]
    return [
        Row(chunk.sequence, chunk.drafts[:num_drafts])
        for chunk in batch.chunks
        if chunk.samples
        for num_drafts in range(len(chunk.drafts) + 1)
    ]


def _asking(row: Row) -> AskingRow:
    sequence = row.sequence
    return (*sequence.key, row.num_tokens - sequence.num_prompt_tokens), sequence.sampling.logprobs or 0


def _rows_of(processor: BatchLogitsProcessor, rows: Ordered[Row]) -> dict[int, Row]:
    """The rows that the processor applies to, by index."""
    return {index: row for index, row in enumerate(rows) if processor.applies(row.sequence.sampling)}


def _counts_tokens(sampling: SamplingParams) -> bool:
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def _tensors(rows: Ordered[Row], device: torch.device) -> SamplingTensors:
    params = [row.sequence.sampling for row in rows]

    def tensor(values: list[float] | list[int], dtype: type[np.generic]) -> Tensor:
        return upload(np.array(values, dtype), device)

    return SamplingTensors(
        temperature_B=tensor([p.temperature for p in params], np.float32),
        top_k_B=tensor([max(0, p.top_k) for p in params], np.int32),
        top_p_B=tensor([p.top_p for p in params], np.float32),
        min_p_B=tensor([p.min_p for p in params], np.float32),
        seed_B=tensor([p.seed or 0 for p in params], np.int64),
        choice_B=tensor([row.sequence.choice for row in rows], np.int32),
        position_B=tensor([row.num_tokens for row in rows], np.int64),
        has_random=any(p.temperature > 0 for p in params),
        has_top_k=any(p.top_k > 0 for p in params),
        has_top_p=any(p.top_p < 1 for p in params),
    )
