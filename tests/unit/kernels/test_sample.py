"""Sampling by the C kernel draws the very tokens of the reference. Shapes: B rows, V vocabulary."""

import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels.sample import SamplingTensors, sample, sample_reference
from tests.kernels.outcomes import normal
from tests.kernels.sampling_cases import FILTERS, Filters, awkward_logits, sampling_tensors

CPU = torch.device("cpu")
filters = st.builds(
    Filters,
    temperature=st.sampled_from((0.0, 1e-6, 0.3, 1.0, 2.5)),
    top_k=st.sampled_from((-1, 0, 1, 2, 5, 40, 1000)),
    top_p=st.sampled_from((1e-7, 0.1, 0.5, 0.93, 1.0)),
    min_p=st.sampled_from((0.0, 0.07, 0.6, 1.0)),
)


def logits_of(num_rows: int, vocab_size: int, spread: float, tied: bool) -> Tensor:
    logits = normal(num_rows, vocab_size, dtype=torch.float32, device=CPU) * spread
    return logits.round() if tied else logits


@given(
    num_rows=st.integers(0, 6),
    vocab_size=st.integers(2, 150),
    spread=st.sampled_from((0.0, 1.0, 3.0, 20.0)),
    tied=st.booleans(),
    settings=filters,
)
def test_tokens_equal_those_of_the_reference(
    num_rows: int, vocab_size: int, spread: float, tied: bool, settings: Filters
) -> None:
    logits = logits_of(num_rows, vocab_size, spread, tied)
    sampling = sampling_tensors(num_rows, settings)
    before = logits.clone()
    drawn = sample(logits, sampling)
    assert drawn.tolist() == sample_reference(logits, sampling).tolist()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("name", FILTERS)
def test_infinities_and_ties_are_drawn_as_by_the_reference(name: str) -> None:
    for vocab_size in (16, 61, 333):
        logits = awkward_logits(vocab_size, CPU)
        sampling = sampling_tensors(len(logits), FILTERS[name])
        assert sample(logits, sampling).tolist() == sample_reference(logits, sampling).tolist()


@pytest.mark.parametrize("settings", [Filters(top_k=2), Filters(top_p=0.7), Filters(min_p=0.3)])
def test_minus_zero_ties_with_zero(settings: Filters) -> None:
    logits = torch.tensor([0.5, *(-0.0, 0.0) * 9, *[-9.0] * 4]).repeat(400, 1)
    tokens = sample(logits, sampling_tensors(400, settings))
    assert tokens.tolist() == sample_reference(logits, sampling_tensors(400, settings)).tolist()
    assert set(tokens.tolist()) == set(range(19))


def test_rows_may_be_strided() -> None:
    logits, sampling = logits_of(7, 130, 2.0, tied=False), sampling_tensors(7, FILTERS["all"])
    assert torch.equal(sample(logits[:, :97], sampling), sample(logits[:, :97].contiguous(), sampling))


def test_a_row_draws_the_same_in_any_company() -> None:
    logits, sampling = logits_of(64, 203, 2.0, tied=True), sampling_tensors(64, FILTERS["all"])
    alone = [
        sample(
            logits[row : row + 1],
            SamplingTensors(
                *(getattr(sampling, name)[row : row + 1] for name in SamplingTensors.__dataclass_fields__)
            ),
        )
        for row in range(64)
    ]
    assert torch.equal(sample(logits, sampling), torch.cat(alone))


def test_a_draw_in_another_thread_is_the_same() -> None:
    logits, sampling = logits_of(64, 203, 2.0, tied=False), sampling_tensors(64, FILTERS["top_p"])
    drawn: list[Tensor] = []
    thread = threading.Thread(target=lambda: drawn.append(sample(logits, sampling)))
    thread.start()
    thread.join()
    assert torch.equal(drawn[0], sample(logits, sampling))


def test_a_single_token_and_a_flat_row_need_no_luck() -> None:
    assert sample(torch.zeros(3, 1), sampling_tensors(3, Filters())).tolist() == [0, 0, 0]
    flat = torch.full((3, 5), -math.inf)
    assert all(0 <= token < 5 for token in sample(flat, sampling_tensors(3, Filters())).tolist())
