"""What the engine says of its sequences."""

from baton.engine.plan import Advance
from baton.engine.sampler import Sampled
from baton.engine.sequence import Sequence
from baton.request import StepOutput


def output_of(advance: Advance, sampled: Sampled) -> StepOutput:
    sequence = advance.sequence
    return StepOutput(
        request_id=sequence.request_id,
        choice=sequence.choice,
        index=advance.index,
        token_id=advance.token_id,
        logprobs=sampled.logprobs.get(sequence.key),
        prompt_logprobs=sampled.prompt_logprobs.get(sequence.key),
        finish_reason=advance.finish_reason,
        num_cached_tokens=sequence.num_cached_tokens,
    )


def last_output_of(sequence: Sequence, error: str | None = None) -> StepOutput:
    """Of a sequence that has ended without another token."""
    return StepOutput(
        request_id=sequence.request_id,
        choice=sequence.choice,
        index=sequence.num_generated_tokens,
        token_id=None,
        finish_reason=sequence.finish_reason,
        num_cached_tokens=sequence.num_cached_tokens,
        error=error,
    )
