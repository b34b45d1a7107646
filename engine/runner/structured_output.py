"""Masks the logits of sequences that must answer in a form (`SamplingParams.structured_outputs`).

The state of a grammar is a function of the form and the tokens of the answer, so it never travels: a worker
that takes over a sequence feeds its tokens to a new matcher.
Shapes: R rows of the logits, N masked rows, V vocabulary, W 32-bit words of a mask.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Ordered
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from baton.engine.runner.logits_processors import upload
from baton.engine.scheduler.sequence import Row, Sequence
from baton.errors import InvalidRequest
from baton.kernels.sample import mask_logits, num_mask_words
from baton.request import SamplingParams, StructuredOutputs
from baton.tokenizer_file import TOKENIZER_FILE, has_tokenizer, read_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED: Final = 64  # grammars that are kept for each tenant
MAX_COMPILED_CHARS: Final = 2**18  # of their forms; a compiled grammar takes many times that
MAX_TENANTS: Final = 64  # with grammars that are kept
MAX_UNCHECKED: Final = 16  # tokens that are masked without a check after checks that failed
LONG_MASK_S: Final = 5e-5  # a mask that takes longer allows many tokens, such as the text of a string

logger = logging.getLogger(__name__)


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
    error: str | None = None  # the reason for which the form has failed


class StructuredOutputMask:
    """Bans the tokens that would break the form of a row's sequence. A `BatchLogitsProcessor`, which tells
    sooner whether it bans a token than which ones it bans.

    A row has no token, which ends its sequence in an error, when its grammar cannot be compiled or does not
    take the tokens so far.
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

    def prepare(self, sequence: Sequence) -> Callable[[], bool]:
        """Begin to compile the sequence's grammar, in a thread; return whether it is ready, as a function.

        The sequence has structured outputs. A grammar with errors is ready, too.
        """
        return self._of(sequence).compiled.done

    def process_rows(self, logits_RV: Tensor, rows: Mapping[int, Row]) -> None:
        rows_N = upload(np.array(list(rows), np.int64), logits_RV.device)
        mask_logits(logits_RV, rows_N, self.masks(logits_RV, rows))

    def masks(self, logits_RV: Tensor, rows: Mapping[int, Row]) -> Tensor:
        """Return the masks of the rows, for `mask_logits`; a row that failed has no token in its mask."""
        masks_NW = np.zeros((len(rows), num_mask_words(logits_RV.shape[1])), np.int32)
        for mask_W, row in zip(masks_NW, rows.values(), strict=True):
            error = self._fill(mask_W, row)
            if error is not None:
                self.counts.num_failed += 1
                self._of(row.sequence).error = error
                about = {"request_id": row.sequence.request_id, "error": error}
                logger.error("a structured output failed", extra=about)
                mask_W.fill(0)
        return upload(masks_NW, logits_RV.device)

    def error_of(self, sequence: Sequence) -> str | None:
        """Return the reason for which the form of the sequence's answer has failed; None if it has not."""
        progress = self._progress.get(sequence)
        return None if progress is None else progress.error

    def likely_banned(self, rows: Mapping[int, Row]) -> dict[int, Row]:
        """Return the rows (index -> row) that most likely ban the token drawn without the mask."""
        likely = {}
        for index, row in rows.items():
            progress = self._of(row.sequence)
            if progress.num_unchecked > 0:
                progress.num_unchecked -= 1
                likely[index] = row
        return likely

    def banned(self, rows: Mapping[int, Row], tokens: Ordered[Collection[int]]) -> dict[int, Row]:
        """Return the rows that ban any of their tokens; a row that bans none may be among them.

        tokens: of each row of the logits, by index; NOT_A_TOKEN and ALL_BANNED count as banned.
        """
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
            min(token_ids) >= 0
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

    def _fill(self, mask_W: "np.ndarray[Any, Any]", row: Row) -> str | None:
        """Write the mask of the row's next token. Return why the row has no token; None: the mask is written.

        After drafts that break the form everything is allowed: the first of them is not kept.
        """
        sequence, drafts = row.sequence, list(row.drafts)
        progress = self._of(sequence)
        if progress.matcher is None:
            error = progress.compiled.exception()
            if error is not None:
                self._forget(sequence, progress.compiled)
                return str(error) or repr(error)
            progress.matcher = progress.compiled.result().deep_copy()
        matcher = progress.matcher
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
            return str(matcher.get_error())
        mask_s = perf_counter() - began_s
        if mask_s > LONG_MASK_S:
            progress.num_unchecked = 0
        self.counts.num_masks += 1
        self.counts.mask_s += mask_s
        return None

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

    def _forget(self, sequence: Sequence, compiled: "Future[LLMatcher]") -> None:
        """Have the form of the sequence compiled again for the next request: the error may have passed."""
        of_tenant, form = self._compiled.get(sequence.scheduling_key), sequence.sampling.structured_outputs
        if of_tenant is not None and form is not None and of_tenant.get(form) is compiled:
            del of_tenant[form]

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


def _num_chars(form: StructuredOutputs) -> int:
    name, value = form.chosen
    num_frame_chars = 0 if name == "frame" else len(form.frame or "")
    return num_frame_chars + (sum(map(len, value)) if isinstance(value, tuple) else len(str(value)))
