"""Bit masks over logits on the CPU. Shapes: R rows, V vocabulary, W words."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.kernels.sample import mask_logits, num_mask_words, sample_reference, sample_rows
from tests.kernels.sampling_cases import FILTERS, sampling_tensors

ANY_WORD = st.sampled_from([0, -1, 1, -(2**31), 2**31 - 1]) | st.integers(-(2**31), 2**31 - 1)


def test_reference_is_the_definition() -> None:
    logits_RV = torch.zeros(2, 40)
    mask_logits(logits_RV, torch.tensor([1]), torch.tensor([[5, 1 << 7]], dtype=torch.int32))
    assert logits_RV[1].isfinite().nonzero().flatten().tolist() == [0, 2, 39]
    assert not logits_RV[0].any()


@given(
    data=st.data(),
    vocab_size=st.integers(1, 300),
    num_rows=st.integers(1, 5),
    name=st.sampled_from(sorted(FILTERS)),
    spread=st.sampled_from((0.0, 3.0, float("inf"))),
)
def test_masked_draws_agree_with_the_reference(
    data: st.DataObject, vocab_size: int, num_rows: int, name: str, spread: float
) -> None:
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True))
    num_words = num_mask_words(vocab_size)
    words = data.draw(st.lists(ANY_WORD, min_size=len(rows) * num_words, max_size=len(rows) * num_words))
    masks_NW = torch.tensor(words, dtype=torch.int32).view(len(rows), num_words)
    generator = torch.Generator().manual_seed(vocab_size)
    logits_RV = (torch.randn(num_rows, vocab_size + 3, generator=generator) * spread)[:, :vocab_size]
    masked_RV, rows_N = logits_RV.clone(), torch.tensor(rows, dtype=torch.int64)
    mask_logits(masked_RV, rows_N, masks_NW)
    sampling = sampling_tensors(num_rows, FILTERS[name])
    tokens_R, peaks_R = torch.full((2, num_rows), -7).unbind()
    sample_rows(logits_RV, sampling, tokens_R, peaks_R, rows_N, masks_NW)
    expected_R = torch.full((num_rows,), -7)
    expected_R[rows_N] = sample_reference(masked_RV, sampling)[rows_N]
    assert torch.equal(tokens_R, expected_R)
    is_drawn_R = tokens_R >= 0
    assert torch.equal(peaks_R[is_drawn_R], masked_RV.argmax(-1)[is_drawn_R])


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 2), torch.int32), ((2, 1), torch.int32), ((1, 1), torch.int64)]
)
def test_mask_of_another_shape_is_refused(shape: tuple[int, int], dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="masks must be"):
        mask_logits(torch.zeros(1, 32), torch.tensor([0]), torch.zeros(shape, dtype=dtype))
