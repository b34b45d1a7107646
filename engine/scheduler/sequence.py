"""Sequences, their queues, and the values that describe a step: Plan and Batch.

A sequence is one choice of one request. There are no phases. A sequence knows its tokens (prompt, then
generated) and how many of them have their KV in pages; each step lets `num_computed_tokens` catch up with
`num_tokens`:

    token_ids   [ prompt ................ | generated .... ]
                [0, num_computed_tokens)    KV is in the pages of page_table
                [num_computed_tokens, num_tokens)  still to compute; the last one yields the next token

A prefill is a sequence that is far behind, a decode one that is behind by one token.

The next step may be planned while a step runs (`Scheduler.advance`). A token that is still to come from the
running step is in `token_ids` as a placeholder, a negative number; it is the last token then.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import chain, count, repeat
from math import inf
from typing import NamedTuple, Protocol, Self, TypeAlias, TypeGuard

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.adapters import Adapter
from baton.errors import IntegrityError, InvalidRequest
from baton.fair_queue import DecayedShares, Share
from baton.request import (
    HEALTH_PRIORITY,
    TEXT_FIELDS,
    FinishReason,
    Request,
    SamplingParams,
    StepOutput,
)
from baton.tenants import without_public

SequenceKey: TypeAlias = tuple[str, int]  # (request_id, choice)
PageCopy: TypeAlias = tuple[int, int]  # (device_page, host_page), in either direction
Int64s: TypeAlias = NDArray[np.int64]
# (class, priority, due_s, arrival_s, serial); the lowest goes first among sequences of one scheduling key.
SequenceRank: TypeAlias = tuple[int, int, float, float, int]

DEFAULT_DUE_S = 10.0  # a request without an objective is due this long after its arrival


class SequenceStatus(Enum):
    """The state of a sequence in the scheduler."""

    WAITING = "waiting"  # new, or preempted
    RUNNING = "running"
    ENDING = "ending"  # reaches its greatest length with the token that is still to come
    FINISHED = "finished"


@dataclass(slots=True, weakref_slot=True, eq=False, kw_only=True)
class Sequence:
    """One choice of one request. Only the scheduler mutates a sequence, in `apply` and `commit`.

    After a step the KV of tokens [0, num_computed_tokens) is in `page_table`, on a GPU once the latest step
    mark has passed. Callers of the engine may read both between steps. Preemption empties the table, and
    `num_computed_tokens` returns to 0.

    `page_table[i]` holds tokens [i, i + 1) * page_size. A commit may replace a full page by a known page with
    the same contents, so a transfer reads the table after the commit. `table_version` grows when
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
    scheduling_key: str = ""  # opaque; sequences of one key share its weight and its quota
    weight: float = 1.0  # of the scheduling key
    max_kv_pages: float = inf  # quota of the scheduling key
    max_queue_delay_s: float | None = None  # bounds the wait in the queue window
    cache_salt: bytes = b""
    adapter: Adapter | None = None
    keeps_pages: bool = False  # the pages outlive a sequence that ends normally, until `release_kept`
    is_held: bool = False  # True: the scheduler does not admit it yet; see `Engine._release_held`

    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens with KV that was brought, or cached at the first admission
    page_table: list[int] = field(default_factory=list)
    table_version: int = 0
    # The identity of the leading full pages, computed on demand.
    page_keys: list[bytes] = field(default_factory=list)
    num_known_pages: int = 0  # leading pages that the prefix cache knows
    num_preemptions: int = 0
    rank: SequenceRank = (0, 0, 0.0, 0.0, 0)  # the scheduler sets the serial
    # The share of the scheduling key, while the sequence is live.
    share: Share = field(default_factory=lambda: Share(""))
    enqueued_s: float = 0.0
    started_s: float | None = None  # its first admission
    own_s: float = 0.0  # the prompt's part of the step times, see `attribute_step_cost`
    computed_s: float = 0.0  # the time of all steps that computed a part of the sequence
    used_s: float = 0.0  # the sequence's part of the time of these steps, by tokens
    preempted_s: float = 0.0  # from each preemption until it ran again
    preempted_since_s: float | None = None
    num_draft_tokens: int = 0  # that were checked
    num_accepted_tokens: int = 0  # of these, those that were kept

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
        quota, delay_ms = scheduling.quotas.max_kv_pages, scheduling.max_queue_delay_ms
        return cls(
            key=(request.request_id, choice),
            sampling=sampling,
            token_ids=[*request.token_ids, *request.generated_token_ids],
            num_prompt_tokens=num_prompt_tokens,
            min_num_tokens=num_prompt_tokens + sampling.min_tokens,
            max_num_tokens=num_prompt_tokens + most,
            stop_ids=frozenset(sampling.stop_token_ids).union(eos_ids),
            rank=(scheduling.rank, request.priority, due_s(request), request.arrival_s, 0),
            scheduling_key=request.tenant,
            weight=scheduling.weight,
            max_kv_pages=inf if quota is None else quota,
            max_queue_delay_s=None if delay_ms is None else delay_ms / 1e3,
            cache_salt=request.page_salt,
            adapter=request.adapter,
        )

    @property
    def request_id(self) -> str:
        return self.key[0]

    @property
    def choice(self) -> int:
        return self.key[1]

    @property
    def scheduling_class(self) -> int:
        """Class 0 is served strictly before class 1."""
        return self.rank[0]

    @property
    def is_health_check(self) -> bool:
        """See `Request.is_health_check`."""
        return self.rank[1] == HEALTH_PRIORITY

    @property
    def cache_group(self) -> bytes:
        """The group of its pages in eviction, which is fair among groups: one for all salts of a tenant.

        Pages without a tenant's own salt are shared by all tenants and form one group.
        """
        return self.scheduling_key.encode() if without_public(self.cache_salt) else b""

    @property
    def is_running(self) -> bool:
        return self.status is SequenceStatus.RUNNING

    @property
    def is_queued(self) -> bool:
        return self.status is SequenceStatus.WAITING

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Without a token that is still to come."""
        return len(self.token_ids) - self.num_prompt_tokens - (self.token_ids[-1] < 0)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True when every prompt position must still pass through the model, so that no cached prefix helps.

        All choices have the same prompt: only the first choice returns its logprobs, as in vLLM.
        """
        return (
            self.sampling.prompt_logprobs is not None
            and not self.choice
            and len(self.token_ids) == self.num_prompt_tokens
        )

    def end_with(self, token_id: int) -> FinishReason | None:
        """The reason to end the sequence with this token, its last one or the one that replaces its
        placeholder; None: the sequence goes on.
        """
        if token_id in self.stop_ids and len(self.token_ids) >= self.min_num_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_num_tokens else None


def due_s(request: Request) -> float:
    """When the first token should come, by the clock of `request.arrival_s`."""
    sla = request.sla
    for limit_ms in (sla.ttft_ms, sla.deadline_ms, request.scheduling_key.max_queue_delay_ms):
        if limit_ms is not None:
            return request.arrival_s + limit_ms / 1e3
    return request.arrival_s + DEFAULT_DUE_S


# The values of one step: the scheduler's plan, the batch that the model runs, and the tokens that come of it.


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The next step as decided, before anything has changed.

    `scheduled` is in batch order, chunks of one token first. `admitted` sequences, new or preempted before,
    run from this step on. `preempted` sequences are not scheduled; they run, or wait with pages that they
    brought. `page_needs` counts the pages to allocate and names only sequences that need any; together with
    the cached pages that admitted sequences share, the sum never exceeds the available pages.
    """

    scheduled: Mapping[SequenceKey, int]
    num_decodes: int  # the leading chunks of one token
    is_pure_decode: bool = False  # True: every chunk has one token and samples; False claims nothing
    drafts: Mapping[SequenceKey, Ordered[int]] = {}  # they end the chunks of their sequences
    page_needs: Mapping[SequenceKey, int]
    admitted: tuple[SequenceKey, ...] = ()
    preempted: tuple[SequenceKey, ...] = ()
    num_padded_tokens: int = 0  # padding rows of a static batch
    wait_s: float | None = None  # nothing is scheduled; the queue window opens after this time

    @property
    def own_tokens(self) -> Mapping[SequenceKey, int]:
        """The number of each sequence's tokens, without drafts."""
        if not self.drafts:
            return self.scheduled
        return {key: num - len(self.drafts.get(key, ())) for key, num in self.scheduled.items()}


class ScheduledChunk(msgspec.Struct, frozen=True, gc=False):
    """Compute tokens [start, start + num_tokens) of `sequence`, the last of which may be drafts."""

    sequence: Sequence
    start: int
    num_tokens: int
    drafts: Ordered[int] = ()

    @property
    def num_own_tokens(self) -> int:
        """The tokens of the sequence itself, without drafts."""
        return self.num_tokens - len(self.drafts)

    @property
    def samples(self) -> bool:
        """True when the last of the sequence's own tokens, and each draft, yields a next token.

        Holds until the scheduler advances.
        """
        return self.start + self.num_own_tokens == len(self.sequence.token_ids)


class Row(NamedTuple):
    """A row of logits: those of the token that follows the sequence's tokens and these drafts."""

    sequence: Sequence
    drafts: Ordered[int] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.sequence.token_ids) + len(self.drafts)

    def latest_tokens(self, num_tokens: int) -> list[int]:
        """The last tokens of the answer and of the drafts, at most so many."""
        token_ids, first = self.sequence.token_ids, self.sequence.num_prompt_tokens
        latest = [*token_ids[max(first, self.num_tokens - num_tokens) :], *self.drafts]
        return latest[len(latest) - num_tokens :] if len(latest) > num_tokens else latest


class Batch(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One step to execute, in this order: copies_to_host, copies_to_device, then a chunk of each sequence.

    Chunk i computes `lengths[i]` tokens of `sequences[i]` from `starts[i]` on. The sequence's own tokens end
    at `ends[i]`; drafts follow. The first `num_decodes` chunks have one token each; chunks with drafts are
    the next ones. Copies are due even when there are no chunks.
    """

    sequences: list[Sequence] = []
    starts: Int64s = np.zeros(0, np.int64)
    ends: Int64s = np.zeros(0, np.int64)
    lengths: list[int] = []
    page_ends: list[int] = []  # the chunks with the last token of a page, drafts not counted
    num_decodes: int = 0
    is_pure_decode: bool = False  # as `Plan.is_pure_decode`
    drafts: Mapping[int, Ordered[int]] = {}  # chunk -> drafts
    copies_to_host: tuple[PageCopy, ...] = ()
    copies_to_device: tuple[PageCopy, ...] = ()
    num_padded_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.sequences or self.copies_to_host or self.copies_to_device)

    @cached_property
    def chunks(self) -> tuple[ScheduledChunk, ...]:
        """Created on first use: a step of decodes needs none."""
        chunks = zip(self.sequences, self.starts.tolist(), self.lengths, strict=True)
        return tuple(ScheduledChunk(*each, self.drafts.get(index, ())) for index, each in enumerate(chunks))

    def placeholders(self) -> Ordered[int]:
        """-1 - i for the i-th chunk that samples, 0 for any other; as `ScheduledChunk.samples`."""
        if self.is_pure_decode:
            return range(-1, -1 - len(self.sequences), -1)
        numbers = count(-1, -1)
        return [next(numbers) if chunk.samples else 0 for chunk in self.chunks]

    @property
    def prompt_chunks(self) -> tuple[ScheduledChunk, ...]:
        """The chunks of more than one token, drafts not counted."""
        first = self.num_decodes + len(self.drafts)
        return self.chunks[first:] if first < len(self.sequences) else ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks, drafts among them, without padding."""
        return len(self.sequences) if self.is_pure_decode else sum(self.lengths)


def attribute_step_cost(batch: Batch, step_s: float, cost: Callable[[int, int], float]) -> None:
    """Add to `own_s` of each prompt in the batch its part of the step's time, in proportion to its cost.

    The time from a prompt's first step to its first token includes the prompts that were computed in between,
    so predictions use `own_s`. Decodes count nothing; a batch without longer chunks is a step of
    decodes. cost: of so many tokens from a start on, as `CostCap.cost`.
    """
    if not batch.prompt_chunks:
        return
    prompts = [
        each for each in batch.chunks if each.num_own_tokens > 1 or not each.sequence.num_generated_tokens
    ]
    costs = [cost(each.start, each.num_own_tokens) for each in prompts]
    total = sum(costs)
    for each, own in zip(prompts, costs, strict=True):
        each.sequence.own_s += step_s * own / total


class Drafter(Protocol):
    """Proposes tokens that sequences may sample next."""

    def propose(self, decodes: Ordered[Sequence], num_tokens: int) -> Mapping[SequenceKey, Ordered[int]]:
        """Return draft tokens for some of the sequences, each of which computes its last token in this step.

        num_tokens: all tokens of the step. Draft tokens change how long a step takes, never what is sampled.
        """
        ...

    def observe(self, batch: Batch, step_s: float) -> None:
        """Learn the seconds of a step, which include those of planning it and of proposing."""
        ...

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended. An aborted or failed sequence has ended, too."""
        ...


# The queues.


class Decodes:
    """The decoding sequences, in order, as the next step computes them."""

    def __init__(self, decoding: dict[SequenceKey, Sequence], page_size: int) -> None:
        """page_size: a power of two."""
        self.sequences = list(decoding.values())
        self.starts: Int64s = np.array([each.num_computed_tokens for each in self.sequences], np.int64)
        self.lengths = dict.fromkeys(decoding, 1)
        self.page_starts: list[int] = np.flatnonzero(self.starts & (page_size - 1) == 0).tolist()

    # Gathered on first use, while all of the sequences decode: a step with prompts needs none.

    @cached_property
    def num_tokens_left(self) -> int:
        """Tokens until one of the sequences has its greatest length."""
        return min((each.max_num_tokens - each.num_tokens for each in self.sequences), default=0)

    @cached_property
    def stop_ids(self) -> frozenset[int | None]:
        """Token ids that may end one of the sequences; None stands for a sequence without a token."""
        return frozenset([None]).union(*(each.stop_ids for each in self.sequences))

    @cached_property
    def _columns(self) -> tuple[list[str], list[int], Int64s, list[int]]:
        request_ids, choices = [s.request_id for s in self.sequences], [s.choice for s in self.sequences]
        num_prompt_tokens = np.array([each.num_prompt_tokens for each in self.sequences], np.int64)
        return request_ids, choices, num_prompt_tokens, [each.num_cached_tokens for each in self.sequences]

    def outputs(self, positions: Int64s, token_ids: Ordered[int]) -> list[StepOutput]:
        """The outputs of one token for each sequence, at these positions."""
        request_ids, choices, num_prompt_tokens, num_cached = self._columns
        indices = (positions - num_prompt_tokens).tolist()
        return [*map(StepOutput, request_ids, choices, indices, token_ids, repeat(None), num_cached)]


def rank_of(sequence: Sequence) -> SequenceRank:
    """The sort key of sequences that have one scheduling key."""
    return sequence.rank


class SequenceQueues:
    """A sequence is in `by_key` and, unless it is ending, in one of `waiting`, `prefilling`, `decoding` and
    `in_flight`.

    `in_flight` holds, in a pipeline, the sequences with a token to come from a launched step: until then they
    are in no other step, and keep their pages.
    `decoding` holds the sequences that lack the KV of exactly one token: a step treats them in bulk. Any
    other running sequence is in `prefilling`.
    """

    def __init__(self, page_size: int) -> None:
        """page_size: a power of two."""
        self._page_size = page_size
        self.shares = DecayedShares()  # of the scheduling keys of the sequences in by_key
        self._num_with_quota = 0
        self.by_key: dict[SequenceKey, Sequence] = {}
        self.waiting: list[Sequence] = []  # by rank
        self.prefilling: dict[SequenceKey, Sequence] = {}
        self.decoding: dict[SequenceKey, Sequence] = {}
        self.in_flight: dict[SequenceKey, Sequence] = {}
        self._launched: deque[Decodes] = deque()  # of the steps in flight that had all decodes
        self._decodes: Decodes | None = None  # None: `decoding` has changed
        self.num_last_admitted = 0  # by the last plan that admitted any: the rows of a request-level batch

    @property
    def decodes(self) -> Decodes:
        """`decoding` for a step, one object from step to step while no sequence joins or leaves."""
        if self._decodes is None:
            self._decodes = Decodes(self.decoding, self._page_size)
        return self._decodes

    def are_decodes(self, batch: Batch) -> bool:
        """True when the chunks of the batch are the decodes, in order: none has joined or left since."""
        return self._decodes is not None and batch.sequences is self._decodes.sequences

    def are_decodes_with_room(self, batch: Batch) -> bool:
        """True when the chunks are the decodes, and none reaches its greatest length with its next token."""
        return self.are_decodes(batch) and self.decodes.num_tokens_left > 1

    def continue_decodes(self, token_ids: Ordered[int | None], batch: Batch) -> TypeGuard[Ordered[int]]:
        """True when the chunks are the decodes, and no sequence ends with its token."""
        return self.are_decodes(batch) and self.decodes.stop_ids.isdisjoint(token_ids)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the decodes are as their sequences are."""
        if self._decodes is not None:
            expected = Decodes(self.decoding, self._page_size)
            names = "sequences", "lengths", "page_starts"
            agree = all(getattr(expected, name) == getattr(self._decodes, name) for name in names)
            if not agree or expected.starts.tolist() != self._decodes.starts.tolist():
                raise IntegrityError("the columns of the decodes do not match their sequences")

    @property
    def num_running(self) -> int:
        """Prefilling and decoding sequences, and those in flight."""
        return len(self.prefilling) + len(self.decoding) + len(self.in_flight)

    def running(self) -> list[Sequence]:
        """Decoding sequences, then prefilling ones, then those in flight."""
        return [*self.decoding.values(), *self.prefilling.values(), *self.in_flight.values()]

    @property
    def have_quotas(self) -> bool:
        """True when a live sequence has a page quota."""
        return self._num_with_quota > 0

    def wait(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        self.by_key[sequence.key] = sequence
        quota = sequence.max_kv_pages
        sequence.share = self.shares.join(sequence.scheduling_key, sequence.weight, quota)
        self._num_with_quota += quota < inf
        insort(self.waiting, sequence, key=rank_of)

    def run(self, sequence: Sequence) -> None:
        """Move a waiting sequence to the running ones."""
        self._leave(sequence)
        sequence.status = SequenceStatus.RUNNING
        self._place(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Move a running sequence back to the waiting ones."""
        self._leave(sequence)
        sequence.status = SequenceStatus.WAITING
        insort(self.waiting, sequence, key=rank_of)

    def end(self, sequence: Sequence) -> None:
        """Schedule a running sequence no more; it keeps its pages until its last token has come."""
        self._leave(sequence)
        sequence.status = SequenceStatus.ENDING

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended."""
        self._leave(sequence)
        del self.by_key[sequence.key]
        self.shares.leave(sequence.share, sequence.max_kv_pages)
        self._num_with_quota -= sequence.max_kv_pages < inf

    def launch(self, batch: Batch) -> None:
        """Keep the sequences that sample in a batch out of other batches until `land`."""
        if self.are_decodes(batch) and self._decodes is not None:
            self._launched.append(self._decodes)
            self.in_flight.update(self.decoding)
            self.decoding, self._decodes = {}, None
            return
        for chunk in batch.chunks:
            if chunk.samples:
                self._leave(chunk.sequence)
                self.in_flight[chunk.sequence.key] = chunk.sequence

    def land(self, batch: Batch) -> None:
        """Let the sequences of a launched batch that have not ended be in other batches again."""
        if self._launched and self._launched[0].sequences is batch.sequences:
            decodes = self._launched.popleft()
            if not self.decoding:
                self.decoding = {each.key: self.in_flight.pop(each.key) for each in batch.sequences}
                self._decodes = decodes
                return
        for sequence, placeholder in zip(batch.sequences, batch.placeholders(), strict=True):
            if placeholder and self.in_flight.get(sequence.key) is sequence:
                self._place(self.in_flight.pop(sequence.key))

    def advance(self, batch: Batch) -> None:
        """Note that the sequences of the batch have its tokens. Prefills that have caught up decode."""
        if self.are_decodes(batch):
            self.decodes.starts, self.decodes.page_starts = batch.ends, batch.page_ends
            self.decodes.num_tokens_left -= 1
        else:
            self._decodes = None
        for sequence in [s for s in self.prefilling.values() if s.num_uncomputed_tokens == 1]:
            del self.prefilling[sequence.key]
            self._place(sequence)

    def _place(self, sequence: Sequence) -> None:
        if sequence.num_uncomputed_tokens == 1:
            self.decoding[sequence.key], self._decodes = sequence, None
        else:
            self.prefilling[sequence.key] = sequence

    def _leave(self, sequence: Sequence) -> None:
        if sequence.is_queued:
            del self.waiting[bisect_left(self.waiting, sequence.rank, key=rank_of)]
        elif sequence.key in self.in_flight:
            del self.in_flight[sequence.key]
            self._launched.clear()
        elif sequence.is_running and self.prefilling.pop(sequence.key, None) is None:
            del self.decoding[sequence.key]
            self._decodes = None


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
    if request.sampling.of_tokens() is not request.sampling:
        raise InvalidRequest(f"{', '.join(TEXT_FIELDS)}: an engine knows no text and takes none of these")


def check_sampling(sampling: SamplingParams, *, vocab_size: int) -> None:
    """Raise InvalidRequest for sampling parameters that this model cannot use."""
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_ids("logit_bias", sampling.logit_bias, vocab_size)
    _check_ids("allowed_token_ids", sampling.allowed_token_ids or (), vocab_size)
    _check_ids("bad_words_token_ids", chain(*sampling.bad_words_token_ids), vocab_size)
    if sampling.top_k > vocab_size:
        raise InvalidRequest(f"top_k must be at most the vocabulary of {vocab_size}, got {sampling.top_k}")


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{name}: token id {token_id} is outside the vocabulary [0, {vocab_size})")
