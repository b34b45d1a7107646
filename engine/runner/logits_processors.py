"""Changes of the logits before a token is drawn: the sampling parameters that are not part of the draw
itself.

Shapes: V vocabulary.
"""

from typing import Final, Protocol

import torch
from torch import Tensor

from baton.engine.scheduler.sequence import Sequence
from baton.request import SamplingParams


class LogitsProcessor(Protocol):
    """One sampling parameter, or several that belong together."""

    def applies(self, sampling: SamplingParams) -> bool:
        """Whether these parameters change any logits. A step without such sequences is faster."""

    def process(self, logits_V: Tensor, sequence: Sequence) -> None:
        """Change the fp32 logits of the sequence's next token in place.

        Must be a function of the logits, the sampling parameters and the tokens of the sequence: a replayed
        stream continues with the same tokens only then.
        """


class LogitBias:
    """Adds `logit_bias`."""

    def applies(self, sampling: SamplingParams) -> bool:
        return bool(sampling.logit_bias)

    def process(self, logits_V: Tensor, sequence: Sequence) -> None:
        bias = sequence.sampling.logit_bias
        ids = torch.tensor(list(bias), device=logits_V.device)
        logits_V[ids] += torch.tensor(list(bias.values()), device=logits_V.device)


class MinTokens:
    """Bans stop tokens until the answer has `min_tokens` tokens."""

    def applies(self, sampling: SamplingParams) -> bool:
        return bool(sampling.min_tokens)

    def process(self, logits_V: Tensor, sequence: Sequence) -> None:
        if len(sequence.token_ids) < sequence.min_num_tokens and sequence.stop_ids:
            logits_V[torch.tensor(list(sequence.stop_ids), device=logits_V.device)] = float("-inf")


class Penalties:
    """Repetition, then frequency and presence penalties.

    Repetition counts tokens of prompt and answer, frequency and presence of the answer alone.
    """

    def applies(self, sampling: SamplingParams) -> bool:
        return sampling.has_penalties

    def process(self, logits_V: Tensor, sequence: Sequence) -> None:
        sampling = sequence.sampling
        token_ids = torch.tensor(sequence.token_ids, device=logits_V.device)
        if sampling.repetition_penalty != 1.0:
            seen = token_ids.unique()
            logits = logits_V[seen]
            penalty = sampling.repetition_penalty
            logits_V[seen] = torch.where(logits > 0, logits / penalty, logits * penalty)
        generated, counts = token_ids[sequence.num_prompt_tokens :].unique(return_counts=True)
        logits_V[generated] -= sampling.frequency_penalty * counts + sampling.presence_penalty


# name -> processor; they run in this order, which is vLLM's
LOGITS_PROCESSORS: Final[dict[str, LogitsProcessor]] = {
    "logit_bias": LogitBias(),
    "min_tokens": MinTokens(),
    "penalties": Penalties(),
}
