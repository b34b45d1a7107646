"""Rows of logits with ties, infinities and every mix of filters. Shapes: B rows, V vocabulary."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from baton.kernels.sample import SamplingTensors, sample_reference, sample_triton
from tests.kernels.outcomes import Outcome, normal


@dataclass(frozen=True, kw_only=True)
class Filters:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


ALL = Filters(temperature=0.7, top_k=20, top_p=0.8, min_p=0.02)
FILTERS = {
    "greedy": Filters(temperature=0.0, top_k=3, top_p=0.5),
    "plain": Filters(),
    "cold": Filters(temperature=1e-40),
    "hot": Filters(temperature=50.0),
    "top_k": Filters(top_k=5),
    "top_k_1": Filters(top_k=1),
    "top_k_beyond_vocabulary": Filters(top_k=10_000),
    "top_p": Filters(top_p=0.6),
    "top_p_tiny": Filters(top_p=1e-6),
    "min_p": Filters(min_p=0.2),
    "min_p_1": Filters(min_p=1.0),
    "all": ALL,
}


def sampling_tensors(num_rows: int, filters: Filters, device: torch.device | None = None) -> SamplingTensors:
    """The same filters on every row; seeds, choices and positions differ."""
    row = torch.arange(num_rows, device=device)
    return SamplingTensors(
        temperature_B=torch.full((num_rows,), filters.temperature, device=device),
        top_k_B=torch.full((num_rows,), filters.top_k, dtype=torch.int32, device=device),
        top_p_B=torch.full((num_rows,), filters.top_p, device=device),
        min_p_B=torch.full((num_rows,), filters.min_p, device=device),
        seed_B=row * 0x1234567890AB + 2**62,
        choice_B=(row % 3).to(torch.int32),
        position_B=row * 2**31 + 7,
    )


def awkward_logits(vocab_size: int, device: torch.device) -> Tensor:
    """[8, V]: smooth, tied, all equal, mostly impossible, wholly impossible, one infinite logit, the last
    one no number, none a number."""
    logits = normal(8, vocab_size + 3, dtype=torch.float32, device=device)[:, :vocab_size] * 2
    logits[1] = logits[1].round()
    logits[2] = -0.0
    logits[2, ::2] = 0.0
    logits[3, vocab_size // 3 :] = -math.inf
    logits[4] = -math.inf
    logits[5, vocab_size // 2] = math.inf
    logits[6, -1] = math.nan
    logits[7] = -math.nan
    return logits


def sampling_outcome(vocab_size: int, filters: Filters, device: torch.device) -> Outcome:
    logits = awkward_logits(vocab_size, device)
    sampling = sampling_tensors(len(logits), filters, device)
    return Outcome(sample_triton(logits, sampling), sample_reference(logits, sampling), exact=True)


def mixed_outcome(logits: Tensor, settings: list[Filters]) -> Outcome:
    """Each row has its own filters, and the flags say which of them occur."""
    one = sampling_tensors(len(settings), Filters(), logits.device)

    def column(name: str, like: Tensor) -> Tensor:
        return torch.tensor([getattr(each, name) for each in settings], dtype=like.dtype, device=like.device)

    sampling = replace(
        one,
        temperature_B=column("temperature", one.temperature_B),
        top_k_B=column("top_k", one.top_k_B),
        top_p_B=column("top_p", one.top_p_B),
        min_p_B=column("min_p", one.min_p_B),
        has_random=any(each.temperature > 0 for each in settings),
        has_top_k=any(each.top_k > 0 for each in settings),
        has_top_p=any(each.top_p < 1 for each in settings),
    )
    return Outcome(sample_triton(logits, sampling), sample_reference(logits, sampling), exact=True)


def flagged_outcome(settings: list[Filters], device: torch.device) -> Outcome:
    return mixed_outcome(awkward_logits(4099, device), settings)


def no_rows(device: torch.device) -> Outcome:
    logits, sampling = torch.empty(0, 5, device=device), sampling_tensors(0, ALL, device)
    return Outcome(sample_triton(logits, sampling), sample_reference(logits, sampling), exact=True)


def sampling_cases() -> Iterator[tuple[str, Callable[[torch.device], Outcome]]]:
    for name, filters in FILTERS.items():
        yield f"sample-{name}", partial(sampling_outcome, 61, filters)
    for vocab_size in (1, 2, 4, 4099):
        yield f"sample-vocabulary{vocab_size}", partial(sampling_outcome, vocab_size, ALL)
    yield "sample-no_rows", no_rows
    for name in ("greedy", "plain", "top_k", "top_p", "all"):
        settings = [FILTERS[name], FILTERS["greedy"]] * 4
        yield f"sample-flags-{name}", partial(flagged_outcome, settings)
