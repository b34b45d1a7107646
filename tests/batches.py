"""Sequences and batches made by hand, for what reads them without a scheduler."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from baton.engine.scheduler.sequence import Batch, ScheduledChunk, Sequence
from baton.request import SamplingParams


def make_sequence(
    name: str, prompt: Iterable[int], generated: Iterable[int] = (), *, choice: int = 0, **sampling: Any
) -> Sequence:
    """A greedy sequence, unless `sampling` says otherwise; it stops at its stop_token_ids alone."""
    prompt_ids = list(prompt)
    params = SamplingParams(**{"temperature": 0.0, "seed": 0, **sampling})
    return Sequence(
        key=(name, choice),
        sampling=params,
        token_ids=[*prompt_ids, *generated],
        num_prompt_tokens=len(prompt_ids),
        min_num_tokens=len(prompt_ids) + params.min_tokens,
        max_num_tokens=10_000,
        stop_ids=frozenset(params.stop_token_ids),
    )


def rest_of(sequence: Sequence, start: int = 0) -> ScheduledChunk:
    """The chunk from `start` to the end, which samples."""
    return ScheduledChunk(sequence, start, sequence.num_tokens - start)


def make_batch(*chunks: ScheduledChunk, **fields: Any) -> Batch:
    """Chunks of one token first, as the scheduler orders them."""
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    num_decodes = next((i for i, chunk in enumerate(chunks) if chunk.num_tokens != 1), len(chunks))
    return Batch(
        sequences=[chunk.sequence for chunk in chunks],
        starts=starts,
        ends=starts + np.array([chunk.num_own_tokens for chunk in chunks], np.int64),
        lengths=[chunk.num_tokens for chunk in chunks],
        num_decodes=num_decodes,
        **fields,
    )
