"""Changes logits before the draw: sampling parameters, and the form that an answer must have.

Processors run in the order of `LOGITS_PROCESSORS`. Those in the tree change all their rows in one pass, from
packed uploads; one from outside may change row by row.

`StructuredOutputMask`, the last processor, has the grammars of one model
(`SamplingParams.structured_outputs`). The state of a grammar is a function of the form and the tokens of the
answer, so it never travels: a worker that takes over a sequence feeds its tokens to a new matcher.

Shapes: R rows of the logits, N changed logits or masked rows, V vocabulary, W 32-bit words of a mask.
"""

import logging
from array import array
from collections import OrderedDict
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Ordered
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from baton.engine.scheduler.sequence import Row, Sequence
from baton.errors import ConfigError, InvalidRequest, ModelError
from baton.kernels.sample import NOT_A_TOKEN, mask_logits, num_mask_words
from baton.request import SamplingParams, StructuredOutputs
from baton.tokenizer_file import TOKENIZER_FILE, has_tokenizer, read_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Structured output.
MAX_COMPILED: Final = 64  # grammars that are kept for each tenant
MAX_COMPILED_CHARS: Final = 2**18  # of their forms; a compiled grammar takes many times that
MAX_TENANTS: Final = 64  # with grammars that are kept
MAX_UNCHECKED: Final = 16  # tokens that are masked without a check after checks that failed
LONG_MASK_S: Final = 5e-5  # a mask that takes longer allows many tokens, such as the text of a string

logger = logging.getLogger(__name__)


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
class BatchLogitsProcessor(LogitsProcessor, Protocol):
    """A processor that changes many rows at once: on a GPU a loop over rows waits for copies of each row."""

    def process_rows(self, logits_RV: Tensor, rows: Mapping[int, Row]) -> None:
        """Do what `process` does, for each of these rows: index -> row."""


@runtime_checkable
class TokenFilter(BatchLogitsProcessor, Protocol):
    """A processor that only bans tokens, and tells sooner whether it bans one than which ones it bans."""

    def likely_banned(self, rows: Mapping[int, Row]) -> dict[int, Row]:
        """Return the rows (index -> row) that most likely ban the token drawn without the filter."""

    def banned(self, rows: Mapping[int, Row], tokens: Ordered[Collection[int]]) -> dict[int, Row]:
        """Return the rows that ban any of their tokens; a row that bans none may be among them.

        tokens: of each row of the logits, by index; NOT_A_TOKEN counts as banned.
        """

    def masks(self, logits_RV: Tensor, rows: Mapping[int, Row]) -> Tensor:
        """Return the masks of the rows, for `mask_logits`; the logits of a row that failed become NaN."""


def process_rows(processor: LogitsProcessor, logits_RV: Tensor, rows: Mapping[int, Row]) -> None:
    """Let the processor change the rows that it applies to (index -> row), in place."""
    if isinstance(processor, BatchLogitsProcessor):
        processor.process_rows(logits_RV, rows)
        return
    for index, row in rows.items():
        processor.process(logits_RV[index], row)


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

    def process(self, logits_V: Tensor, row: Row) -> None:
        sequence = row.sequence
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

    def process(self, logits_V: Tensor, row: Row) -> None:
        self.process_rows(logits_V[None], {0: row})

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

    def process(self, logits_V: Tensor, row: Row) -> None:
        self.process_rows(logits_V[None], {0: row})

    def process_rows(self, logits_RV: Tensor, rows: Mapping[int, Row]) -> None:
        biases = {index: row.sequence.sampling.logit_bias for index, row in rows.items()}
        values = np.array([value for bias in biases.values() for value in bias.values()], np.float32)
        places, values_N = _places(biases, logits_RV.device), upload(values, logits_RV.device)
        logits_RV.index_put_(places, values_N, accumulate=True)


class MinTokens:
    """Bans stop tokens until the answer has `min_tokens` tokens."""

    def applies(self, sampling: SamplingParams) -> bool:
        return bool(sampling.min_tokens)

    def process(self, logits_V: Tensor, row: Row) -> None:
        self.process_rows(logits_V[None], {0: row})

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


def load_logits_processor(name: str) -> LogitsProcessor:
    """Import `package.module:Class` and make one; ConfigError when that fails."""
    module, _, attribute = name.partition(":")
    try:
        processor = getattr(import_module(module), attribute)()
    except Exception as error:
        raise ConfigError(f"logits_processors: {name!r} cannot be loaded: {error!r}") from error
    if not isinstance(processor, LogitsProcessor):
        raise ConfigError(f"logits_processors: {name!r} has no methods `applies` and `process`")
    return processor


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

    def process(self, logits_V: Tensor, row: Row) -> None:
        self.process_rows(logits_V[None], {0: row})

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
LOGITS_PROCESSORS: Final[dict[str, LogitsProcessor]] = {
    "allowed_token_ids": AllowedTokens(),
    "bad_words": BadWords(),
    "logit_bias": LogitBias(),
    "min_tokens": MinTokens(),
    "penalties": Penalties(),
}


@dataclass(slots=True)
class FormCounts:
    """Counts and seconds of structured output since the engine's start."""

    num_masks: int = 0
    mask_s: float = 0.0
    num_compiled: int = 0  # grammars with errors included
    compile_s: float = 0.0
    num_failed: int = 0  # sequences: a grammar did not compile, or refused a token


@dataclass(slots=True)
class _Progress:
    """The matcher of one sequence, once it is compiled, and how many tokens it has seen."""

    compiled: "Future[LLMatcher]"
    matcher: "LLMatcher | None" = None
    num_seen: int = 0  # tokens of the sequence, the prompt included
    num_refused: int = 0  # checks in a row that found a banned token
    num_unchecked: int = 0  # tokens to come that are masked without a check


class StructuredOutputMask:
    """Bans the tokens that would break the form of a row's sequence. A `TokenFilter`.

    The logits of a row become NaN, which ends its sequence in an error, when its grammar cannot be compiled
    or does not take the tokens so far.
    """

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """directory: of the model; its tokenizer is read before the first grammar is compiled.

        vocab_size: of the logits, which may have more tokens than the tokenizer.
        """
        self.counts = FormCounts()
        self._directory = directory
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._compiler = ThreadPoolExecutor(1, "grammar")  # compiling leaves the interpreter to other threads
        self._tokenizer: LLTokenizer | None = None  # only the compiler uses it
        self._compiled: OrderedDict[str, OrderedDict[StructuredOutputs, Future[LLMatcher]]] = OrderedDict()
        self._progress: WeakKeyDictionary[Sequence, _Progress] = WeakKeyDictionary()
        self.held: list[Sequence] = []  # wait for their grammars

    def check(self) -> None:
        """InvalidRequest when the model has no tokenizer or no end token, so that no form can be kept."""
        if not self._eos_token_ids:
            raise InvalidRequest(
                "structured_outputs: the model has no end token, at which an answer could end"
            )
        if not has_tokenizer(self._directory):
            raise InvalidRequest(f"structured_outputs: the model has no {TOKENIZER_FILE}")

    def applies(self, sampling: SamplingParams) -> bool:
        return sampling.structured_outputs is not None

    def prepare(self, sequence: Sequence) -> None:
        """Begin to compile the sequence's grammar, in a thread. The sequence is held until that has ended."""
        if sequence.sampling.structured_outputs is not None and not self._of(sequence).compiled.done():
            sequence.is_held = True
            self.held.append(sequence)

    def release(self) -> None:
        """Stop holding sequences with compiled grammars."""
        for sequence in self.held:
            sequence.is_held = not self._of(sequence).compiled.done()
        self.held = [each for each in self.held if each.is_held and each.finish_reason is None]

    def process(self, logits_V: Tensor, row: Row) -> None:
        self.process_rows(logits_V[None], {0: row})

    def process_rows(self, logits_RV: Tensor, rows: Mapping[int, Row]) -> None:
        rows_N = upload(np.array(list(rows), np.int64), logits_RV.device)
        mask_logits(logits_RV, rows_N, self.masks(logits_RV, rows))

    def masks(self, logits_RV: Tensor, rows: Mapping[int, Row]) -> Tensor:
        """As `TokenFilter.masks`."""
        masks_NW = np.zeros((len(rows), num_mask_words(logits_RV.shape[1])), np.int32)
        for mask_W, (index, row) in zip(masks_NW, rows.items(), strict=True):
            if not self._fill(mask_W, row):
                self.counts.num_failed += 1
                mask_W.fill(-1)
                logits_RV[index] = float("nan")
        return upload(masks_NW, logits_RV.device)

    def likely_banned(self, rows: Mapping[int, Row]) -> dict[int, Row]:
        """As `TokenFilter.likely_banned`."""
        likely = {}
        for index, row in rows.items():
            progress = self._of(row.sequence)
            if progress.num_unchecked > 0:
                progress.num_unchecked -= 1
                likely[index] = row
        return likely

    def banned(self, rows: Mapping[int, Row], tokens: Ordered[Collection[int]]) -> dict[int, Row]:
        """As `TokenFilter.banned`."""
        began_s, banned = perf_counter(), {}
        for index, row in rows.items():
            progress = self._of(row.sequence)
            if self._allows(progress, row, tokens[index]):
                progress.num_refused = 0
            else:
                banned[index] = row
                progress.num_refused += 1
                progress.num_unchecked = min(2**progress.num_refused, MAX_UNCHECKED)
        self.counts.num_masks += len(rows) - len(banned)
        self.counts.mask_s += perf_counter() - began_s
        return banned

    def forced_tokens(self, sequence: Sequence) -> list[int]:
        """The tokens that the form of the sequence's answer forces next, so far as it is compiled."""
        if sequence.sampling.structured_outputs is None:
            return []
        progress = self._of(sequence)
        if progress.matcher is None or not self._catch_up(progress.matcher, progress, sequence):
            return []
        token_ids: list[int] = progress.matcher.compute_ff_tokens()
        return token_ids

    def _allows(self, progress: _Progress, row: Row, token_ids: Collection[int]) -> bool:
        """Return True when the mask of the row's next token has all of these tokens.

        False where the form forces text: the mask then has only the usual spelling of this text.
        """
        matcher, drafts = progress.matcher, row.drafts
        if matcher is None or not self._catch_up(matcher, progress, row.sequence):
            return False
        num_taken = matcher.try_consume_tokens([*drafts]) if drafts else 0
        allows = num_taken < len(drafts) or (
            NOT_A_TOKEN not in token_ids
            and not matcher.compute_ff_bytes()
            and all(matcher.validate_tokens([each]) for each in token_ids)
        )
        if num_taken:
            matcher.rollback(num_taken)
        return allows and not matcher.is_error()

    def _catch_up(self, matcher: "LLMatcher", progress: _Progress, sequence: Sequence) -> bool:
        """Let the matcher see the sequence's tokens; return False if it does not take them."""
        token_ids, progress.num_seen = sequence.token_ids[progress.num_seen :], len(sequence.token_ids)
        return not token_ids or matcher.consume_tokens(token_ids)

    def _fill(self, mask_W: "np.ndarray[Any, Any]", row: Row) -> bool:
        """Write the mask of the row's next token; return whether there is any.

        After drafts that break the form everything is allowed: the first of them is not kept.
        """
        sequence, drafts = row.sequence, list(row.drafts)
        progress = self._of(sequence)
        try:
            matcher = progress.matcher = progress.matcher or progress.compiled.result().deep_copy()
        except (ImportError, OSError, ValueError, InvalidRequest, ModelError) as error:
            return _failed(sequence, str(error))
        began_s = perf_counter()
        if self._catch_up(matcher, progress, sequence):
            num_taken = matcher.try_consume_tokens(drafts) if drafts else 0
            if num_taken < len(drafts):
                mask_W.fill(-1)
            else:
                matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
            if num_taken:
                matcher.rollback(num_taken)
        if matcher.is_error():
            return _failed(sequence, matcher.get_error())
        mask_s = perf_counter() - began_s
        if mask_s > LONG_MASK_S:
            progress.num_unchecked = 0
        self.counts.num_masks += 1
        self.counts.mask_s += mask_s
        return True

    def _of(self, sequence: Sequence) -> _Progress:
        progress = self._progress.get(sequence)
        if progress is None:
            form, num_prompt_tokens = sequence.sampling.structured_outputs, sequence.num_prompt_tokens
            assert form is not None
            compiled = self._compile(sequence.scheduling_key, form)
            progress = self._progress[sequence] = _Progress(compiled, num_seen=num_prompt_tokens)
        return progress

    def _compile(self, tenant: str, form: StructuredOutputs) -> "Future[LLMatcher]":
        """The matcher of the form at its start; only `deep_copy` it. Each tenant has a cache of its own."""
        of_tenant = self._compiled.setdefault(tenant, OrderedDict())
        compiled = of_tenant.get(form)
        if compiled is None:
            compiled = of_tenant[form] = self._compiler.submit(self._matcher, form)
        self._compiled.move_to_end(tenant)
        of_tenant.move_to_end(form)
        num_chars = sum(map(_num_chars, of_tenant))
        while len(of_tenant) > MAX_COMPILED or (num_chars > MAX_COMPILED_CHARS and len(of_tenant) > 1):
            evicted, _ = of_tenant.popitem(last=False)
            num_chars -= _num_chars(evicted)
        if len(self._compiled) > MAX_TENANTS:
            self._compiled.popitem(last=False)
        return compiled

    def _matcher(self, form: StructuredOutputs) -> "LLMatcher":
        # Imported with the first grammar: an engine that computes none runs without the library.
        from llguidance import LLMatcher, LLTokenizer

        from baton.structured_output import grammar_of, parser_limits

        if self._tokenizer is None:
            text = read_tokenizer(self._directory)
            if text is None:
                raise InvalidRequest(f"structured_outputs: the model has no {TOKENIZER_FILE}")
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
        began_s = perf_counter()
        matcher = LLMatcher(self._tokenizer, grammar_of(form), log_level=0, limits=parser_limits())
        self.counts.num_compiled += 1
        self.counts.compile_s += perf_counter() - began_s
        return matcher


def _failed(sequence: Sequence, why: str) -> bool:
    logger.error("a structured output failed", extra={"request_id": sequence.request_id, "error": why})
    return False


def _num_chars(form: StructuredOutputs) -> int:
    name, value = form.chosen
    num_frame_chars = 0 if name == "frame" else len(form.frame or "")
    return num_frame_chars + (sum(map(len, value)) if isinstance(value, tuple) else len(str(value)))
