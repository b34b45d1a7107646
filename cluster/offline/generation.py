"""The prompts of a call of `LLM`, read in the forms that vLLM takes, and the outputs that they become.

1. One prompt is text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; several are any iterable
   of these. Integers alone are one prompt. Arrays and tensors count as the lists that they hold.
2. `Generation.accept` takes every StepOutput of the request and returns the text that the output adds.
3. A choice ends when the engine says so, or at a stop string, which the engine does not know: later tokens of
   the choice are dropped.
4. When `is_finished`, the engine may drop the request, and `completion` has the whole answer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Final, NamedTuple, TypeAlias

import msgspec

from baton.errors import InvalidRequest, shown
from baton.gateway.text.tokenizer import ChoiceText, Tokenizer, detokenizer_of
from baton.request import FinishReason, Request, SamplingParams, StepOutput, TokenLogprobs
from baton.structured_output import check_form

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, object]
Prompts: TypeAlias = str | Mapping[str, object] | Iterable[int | Prompt]
Sampling: TypeAlias = SamplingParams | Sequence[SamplingParams] | None

PROMPT_KEYS: Final = ("prompt", "prompt_token_ids")
EXPECTED: Final = "text, token ids, or a dict with 'prompt' or 'prompt_token_ids'"


class OfflinePrompt(NamedTuple):
    """One prompt. `text` is encoded unless `token_ids` are given; beside token ids it is only shown."""

    text: str | None
    token_ids: tuple[int, ...] | None


def prompts_in(prompts: object) -> list[object]:
    """Return one entry for each prompt, unread. Raises InvalidRequest for a value that holds no prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed = items_of(prompts)
    if listed is None:
        raise InvalidRequest(f"prompts: expected {EXPECTED}, or several of these, got {shown(prompts)}")
    return [listed] if listed and _is_integer(listed[0]) else listed


def read_prompt(prompt: object) -> OfflinePrompt:
    """Read one entry of `prompts_in`. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return OfflinePrompt(prompt, None)
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt)
    return OfflinePrompt(None, _token_ids(prompt, EXPECTED))


def list_sampling(sampling: object, num_prompts: int) -> list[SamplingParams]:
    """Return one for each prompt. Raises InvalidRequest."""
    if sampling is None or isinstance(sampling, SamplingParams):
        one = sampling or SamplingParams()
        _check_forms([one])
        return [one] * num_prompts
    listed = items_of(sampling)
    known = [one for one in listed or () if isinstance(one, SamplingParams)]
    if listed is None or len(known) < len(listed):
        raise InvalidRequest(
            f"sampling_params: expected SamplingParams(...), or a list of them, got {shown(sampling)}"
        )
    if len(known) != num_prompts:
        raise InvalidRequest(
            f"sampling_params: expected one, or {num_prompts} for as many prompts, got {len(known)}"
        )
    _check_forms(known)
    return known


def _check_forms(sampling: Iterable[SamplingParams]) -> None:
    for form in {one.structured_outputs for one in sampling if one.structured_outputs is not None}:
        try:
            check_form(form)
        except InvalidRequest as error:
            raise InvalidRequest(f"structured_outputs.{form.chosen[0]}: {error}") from None


@contextmanager
def naming(index: int, num_prompts: int) -> Iterator[None]:
    """Name the prompt in an InvalidRequest, where there are several."""
    try:
        yield
    except InvalidRequest as error:
        if num_prompts == 1:
            raise
        raise InvalidRequest(f"prompt {index}: {error}") from None


def items_of(value: object) -> list[object] | None:
    """Return the items of a list, array or tensor; None for text, bytes, mappings and single values."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        return None
    to_list = getattr(value, "tolist", None)  # of arrays and tensors
    if callable(to_list):
        value = to_list()
    return list(value) if isinstance(value, Iterable) else None


def _from_mapping(prompt: Mapping[object, object]) -> OfflinePrompt:
    given = {key: value for key, value in prompt.items() if value is not None}
    for key in given:
        if key not in PROMPT_KEYS:
            raise InvalidRequest(f"unknown key {key!r}; known are 'prompt' and 'prompt_token_ids'")
    text = given.get("prompt")
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"prompt: expected text, got {shown(text)}")
    if "prompt_token_ids" in given:
        return OfflinePrompt(text, _token_ids(given["prompt_token_ids"], "prompt_token_ids: token ids"))
    if text is None:
        raise InvalidRequest(f"expected {EXPECTED}, got {shown(prompt)}")
    return OfflinePrompt(text, None)


def _token_ids(given: object, expected: str) -> tuple[int, ...]:
    listed = items_of(given)
    if listed is None:
        raise InvalidRequest(f"expected {expected}, got {shown(given)}")
    for index, token_id in enumerate(listed):
        if not _is_integer(token_id):
            raise InvalidRequest(f"token id {index}: expected an integer, got {shown(token_id)}")
    return tuple(int(token_id) for token_id in listed if isinstance(token_id, Integral))


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One of the `n` choices for one prompt, as in vLLM."""

    index: int  # of the choice
    text: str  # without stop strings, special tokens and the end token; "" for a model without a tokenizer
    token_ids: tuple[int, ...]  # all generated tokens, those of a stop string and the last one too
    finish_reason: FinishReason  # stop, length or abort
    stop_reason: str | int | None = None  # the stop string or stop token id; None: the end token, or no stop
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each token; None: not asked for


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one prompt; vLLM's RequestOutput."""

    prompt: str | None  # None: the prompt was given as token ids
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]  # SamplingParams.n choices
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    # One for each prompt token, None for the first; None: not asked for.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The text and token that one step adds to one choice."""

    prompt_index: int  # of the prompt among the prompts given
    index: int  # of the choice
    text: str  # "" while a character is incomplete or a stop string may have begun
    token_ids: tuple[int, ...]  # one token id; none when the choice was aborted
    finish_reason: FinishReason | None = None  # set in the last delta of a choice
    stop_reason: str | int | None = None  # as in CompletionOutput
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each token; None: not asked for


class Generation:
    """One request of an LLM, and the text of its choices so far."""

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        prompt_index: int,
        *,
        tokenizer: Tokenizer | None,
        sampling: SamplingParams,
    ) -> None:
        """tokenizer: None: all text is "". sampling: of the request, with the fields of the text."""
        self.request = request
        self._prompt = prompt
        self._prompt_index = prompt_index
        self._choices = [_Choice(request, tokenizer, sampling) for _ in range(sampling.n)]
        self._num_cached_tokens = 0
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def is_finished(self) -> bool:
        """All choices have ended."""
        return all(choice.finish_reason is not None for choice in self._choices)

    def accept(self, output: StepOutput) -> TextDelta | None:
        """Return the addition to the text; None for a choice that has ended at a stop string."""
        choice = self._choices[output.choice]
        if choice.finish_reason is not None:
            return None
        if output.choice == 0 and output.index == 0:
            self._num_cached_tokens = output.num_cached_tokens
            self._prompt_logprobs = output.prompt_logprobs
        text = choice.accept(output)
        return TextDelta(
            prompt_index=self._prompt_index,
            index=output.choice,
            text=text,
            token_ids=() if output.token_id is None else (output.token_id,),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            logprobs=None if output.logprobs is None else (output.logprobs,),
        )

    def completion(self) -> Completion:
        """Return the whole answer. Every choice must have finished."""
        return Completion(
            prompt=self._prompt,
            prompt_token_ids=tuple(self.request.token_ids),
            outputs=tuple(choice.completion_output(index) for index, choice in enumerate(self._choices)),
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
        )


class _Choice:
    def __init__(self, request: Request, tokenizer: Tokenizer | None, sampling: SamplingParams) -> None:
        detokenizer = detokenizer_of(
            tokenizer, request.token_ids, skip_special_tokens=sampling.skip_special_tokens
        )
        self._text = ChoiceText(detokenizer, sampling)
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] | None = None if sampling.logprobs is None else []
        self.token_ids: list[int] = []

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._text.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self._text.stop_reason

    def accept(self, output: StepOutput) -> str:
        """Take the next token, if there is one. Return the text that can be shown now."""
        if output.token_id is not None:
            self.token_ids.append(output.token_id)
        if output.logprobs is not None and self._logprobs is not None:
            self._logprobs.append(output.logprobs)
        text = self._text.accept(output.token_id, output.finish_reason)
        self._texts.append(text)
        return text

    def completion_output(self, index: int) -> CompletionOutput:
        assert self.finish_reason is not None, f"choice {index} is not finished"
        return CompletionOutput(
            index=index,
            text="".join(self._texts),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
        )
