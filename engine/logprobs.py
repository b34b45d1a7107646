"""Log probabilities of tokens, from the logits as the model gives them (no temperature, no penalties).

Shapes: R rows, V vocabulary, N alternatives.
"""

from collections.abc import Sequence as Ordered
from typing import Final

import torch
from torch import Tensor

from baton.request import TokenLogprobs

ROWS_AT_ONCE: Final = 256  # bounds the fp32 copies of [R, V] that a long prompt would make


def token_logprobs(logits_RV: Tensor, token_ids: Ordered[int], num_top: int) -> list[TokenLogprobs]:
    """Of the chosen token of each row: its log probability, its rank, and the `num_top` likeliest tokens."""
    results: list[TokenLogprobs] = []
    for first in range(0, len(token_ids), ROWS_AT_ONCE):
        last = first + ROWS_AT_ONCE
        results += _rows_logprobs(logits_RV[first:last], token_ids[first:last], num_top)
    return results


def _rows_logprobs(logits_RV: Tensor, token_ids: Ordered[int], num_top: int) -> list[TokenLogprobs]:
    logprobs_RV = logits_RV.log_softmax(-1)
    chosen_R1 = torch.tensor(token_ids, device=logits_RV.device)[:, None]
    chosen_logprob_R1 = logprobs_RV.gather(1, chosen_R1)
    rank_R = (logprobs_RV > chosen_logprob_R1).sum(-1) + 1
    top = logprobs_RV.topk(min(num_top, logprobs_RV.shape[1]), dim=-1)
    return [
        TokenLogprobs(token_id=token_id, logprob=logprob, rank=rank, top=tuple(zip(ids, values, strict=True)))
        for token_id, logprob, rank, ids, values in zip(
            token_ids,
            chosen_logprob_R1[:, 0].tolist(),
            rank_R.tolist(),
            top.indices.tolist(),
            top.values.tolist(),
            strict=True,
        )
    ]
