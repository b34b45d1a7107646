"""What is taken off requests when the cluster is overloaded, of tenants that allow it."""

import msgspec

from baton.request import Request, SamplingParams

MAX_ALTERNATIVES = 1  # for each token, where log probabilities may be reduced


def degraded(request: Request) -> Request:
    """With a shorter answer and fewer alternatives, as far as its tenant allows; else the same object.

    What has begun to be answered goes on as it began.
    """
    if request.generated_token_ids:
        return request
    rights, sampling = request.standing.degradation, request.sampling
    changes: dict[str, int] = {}
    most = rights.clip_max_tokens_to
    if most is not None and (sampling.max_tokens is None or sampling.max_tokens > most):
        changes["max_tokens"] = most
        changes["min_tokens"] = min(sampling.min_tokens, most)
    if rights.may_reduce_logprobs:
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(sampling, name)
            if asked is not None and asked > MAX_ALTERNATIVES:
                changes[name] = MAX_ALTERNATIVES
    if not changes:
        return request
    narrower: SamplingParams = msgspec.structs.replace(sampling, **changes)
    return msgspec.structs.replace(request, sampling=narrower)
