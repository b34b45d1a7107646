"""Sampling parameters that change logits before the draw.

Processors run in the order of `LOGITS_PROCESSORS`. Those in the tree change all their rows in one pass, from
packed uploads; one from outside may change row by row. Shapes: R rows, V vocabulary, N changed logits.
"""

from array import array
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Ordered
from typing import Any, Final, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from baton.config.loader import import_named
from baton.engine.scheduler.sequence import Row, Sequence
from baton.errors import ConfigError
from baton.request import SamplingParams


@runtime_checkable
class LogitsProcessor(Protocol):
    """One sampling parameter, or several that belong together."""

    def applies(self, sampling: SamplingParams) -> bool:
        """Return True when these parameters change any logits. A step without such sequences is faster."""

    def process(self, logits_V: Tensor, row: Row) -> None:
        """Change the fp32 logits of the token that follows the row's tokens in place.

        Must be a function of the logits, the sampling parameters and the tokens: a replayed stream continues
        with the same tokens only then, and drafts change none.
        """


@runtime_checkable
class BatchLogitsProcessor(Protocol):
    """A processor that changes many rows at once: on a GPU a loop over rows waits for copies of each row."""

    def applies(self, sampling: SamplingParams) -> bool:
        """As `LogitsProcessor.applies`."""

    def process_rows(self, logits_RV: Tensor, rows: Mapping[int, Row]) -> None:
        """Do what `LogitsProcessor.process` does, for each of these rows: index -> row."""


class RowByRow:
    """A `LogitsProcessor` as a `BatchLogitsProcessor`."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self._processor = processor
        self.applies = processor.applies

    def process_rows(self, logits_RV: Tensor, rows: Mapping[int, Row]) -> None:
        for index, row in rows.items():
            self._processor.process(logits_RV[index], row)


def upload(values: "np.ndarray[Any, Any]", device: torch.device) -> Tensor:
    """Return the array on the device, without waiting for a GPU; on the CPU the tensor shares its memory."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class AllowedTokens:
    """Bans every token that is not among `allowed_token_ids`."""

    def __init__(self) -> None:
        self._allowed: WeakKeyDictionary[Sequence, Tensor] = WeakKeyDictionary()  # on the device

    def applies(self, sampling: SamplingParams) -> bool:
        return sampling.allowed_token_ids is not None

    def process_rows(self, logits_RV: Tensor, rows: Mapping[int, Row]) -> None:
        for index, row in rows.items():
            logits_V, sequence = logits_RV[index], row.sequence
            allowed_N = self._allowed.get(sequence)
            if allowed_N is None:
                token_ids = np.array(sequence.sampling.allowed_token_ids, np.int64)
                allowed_N = self._allowed[sequence] = upload(token_ids, logits_V.device)
            kept_N = logits_V[allowed_N]
            logits_V.fill_(float("-inf"))
            logits_V[allowed_N] = kept_N


class BadWords:
    """Bans each token that would complete one of `bad_words_token_ids` in the answer."""

    def __init__(self) -> None:
        # the tokens before the last one -> the last tokens of the words that begin so
        self._ends: WeakKeyDictionary[Sequence, dict[tuple[int, ...], set[int]]] = WeakKeyDictionary()

    def applies(self, sampling: SamplingParams) -> bool:
        return bool(sampling.bad_words_token_ids)

    def process_rows(self, logits_RV: Tensor, rows: Mapping[int, Row]) -> None:
        banned = {index: ends for index, row in rows.items() if (ends := self._ends_after(row))}
        if banned:
            logits_RV[_places(banned, logits_RV.device)] = float("-inf")

    def _ends_after(self, row: Row) -> set[int]:
        ends = self._ends.get(row.sequence)
        if ends is None:
            ends = self._ends[row.sequence] = {}
            for *first, last in row.sequence.sampling.bad_words_token_ids:
                ends.setdefault(tuple(first), set()).add(last)
        lengths = set(map(len, ends))
        latest = row.latest_tokens(max(lengths))
        begun = (tuple(latest[len(latest) - length :]) for length in lengths if length <= len(latest))
        return set().union(*(ends.get(each, ()) for each in begun))


class LogitBias:
    """Adds `logit_bias`."""

    def applies(self, sampling: SamplingParams) -> bool:
        return bool(sampling.logit_bias)

    def process_rows(self, logits_RV: Tensor, rows: Mapping[int, Row]) -> None:
        biases = {index: row.sequence.sampling.logit_bias for index, row in rows.items()}
        values = np.array([value for bias in biases.values() for value in bias.values()], np.float32)
        places, values_N = _places(biases, logits_RV.device), upload(values, logits_RV.device)
        logits_RV.index_put_(places, values_N, accumulate=True)


class MinTokens:
    """Bans stop tokens until the answer has `min_tokens` tokens."""

    def applies(self, sampling: SamplingParams) -> bool:
        return bool(sampling.min_tokens)

    def process_rows(self, logits_RV: Tensor, rows: Mapping[int, Row]) -> None:
        banned = {
            index: row.sequence.stop_ids
            for index, row in rows.items()
            if row.sequence.stop_ids and row.num_tokens < row.sequence.min_num_tokens
        }
        if banned:
            logits_RV[_places(banned, logits_RV.device)] = float("-inf")


def _places(token_ids: Mapping[int, Collection[int]], device: torch.device) -> tuple[Tensor, ...]:
    """Index of logits: row and token of each id (index of a row -> token ids)."""
    rows = [row for row, ids in token_ids.items() for _ in ids]
    tokens = [token for ids in token_ids.values() for token in ids]
    return upload(np.array((rows, tokens), np.int64), device).unbind()


def load_logits_processor(name: str) -> BatchLogitsProcessor:
    """Import `package.module:Class` and make one; ConfigError when that fails."""
    factory = import_named("logits_processors", name)
    try:
        processor = factory()
    except Exception as error:
        raise ConfigError(f"logits_processors: {name!r} cannot be loaded: {error!r}") from error
    if isinstance(processor, BatchLogitsProcessor):
        return processor
    if not isinstance(processor, LogitsProcessor):
        raise ConfigError(f"logits_processors: {name!r} lacks `applies`, or `process` and `process_rows`")
    return RowByRow(processor)


class _TokenCounts:
    """The tokens that the penalties of one sequence change, and how often each is in the answer.

    Tokens of the prompt are among them only for a repetition penalty. Grows with the sequence.
    """

    def __init__(self, sequence: Sequence) -> None:
        counts_prompt = sequence.sampling.repetition_penalty != 1.0
        self._num_counted = sequence.num_prompt_tokens  # tokens [0, num_counted) of the sequence are counted
        prompt = dict.fromkeys(sequence.token_ids[: self._num_counted] if counts_prompt else ())
        self._slots = {token: slot for slot, token in enumerate(prompt)}  # token id -> place in both arrays
        self.tokens, self.counts = array("i", prompt), array("i", bytes(4 * len(prompt)))

    def catch_up(self, sequence: Sequence) -> None:
        """Count the tokens that the sequence gained."""
        for token in sequence.token_ids[self._num_counted :]:
            slot = self._slots.setdefault(token, len(self.tokens))
            if slot == len(self.tokens):
                self.tokens.append(token)
                self.counts.append(0)
            self.counts[slot] += 1
        self._num_counted = len(sequence.token_ids)

    def with_drafts(self, drafts: Ordered[int]) -> tuple["array[int]", "array[int]"]:
        """Return the tokens and their counts as they are after these draft tokens."""
        tokens, counts, more = self.tokens[:], self.counts[:], dict[int, int]()
        for token in drafts:
            slot = self._slots.get(token, more.get(token))
            if slot is None:
                slot = more[token] = len(tokens)
                tokens.append(token)
                counts.append(0)
            counts[slot] += 1
        return tokens, counts


class Penalties:
    """Repetition, then frequency and presence penalties.

    Repetition counts tokens of prompt and answer, frequency and presence of the answer alone. The counts of a
    sequence are kept on the host as long as the sequence; a step adds its new token.
    """

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Sequence, _TokenCounts] = WeakKeyDictionary()

    def applies(self, sampling: SamplingParams) -> bool:
        return sampling.has_penalties

    def process_rows(self, logits_RV: Tensor, rows: Mapping[int, Row]) -> None:
        counted = [self._counted(row) for row in rows.values()]
        sizes = [len(tokens) for tokens, _ in counted]
        num_rows, num_changed = len(logits_RV), sum(sizes)
        packed = np.empty(3 * (num_changed + num_rows), np.int32)
        changed, penalties = (
            packed[: 3 * num_changed].reshape(3, -1),
            packed[3 * num_changed :].view(np.float32),
        )
        changed[0] = np.repeat(list(rows), sizes)
        np.concatenate([np.frombuffer(tokens, np.int32) for tokens, _ in counted], out=changed[1])
        np.concatenate([np.frombuffer(counts, np.int32) for _, counts in counted], out=changed[2])
        values = [_penalties(row.sequence) for row in rows.values()]
        penalties.reshape(num_rows, 3)[list(rows)] = values
        packed_N = upload(packed, logits_RV.device)
        row_N, token_N, count_N = packed_N[: 3 * num_changed].view(3, -1)
        penalties_R3 = packed_N[3 * num_changed :].view(torch.float32).view(-1, 3)
        places = row_N.long(), token_N.long()
        repetition_N, frequency_N, presence_N = penalties_R3[places[0]].unbind(1)
        logit_N = logits_RV[places]
        amount_N = frequency_N * count_N + presence_N
        if any(repetition != 1.0 for repetition, _, _ in values):  # so tokens of the prompt are among these
            logit_N = torch.where(logit_N > 0, logit_N / repetition_N, logit_N * repetition_N)
            amount_N *= count_N > 0
        logit_N -= amount_N
        logits_RV.index_put_(places, logit_N)

    def _counted(self, row: Row) -> tuple["array[int]", "array[int]"]:
        counts = self._counts.get(row.sequence)
        if counts is None:
            counts = self._counts[row.sequence] = _TokenCounts(row.sequence)
        counts.catch_up(row.sequence)
        return counts.with_drafts(row.drafts) if row.drafts else (counts.tokens, counts.counts)


def _penalties(sequence: Sequence) -> tuple[float, float, float]:
    sampling = sequence.sampling
    return sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty


# name -> processor; they run in this order, which is vLLM's
LOGITS_PROCESSORS: Final[dict[str, BatchLogitsProcessor]] = {
    "allowed_token_ids": AllowedTokens(),
    "bad_words": BadWords(),
    "logit_bias": LogitBias(),
    "min_tokens": MinTokens(),
    "penalties": Penalties(),
}
