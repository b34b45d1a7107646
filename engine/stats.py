"""What an engine tells of itself: for load reports and metrics."""

from typing import NamedTuple

import msgspec

from baton.engine.pages import PageState
from baton.engine.plan import Batch
from baton.engine.scheduler import Scheduler


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
