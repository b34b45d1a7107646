"""Bit masks over logits on the CPU. Shapes: R rows, V vocabulary, W words."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.kernels.sample import mask_logits, mask_logits_reference, num_mask_words

ANY_WORD = st.sampled_from([0, -1, 1, -(2**31), 2**31 - 1]) | st.integers(-(2**31), 2**31 - 1)


def test_reference_is_the_definition() -> None:
    logits_RV = torch.zeros(2, 40)
    mask_logits_reference(logits_RV, torch.tensor([1]), torch.tensor([[5, 1 << 7]], dtype=torch.int32))
    assert logits_RV[1].isfinite().nonzero().flatten().tolist() == [0, 2, 39]
    assert not logits_RV[0].any()


@given(data=st.data(), vocab_size=st.integers(1, 100), num_rows=st.integers(1, 5))
def test_native_kernel_agrees_with_the_reference(data: st.DataObject, vocab_size: int, num_rows: int) -> None:
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True))
    num_words = num_mask_words(vocab_size)
    words = data.draw(st.lists(ANY_WORD, min_size=len(rows) * num_words, max_size=len(rows) * num_words))
    masks_NW = torch.tensor(words, dtype=torch.int32).view(len(rows), num_words)
    logits_RV = torch.randn(num_rows, vocab_size + 3)[:, :vocab_size]
    expected_RV = logits_RV.clone()
    rows_N = torch.tensor(rows, dtype=torch.int64)
    mask_logits_reference(expected_RV, rows_N, masks_NW)
    mask_logits(logits_RV, rows_N, masks_NW)
    assert torch.equal(logits_RV, expected_RV)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 2), torch.int32), ((2, 1), torch.int32), ((1, 1), torch.int64)]
)
def test_mask_of_another_shape_is_refused(shape: tuple[int, int], dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="masks must be"):
        mask_logits(torch.zeros(1, 32), torch.tensor([0]), torch.zeros(shape, dtype=dtype))
