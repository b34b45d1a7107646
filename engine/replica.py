"""What the loops of workers ask of an engine; `Engine` documents it, and the simulator has one of its own."""

from collections.abc import Sequence
from collections.abc import Sequence as Ordered
from typing import NamedTuple, Protocol

import msgspec

from baton.engine.cache.page_events import PageChanges
from baton.engine.cache.page_pool import Owner, PagePool, PageState
from baton.engine.scheduler.plan import Batch, ScheduledChunk
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequence import SequenceProgress
from baton.engine.scheduler.step_planner import PressureMode
from baton.request import FilledPages, Request, StepOutput

# Who wants to hear, while a step runs, how far it is: KV can leave while later layers compute.


class LayerWatch(Protocol):
    """Both calls come from within `Engine.step`, in its thread, and hold it up; what they raise fails it.

    Pages of the step's chunks are allocated by then, and nothing moves them before the step ends; page
    tables and counts are otherwise those of before the step, and the engine is not to be called.
    """

    def begin(self, chunks: Sequence[ScheduledChunk]) -> int:
        """The step computes these. In how many groups of layers to tell of it; 0 for not at all."""
        ...

    def layers_written(self, first: int, stop: int) -> None:
        """Layers [first, stop) of all chunks' keys and values are in their pages: on a GPU, for what follows
        on the current stream."""
        ...


# What an engine tells of itself: for load reports and metrics.


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences and pages as they are now; `total` says since the engine was loaded."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_active_pages: int
    num_cached_pages: int
    num_leased_pages: int
    num_quarantined_pages: int
    num_reservable_pages: int
    total_queried_tokens: int  # that looked for a prefix in the cache
    total_hit_tokens: int  # and found it
    total_preemptions: int


class StepFigures(NamedTuple):
    """What a step was made of, and what it took."""

    num_sequences: int
    num_new_tokens: int  # of prompts
    num_context_tokens: int  # that its sequences attend to, their new ones included
    step_s: float

    @classmethod
    def of(cls, batch: Batch, step_s: float) -> "StepFigures":
        prompts = batch.chunks[batch.num_decodes :]
        return cls(
            num_sequences=len(batch.chunks),
            num_new_tokens=sum(chunk.num_tokens for chunk in prompts),
            num_context_tokens=sum(chunk.start + chunk.num_tokens for chunk in batch.chunks),
            step_s=step_s,
        )


def take_stats(scheduler: Scheduler) -> EngineStats:
    pool, cache = scheduler.pool, scheduler.cache
    return EngineStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_pages=pool.num_pages,
        num_free_pages=pool.count(PageState.FREE),
        num_active_pages=pool.count(PageState.ACTIVE),
        num_cached_pages=pool.count(PageState.CACHED),
        num_leased_pages=pool.count(PageState.LEASED),
        num_quarantined_pages=pool.count(PageState.QUARANTINED),
        num_reservable_pages=scheduler.outside.num_reservable(),
        total_queried_tokens=cache.num_queried_tokens,
        total_hit_tokens=cache.num_hit_tokens,
        total_preemptions=scheduler.num_preemptions,
    )


class Replica(Protocol):
    @property
    def pages(self) -> PagePool: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def num_available_pages(self) -> int: ...

    def check(self, request: Request) -> None: ...

    def add(
        self, request: Request, filled: FilledPages | None = None, *, keeps_pages: bool = False
    ) -> tuple[SequenceProgress, ...]: ...

    def abort(self, request_id: str, choice: int | None = None) -> list[StepOutput]: ...

    def relieve(self, pressure_mode: PressureMode) -> None: ...

    def has_work(self) -> bool: ...

    def step(self, watch: LayerWatch | None = None) -> list[StepOutput]: ...

    def claim_prefix(
        self, token_ids: Ordered[int], salt: bytes, owner: Owner, *, multiple_of: int = 1
    ) -> FilledPages: ...

    def release(self, filled: FilledPages) -> None: ...

    def release_kept(self, request_id: str, choice: int = 0) -> None: ...

    def make_room(self, num_pages: int) -> bool: ...

    def page_keys(self, token_ids: Ordered[int], salt: bytes, page_size: int) -> list[bytes]: ...

    def lend(self, keys: Ordered[bytes], borrower: Owner) -> list[int] | None: ...

    def take_page_changes(self, *, is_afresh: bool = False) -> PageChanges: ...

    def stats(self) -> EngineStats: ...

    def last_step(self) -> StepFigures | None: ...


class SoughtPrefix(NamedTuple):
    """What a request begins with, for whoever might bring its KV from elsewhere."""

    engine: Replica
    request: Request
    owner: str  # who has a claim on what is known, and whose the pages are that come

    @property
    def num_tokens(self) -> int:
        """That may be brought: not the last, no more than the tenant's quota of pages leaves, and none where
        the logits of each one are wanted."""
        if self.request.sampling.prompt_logprobs is not None:
            return 0
        most, quota = self.request.num_tokens - 1, self.request.scheduling_key.quotas.max_kv_pages
        if quota is None:
            return most
        pages = self.engine.pages
        return max(0, min(most, (quota - pages.accounts.held(self.request.tenant)) * pages.page_size))

    def claim(self, multiple_of: int) -> FilledPages:
        """Hold what is known of it here, on the tenant's account; see `Engine.claim_prefix`."""
        self.engine.pages.accounts.book(self.owner, self.request.tenant)
        token_ids, salt = self.request.all_token_ids, self.request.cache_salt
        return self.engine.claim_prefix(token_ids, salt, self.owner, multiple_of=multiple_of)

    def keys(self, page_size: int) -> list[bytes]:
        """Of the pages of that size that it fills."""
        return self.engine.page_keys(self.request.all_token_ids, self.request.cache_salt, page_size)
