"""What a request may ask of the model that is loaded; what no model could do is refused by SamplingParams."""

from collections.abc import Iterable

from baton.engine.cache.page_pool import PagePool
from baton.engine.scheduler.sequence import Sequence
from baton.errors import InvalidRequest
from baton.request import Request, SamplingParams


def check_request(request: Request, *, vocab_size: int, max_model_len: int) -> None:
    """Raise InvalidRequest, naming the field, for what would fail or mean nothing once it runs."""
    num_tokens, num_generated = len(request.token_ids), len(request.generated_token_ids)
    if not num_tokens:
        raise InvalidRequest("the prompt is empty: at least one token is needed")
    if num_tokens + num_generated >= max_model_len:
        begun = f" and {num_generated} of the answer" if num_generated else ""
        raise InvalidRequest(
            f"the prompt has {num_tokens} tokens{begun}; the model takes {max_model_len}, "
            "one of them for the answer"
        )
    _check_ids("prompt token", request.token_ids, vocab_size)
    _check_ids("generated_token_ids", request.generated_token_ids, vocab_size)
    check_sampling(request.sampling, vocab_size=vocab_size)


def check_sampling(sampling: SamplingParams, *, vocab_size: int) -> None:
    """The part of `check_request` that needs no prompt."""
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_ids("logit_bias", sampling.logit_bias, vocab_size)
    if sampling.top_k > vocab_size:
        raise InvalidRequest(f"top_k must be at most the vocabulary of {vocab_size}, got {sampling.top_k}")


def _check_ids(what: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{what}: token id {token_id} is outside the vocabulary [0, {vocab_size})")


def most_tokens(sequence: Sequence, pool: PagePool) -> int:
    """How many tokens the sequence can have here. InvalidRequest when it could not run even alone."""
    if not sequence.num_prompt_tokens:
        raise InvalidRequest(f"request {sequence.request_id}: the prompt is empty")
    quota = sequence.max_kv_pages
    num_pages = pool.num_pages if quota is None else min(quota, pool.num_pages)
    most = min(sequence.max_num_tokens, num_pages * pool.page_size)
    if sequence.num_tokens < most:
        return most
    begun = sequence.num_generated_tokens
    holder = "the model and its KV pages hold"
    if quota is not None and quota < pool.num_pages:
        holder = f"the quota max_kv_pages of {quota} pages, and the model, hold"
    raise InvalidRequest(
        f"request {sequence.request_id}: a prompt of {sequence.num_prompt_tokens} tokens"
        f"{f' and {begun} of the answer' if begun else ''}; {holder} {most}, one of them for the answer"
    )
