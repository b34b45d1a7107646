"""What the offline API answers; names as vLLM's where the thing is the same."""

import msgspec

from baton.request import FinishReason, TokenLogprobs


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One of the `n` choices for one prompt.

    `text` has no special tokens, no stop string and no token that ended it; `token_ids` has all of them. A
    model without a tokenizer has no text: "".
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None  # the stop string, or the one of `stop_token_ids`, that ended it
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one a token, when asked for


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str | None  # None when it was given as token ids
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one more token added to one choice. With `finish_reason` set, the last of that choice.

    `text` is "" while a character is not whole or a stop string may have begun.
    """

    prompt_index: int  # which of the prompts given
    index: int  # which of its `n` choices
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
