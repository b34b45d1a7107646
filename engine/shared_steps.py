"""Whose a step's time was, where several prompts are computed in turns or together.

A prompt's time from its first step to its first token says little of what it takes: others may have come
first meanwhile. Whoever predicts from it would count those twice, as work that takes long and as a wait.
"""

from collections.abc import Callable, Mapping

from baton.engine.plan import Batch
from baton.engine.sequence import Sequence, SequenceKey


def share_step(
    prefilling: Mapping[SequenceKey, Sequence],
    batch: Batch,
    step_s: float,
    cost: Callable[[int, int], float],
) -> None:
    """Add to `others_s` of each running prompt what it had not of this step: all but its part of the cost of
    prompts in it. Decodes ride along with any prompt, and are no others.

    cost: of so many tokens from a start on (ease.py).
    """
    chunks = [chunk for chunk in batch.chunks if chunk.sequence.key in prefilling]
    costs = {chunk.sequence.key: cost(chunk.start, chunk.num_tokens) for chunk in chunks}
    total = sum(costs.values()) or 1.0
    for key, sequence in prefilling.items():
        sequence.others_s += step_s * (1.0 - costs.get(key, 0.0) / total)
