"""One choice of one request while the engine works on it.

There are no phases. A sequence knows its tokens (prompt, then generated) and how many of them have
their KV in pages; each step lets `num_computed_tokens` catch up with `num_tokens`:

    token_ids   [ prompt ................ | generated .... ]
                [0, num_computed_tokens)    KV is in the pages of page_table
                [num_computed_tokens, num_tokens)  still to compute; the last one is what samples

A prefill is a sequence that is far behind, a decode one that is behind by one token.
"""

from collections.abc import Collection
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, Self, TypeAlias

from baton.engine.scheduler.accounts import Account
from baton.request import FilledPages as FilledPages
from baton.request import FinishReason, Request, SamplingParams
from baton.tenants import SchedulingKey

SequenceKey: TypeAlias = tuple[str, int]  # (request_id, choice)
# (class, priority, due_s, arrival_s, serial): of one account, and of one class, the lowest goes first.
SequenceRank: TypeAlias = tuple[int, int, float, float, int]

DEFAULT_DUE_S = 10.0  # after its arrival a request is due that says nothing else


class SequenceStatus(Enum):
    WAITING = "waiting"  # new, or preempted with its pages dropped
    SWAPPED = "swapped"  # preempted with its KV kept in host_pages
    RUNNING = "running"
    FINISHED = "finished"


class SequenceProgress(Protocol):
    """A sequence as a caller may read it between steps.

    After a step the pages of [0, num_computed_tokens) are in `page_table`. Entries of full pages do not
    change until the sequence is preempted, which empties the table and brings `num_computed_tokens` back to
    0 or keeps it for later, or ends.
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
    """Mutable, and only the scheduler mutates it, in `apply` and `commit`.

    `page_table[i]` holds tokens [i, i + 1) * page_size. A commit may replace a full page by the known page
    with the same contents, so whoever leases pages reads the table after it.
    `table_version` grows whenever an entry of `page_table` already seen may have changed; between two
    equal versions the table is only appended to. Sequences of one scheduler never share a version.
    """

    key: SequenceKey
    sampling: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    min_num_tokens: int  # no stop id ends the sequence before it has this many tokens
    max_num_tokens: int  # it ends when it has this many, whatever they are
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    arrival_s: float = 0.0
    due_s: float = 0.0  # when it should have its first token
    account_name: str = ""
    scheduling_key: SchedulingKey = field(default_factory=SchedulingKey)
    cache_salt: bytes = b""
    keeps_pages: bool = False  # when it has all its tokens, until somebody lets them go

    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens that it brought, or found in the prefix cache at first
    page_table: list[int] = field(default_factory=list)
    table_version: int = 0
    host_pages: list[int] = field(default_factory=list)  # filled only while SWAPPED
    page_keys: list[bytes] = field(default_factory=list)  # identity of full pages, as far as asked for
    num_known_pages: int = 0  # leading pages that the prefix cache has been told of
    num_preemptions: int = 0
    rank: SequenceRank = (0, 0, 0.0, 0.0, 0)
    account: Account = field(default_factory=lambda: Account(""))  # of its name, while it is live
    enqueued_s: float = 0.0
    own_s: float = 0.0  # its part of the time of steps, as a prompt; see engine/scheduler/scheduler.py

    @classmethod
    def from_request(
        cls, request: Request, choice: int, *, max_model_len: int, eos_token_ids: Collection[int] = ()
    ) -> Self:
        """Start choice `choice` of `request`, or go on with it after the tokens that it has already.

        A sequence never grows past `max_model_len` tokens.
        """
        sampling = request.sampling
        num_prompt_tokens = len(request.token_ids)
        room = max_model_len - num_prompt_tokens
        most = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        eos_ids = () if sampling.ignore_eos else eos_token_ids
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
            account_name=request.tenant,
            scheduling_key=request.scheduling_key,
            cache_salt=request.cache_salt,
        )

    @property
    def request_id(self) -> str:
        return self.key[0]

    @property
    def choice(self) -> int:
        return self.key[1]

    @property
    def max_kv_pages(self) -> int | None:
        return self.scheduling_key.quotas.max_kv_pages

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
        """True while every prompt position must still pass through the model: no cached prefix helps.

        The prompt is the request's, so its first choice alone answers for it, as in vLLM.
        """
        return (
            self.sampling.prompt_logprobs is not None
            and not self.choice
            and len(self.token_ids) == self.num_prompt_tokens
        )


def due_s(request: Request) -> float:
    """When it should have its first token, by the clock of its arrival."""
    sla, scheduling_key = request.sla, request.scheduling_key
    for limit_ms in (sla.ttft_ms, sla.deadline_ms, scheduling_key.max_queue_delay_ms):
        if limit_ms is not None:
            return request.arrival_s + limit_ms / 1e3
    return request.arrival_s + DEFAULT_DUE_S
