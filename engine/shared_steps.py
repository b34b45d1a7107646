"""Whose a step's time was, where several prompts are computed in turns or together.

A prompt's time from its first step to its first token says little of what it takes: others may have come
first meanwhile. Whoever predicts from it would count those twice, as work that takes long and as a wait.
"""

from collections.abc import Callable

from baton.engine.plan import Batch


def share_step(batch: Batch, step_s: float, cost: Callable[[int, int], float]) -> None:
    """Add to `own_s` of each prompt in the batch its part of the time, by what its tokens cost. Decodes ride
    along, and have none; a batch of single tokens is a step of decodes, whoever is in it.

    cost: of so many tokens from a start on (ease.py).
    """
    if batch.num_decodes == len(batch.chunks):
        return
    prompts = [each for each in batch.chunks if each.num_tokens > 1 or not each.sequence.num_generated_tokens]
    costs = [cost(each.start, each.num_tokens) for each in prompts]
    total = sum(costs)
    for each, own in zip(prompts, costs, strict=True):
        each.sequence.own_s += step_s * own / total
