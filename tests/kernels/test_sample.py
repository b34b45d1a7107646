"""Sampling on the CPU: which tokens may be drawn, and how often each of them is."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton.kernels.sample import NOT_A_TOKEN, SamplingTensors, kept_reference, sample, sample_reference
from tests.kernels.outcomes import normal
from tests.kernels.sampling_cases import FILTERS, Filters, awkward_logits, sampling_tensors

CPU = torch.device("cpu")
Sample = Callable[[Tensor, SamplingTensors], Tensor]
samplers = pytest.mark.parametrize("draw", [sample, sample_reference])


def kept_tokens(logits: list[float], filters: Filters) -> set[int]:
    """From the definition, in float64, by sorting."""
    descending = sorted(logits, reverse=True)
    if 0 < filters.top_k < len(logits):
        descending = [logit for logit in descending if logit >= descending[filters.top_k - 1]]
    peak = descending[0]
    mass = [math.exp((logit - peak) / filters.temperature) for logit in descending]
    threshold = descending[-1]
    if filters.top_p < 1:
        above = (sum(mass[: rank + 1]) >= filters.top_p * sum(mass) for rank in range(len(mass)))
        threshold = next(logit for logit, enough in zip(descending, above, strict=True) if enough)
    return {
        token
        for token, logit in enumerate(logits)
        if logit >= threshold and math.exp((logit - peak) / filters.temperature) >= filters.min_p
    }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", [name for name in FILTERS if name not in ("greedy", "cold")])
def test_kept_set_is_the_sorted_one(name: str, tied: bool) -> None:
    logits = normal(40, 53, dtype=torch.float32, device=CPU) * 2
    logits = logits.round() if tied else logits
    _, kept = kept_reference(logits, sampling_tensors(40, FILTERS[name]))
    for row, expected in zip(kept, logits.tolist(), strict=True):
        assert set(row.nonzero()[:, 0].tolist()) == kept_tokens(expected, FILTERS[name])


@samplers
@pytest.mark.parametrize("name", ["plain", "hot", "top_k", "top_p", "min_p", "all"])
def test_frequencies_are_the_softmax_over_the_kept_set(draw: Sample, name: str) -> None:
    filters, num_draws, vocab_size = FILTERS[name], 20_000, 30
    logits = normal(1, vocab_size, dtype=torch.float32, device=CPU) * 2
    sampling = replace(
        sampling_tensors(num_draws, filters),
        seed_B=torch.full((num_draws,), 1234, dtype=torch.int64),
        choice_B=torch.zeros(num_draws, dtype=torch.int32),
        position_B=torch.arange(num_draws),
    )
    counts = torch.bincount(draw(logits.expand(num_draws, -1), sampling), minlength=vocab_size).double()
    kept = kept_tokens(logits[0].tolist(), filters)
    outside = [token for token in range(vocab_size) if token not in kept]
    assert counts[outside].sum() == 0
    likely = (logits[0].double() / filters.temperature).index_fill(0, torch.tensor(outside).long(), -math.inf)
    expected = torch.softmax(likely, dim=0) * num_draws
    frequent = expected >= 5
    chi_square = ((counts - expected).square() / expected)[frequent].sum()
    degrees = int(frequent.sum()) - 1
    # Wilson and Hilferty's normal approximation, at five standard deviations.
    bound = degrees * (1 - 2 / (9 * degrees) + 5 * math.sqrt(2 / (9 * degrees))) ** 3
    assert chi_square < bound


@samplers
def test_greedy_takes_the_lowest_of_the_largest(draw: Sample) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-5.0, -5.0, -5.0, -5.0]])
    assert draw(logits, sampling_tensors(2, FILTERS["greedy"])).tolist() == [1, 0]


@samplers
def test_every_row_is_drawn_by_its_own_settings(draw: Sample) -> None:
    logits = normal(3, 50, dtype=torch.float32, device=CPU)
    mixed = replace(
        sampling_tensors(3, Filters(temperature=0.9)),
        top_k_B=torch.tensor([0, 4, -1], dtype=torch.int32),
        temperature_B=torch.tensor([1.5, 0.5, 0.0]),
    )
    together = draw(logits, mixed)
    for row in range(3):
        alone = SamplingTensors(
            *(getattr(mixed, name)[row : row + 1] for name in SamplingTensors.__dataclass_fields__)
        )
        assert together[row] == draw(logits[row : row + 1], alone)[0]


@samplers
def test_a_draw_depends_on_seed_choice_and_position_alone(draw: Sample) -> None:
    logits = torch.zeros(200, 997)  # flat, so that equal draws are no accident
    same = sampling_tensors(200, Filters())
    assert torch.equal(draw(logits, same), draw(logits, same))
    for change in (
        replace(same, seed_B=same.seed_B + 1),
        replace(same, seed_B=same.seed_B + 2**32),
        replace(same, choice_B=same.choice_B + 1),
        replace(same, position_B=same.position_B + 1),
        replace(same, position_B=same.position_B + 2**32),
    ):
        assert (draw(logits, same) == draw(logits, change)).sum() < 10


@samplers
def test_impossible_tokens_are_never_drawn(draw: Sample) -> None:
    logits = awkward_logits(61, CPU)
    for filters in FILTERS.values():
        tokens = draw(logits, sampling_tensors(8, filters))
        assert tokens[:6].min() >= 0 and tokens.max() < 61
        assert tokens[3] < 61 // 3  # beyond lie only -inf
        assert tokens[5] == 61 // 2  # the infinite logit


@samplers
@pytest.mark.parametrize("vocab_size", [1, 16, 35])
def test_row_with_nan_gives_no_token_and_other_rows_theirs(draw: Sample, vocab_size: int) -> None:
    logits = normal(vocab_size + 1, vocab_size, dtype=torch.float32, device=CPU)
    logits[torch.arange(vocab_size), torch.arange(vocab_size)] = math.nan  # each place once
    for filters in FILTERS.values():
        sampling = sampling_tensors(vocab_size + 1, filters)
        *bad, good = draw(logits, sampling).tolist()
        assert bad == [NOT_A_TOKEN] * vocab_size
        assert good == draw(logits.nan_to_num(), sampling).tolist()[-1]


@samplers
def test_no_rows_give_no_tokens(draw: Sample) -> None:
    tokens = draw(torch.empty(0, 7), sampling_tensors(0, Filters()))
    assert tokens.shape == (0,) and tokens.dtype == torch.int64
