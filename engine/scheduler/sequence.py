"""One choice of one request while the engine works on it.

There are no phases. A sequence knows its tokens (prompt, then generated) and how many of them have
their KV in pages; each step lets `num_computed_tokens` catch up with `num_tokens`:

    token_ids   [ prompt ................ | generated .... ]
                [0, num_computed_tokens)    KV is in the pages of page_table
                [num_computed_tokens, num_tokens)  still to compute; the last one is what samples

A prefill is a sequence that is far behind, a decode one that is behind by one token.
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, Self, TypeAlias

from baton.errors import InvalidRequest
from baton.fair_queue import Share
from baton.request import FinishReason, Request, SamplingParams

SequenceKey: TypeAlias = tuple[str, int]  # (request_id, choice)
# (class, priority, due_s, arrival_s, serial); the lowest goes first among sequences of one scheduling key.
SequenceRank: TypeAlias = tuple[int, int, float, float, int]

DEFAULT_DUE_S = 10.0  # a request without an objective is due this long after its arrival


class SequenceStatus(Enum):
    """The state of a sequence in the scheduler."""

    WAITING = "waiting"  # new, or preempted with its pages dropped
    SWAPPED = "swapped"  # preempted with its KV kept in host_pages
    RUNNING = "running"
    FINISHED = "finished"


class SequenceProgress(Protocol):
    """The part of a sequence that callers of the engine may read between steps.

    After a step the KV of tokens [0, num_computed_tokens) is in `page_table`. The entries of full pages stay
    the same until the sequence ends or is preempted. Preemption empties the table; `num_computed_tokens` then
    returns to 0, or stays when the pages are swapped out.
    """

    @property
    def key(self) -> SequenceKey: ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def page_table(self) -> Ordered[int]: ...

    @property
    def table_version(self) -> int: ...

    @property
    def status(self) -> SequenceStatus: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...

    @property
    def own_s(self) -> float: ...


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One choice of one request. Only the scheduler mutates a sequence, in `apply` and `commit`.

    `page_table[i]` holds tokens [i, i + 1) * page_size. A commit may replace a full page by a known page with
    the same contents, so code that leases pages reads the table after the commit. `table_version` grows when
    an existing entry of `page_table` may have changed. Between two equal versions the table is only appended
    to. Two sequences of one scheduler never have the same version.
    """

    key: SequenceKey
    sampling: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    min_num_tokens: int  # no stop id ends the sequence before it has this many tokens
    max_num_tokens: int  # the sequence ends with this many tokens
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    arrival_s: float = 0.0
    due_s: float = 0.0  # when the first token should come
    scheduling_key: str = ""  # opaque; sequences of one key share its weight and its quota
    weight: float = 1.0  # of the scheduling key
    scheduling_class: int = 0  # class 0 is served strictly before class 1
    max_kv_pages: int | None = None  # quota of the scheduling key
    max_queue_delay_s: float | None = None  # bounds the wait in the queue window
    cache_salt: bytes = b""
    keeps_pages: bool = False  # the pages outlive a sequence that ends normally, until `release_kept`

    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens with KV that was brought, or cached at the first admission
    page_table: list[int] = field(default_factory=list)
    table_version: int = 0
    host_pages: list[int] = field(default_factory=list)  # filled only while SWAPPED
    page_keys: list[bytes] = field(
        default_factory=list
    )  # identity of the leading full pages, computed on demand
    num_known_pages: int = 0  # leading pages that the prefix cache knows
    num_preemptions: int = 0
    rank: SequenceRank = (0, 0, 0.0, 0.0, 0)
    share: Share = field(
        default_factory=lambda: Share("")
    )  # of the scheduling key, while the sequence is live
    enqueued_s: float = 0.0
    own_s: float = 0.0  # the prompt's part of the step times, see `attribute_step_cost`

    @classmethod
    def from_request(
        cls, request: Request, choice: int, *, max_model_len: int, eos_token_ids: Collection[int] = ()
    ) -> Self:
        """Start choice `choice` of `request`, or continue it after its `generated_token_ids`.

        A sequence never grows past `max_model_len` tokens.
        """
        sampling, scheduling = request.sampling, request.scheduling_key
        num_prompt_tokens = len(request.token_ids)
        room = max_model_len - num_prompt_tokens
        most = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        eos_ids = () if sampling.ignore_eos else eos_token_ids
        delay_ms = scheduling.max_queue_delay_ms
        return cls(
            key=(request.request_id, choice),
            sampling=sampling,
            token_ids=[*request.token_ids, *request.generated_token_ids],
            num_prompt_tokens=num_prompt_tokens,
            min_num_tokens=num_prompt_tokens + sampling.min_tokens,
            max_num_tokens=num_prompt_tokens + most,
            stop_ids=frozenset(sampling.stop_token_ids).union(eos_ids),
            priority=request.priority,
            arrival_s=request.arrival_s,
            due_s=due_s(request),
            scheduling_key=request.tenant,
            weight=scheduling.weight,
            scheduling_class=scheduling.rank,
            max_kv_pages=scheduling.quotas.max_kv_pages,
            max_queue_delay_s=None if delay_ms is None else delay_ms / 1e3,
            cache_salt=request.cache_salt,
        )

    @property
    def request_id(self) -> str:
        return self.key[0]

    @property
    def choice(self) -> int:
        return self.key[1]

    @property
    def is_running(self) -> bool:
        return self.status is SequenceStatus.RUNNING

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether every prompt position must still pass through the model, so that no cached prefix helps.

        All choices have the same prompt: only the first choice returns its logprobs, as in vLLM.
        """
        return (
            self.sampling.prompt_logprobs is not None
            and not self.choice
            and len(self.token_ids) == self.num_prompt_tokens
        )


def due_s(request: Request) -> float:
    """When the first token should come, by the clock of `request.arrival_s`."""
    sla = request.sla
    for limit_ms in (sla.ttft_ms, sla.deadline_ms, request.scheduling_key.max_queue_delay_ms):
        if limit_ms is not None:
            return request.arrival_s + limit_ms / 1e3
    return request.arrival_s + DEFAULT_DUE_S


# Checks against the loaded model. SamplingParams refuses values that no model accepts.


def check_request(request: Request, *, vocab_size: int, max_model_len: int) -> None:
    """Raise InvalidRequest, naming the field, for a request that this model cannot run."""
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
    """Raise InvalidRequest for sampling parameters that this model cannot use."""
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_ids("logit_bias", sampling.logit_bias, vocab_size)
    if sampling.top_k > vocab_size:
        raise InvalidRequest(f"top_k must be at most the vocabulary of {vocab_size}, got {sampling.top_k}")


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{name}: token id {token_id} is outside the vocabulary [0, {vocab_size})")
