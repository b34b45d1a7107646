"""A scheduler's decisions: the Plan of a step, and the Batch and Advances that carrying it out yields."""

from collections.abc import Mapping
from enum import Enum

import msgspec

from baton.engine.cache.host_tier import PageCopy
from baton.engine.scheduler.sequence import Sequence, SequenceKey
from baton.request import FinishReason


class PreemptMode(Enum):
    """The fate of a preempted sequence's KV."""

    RECOMPUTE = "recompute"  # drop the pages; compute the tokens again later
    SWAP = "swap"  # copy the pages to host memory; copy them back later


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The next step as decided, before anything has changed. Applying a plan makes it stale.

    `scheduled` is in batch order, chunks of one token first. `admitted` sequences (new, resumed or swapped
    in) run from this step on. `preempted` sequences are not scheduled; they run, or wait with pages that they
    brought. `page_needs` counts the pages to allocate and names only sequences that need any; together with
    the cached pages that admitted sequences share, the sum never exceeds the available pages.
    """

    version: int
    scheduled: Mapping[SequenceKey, int]
    num_decodes: int  # the leading chunks of one token
    page_needs: Mapping[SequenceKey, int]
    admitted: tuple[SequenceKey, ...] = ()
    preempted: Mapping[SequenceKey, PreemptMode] = {}
    num_padded_tokens: int = 0  # padding rows of a static batch
    wait_s: float | None = None  # nothing is scheduled; the queue window opens after this time
    preempted_for: SequenceKey | None = None  # the waiting sequence that others give pages to; it comes next


class ScheduledChunk(msgspec.Struct, frozen=True, gc=False):
    """Compute tokens [start, start + num_tokens) of `sequence`."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the last position of the chunk yields the next token; true until the token is committed."""
        return self.start + self.num_tokens == len(self.sequence.token_ids)


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One step to execute, in this order: copies_to_host, copies_to_device, then the chunks.

    The first `num_decodes` chunks have one token each. Copies are due even when there are no chunks.
    """

    chunks: tuple[ScheduledChunk, ...]
    num_decodes: int
    copies_to_host: tuple[PageCopy, ...] = ()
    copies_to_device: tuple[PageCopy, ...] = ()
    num_padded_tokens: int = 0

    @property
    def prompt_chunks(self) -> tuple[ScheduledChunk, ...]:
        """The chunks of more than one token."""
        return self.chunks[self.num_decodes :]

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks, without padding."""
        return sum(chunk.num_tokens for chunk in self.chunks)


class Advance(msgspec.Struct, frozen=True, gc=False):
    """`sequence` grew by `token_id`, its generated token number `index`; the last one has a finish reason."""

    sequence: Sequence
    token_id: int
    index: int
    finish_reason: FinishReason | None
