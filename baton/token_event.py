"""A token on its way from a worker to a client."""

from typing import Annotated, Self

import msgspec
from msgspec import Meta

from baton.request import FinishReason, Request, StepOutput, TokenLogprobs
from baton.wire_types import Attempt, Count, Id


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One token of one attempt; `index` counts all generated ones, those of earlier attempts too.

    The last one has a finish reason; `token_id` is None only where it ended without a token.
    """

    request_id: Id
    attempt: Attempt
    index: Count
    token_id: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None
    finish_reason: FinishReason | None = None
    num_cached_tokens: Count = 0  # of the prompt; said with the first token of an attempt
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # with index 0

    @classmethod
    def of(cls, request: Request, output: StepOutput, finish_reason: FinishReason | None) -> Self:
        """What an engine has made for this attempt; the reason may not be the engine's own."""
        return cls(
            request.request_id,
            request.attempt,
            output.index,
            output.token_id,
            finish_reason,
            output.num_cached_tokens,
            output.logprobs,
            output.prompt_logprobs,
        )
