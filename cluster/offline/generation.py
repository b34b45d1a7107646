"""The outputs of `LLM`, and one prompt whose tokens become text, choice by choice.

1. `Generation.accept` takes every StepOutput of the request and returns the text that the output adds.
2. A choice ends when the engine says so, or at a stop string, which the engine does not know: later tokens of
   the choice are dropped.
3. When `is_finished`, the engine may drop the request, and `completion` has the whole answer.
"""

from collections.abc import Sequence

import msgspec

from baton.errors import InvalidRequest
from baton.gateway.text.tokenizer import ChoiceText, Tokenizer, detokenizer_of
from baton.request import FinishReason, Request, StepOutput, TokenLogprobs


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
        stops: Sequence[str],
    ) -> None:
        """tokenizer: None: all text is "". Raises InvalidRequest for stop strings without a tokenizer."""
        if tokenizer is None and stops:
            raise InvalidRequest("stop: the model has no tokenizer, so its text cannot be searched")
        self.request = request
        self._prompt = prompt
        self._prompt_index = prompt_index
        self._choices = [_Choice(request, tokenizer, stops) for _ in range(request.sampling.n)]
        self._num_cached_tokens = 0
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def is_finished(self) -> bool:
        """All choices have ended."""
        return all(choice.finish_reason is not None for choice in self._choices)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all choices together."""
        return sum(len(choice.token_ids) for choice in self._choices)

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
            prompt_token_ids=self.request.token_ids,
            outputs=tuple(choice.completion_output(index) for index, choice in enumerate(self._choices)),
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
        )


class _Choice:
    def __init__(self, request: Request, tokenizer: Tokenizer | None, stops: Sequence[str]) -> None:
        sampling = request.sampling
        self._text = ChoiceText(detokenizer_of(tokenizer, request.token_ids), stops, sampling)
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
