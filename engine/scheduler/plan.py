"""What the scheduler says: a Plan (what would be done) and the Batch that applying it yields."""

from collections.abc import Mapping
from enum import Enum
from typing import TypeAlias

import msgspec

from baton.engine.scheduler.sequence import Sequence, SequenceKey
from baton.request import FinishReason

PageCopy: TypeAlias = tuple[int, int]  # (device_page, host_page), whichever way the copy goes


class PreemptMode(Enum):
    RECOMPUTE = "recompute"  # drop the pages; compute the tokens again later
    SWAP = "swap"  # copy the pages to host memory; copy them back later


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The next step as decided, before anything has changed. Applying it once makes it stale.

    `scheduled` is in batch order, chunks of one token first. `admitted` sequences (new, resumed or swapped
    in) run from this step on; `preempted` ones are not scheduled, and may be waiting with pages that they
    have brought. `page_needs` counts the pages to allocate and names only sequences that need any; with the
    cached pages that admitted ones share it never exceeds what is available.
    """

    version: int
    scheduled: Mapping[SequenceKey, int]
    num_decodes: int  # the leading chunks of one token
    page_needs: Mapping[SequenceKey, int]
    admitted: tuple[SequenceKey, ...] = ()
    preempted: Mapping[SequenceKey, PreemptMode] = {}
    num_padded_tokens: int = 0  # rows that a padded batch computes for nothing
    wait_s: float | None = None  # nothing to do now; the queue window opens after this long
    way_for: SequenceKey | None = None  # the waiting sequence that others were preempted for: it comes next


class ScheduledChunk(msgspec.Struct, frozen=True, gc=False):
    """Compute tokens [start, start + num_tokens) of `sequence`; a plain record made for every step."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the last position of the chunk yields the next token; true until it is committed."""
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


class Advance(msgspec.Struct, frozen=True, gc=False):
    """`sequence` grew by `token_id`, its generated token number `index`; the last if a reason is given."""

    sequence: Sequence
    token_id: int
    index: int
    finish_reason: FinishReason | None
