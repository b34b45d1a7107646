"""The table lookup of the CPU. Shapes: T tokens, V rows, E hidden."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.kernels.embedding import embedding, embedding_reference


@given(
    num_tokens=st.integers(0, 300),
    num_rows=st.integers(1, 40),
    width=st.integers(1, 700),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    data=st.data(),
)
def test_each_token_gets_its_row(
    num_tokens: int, num_rows: int, width: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=num_tokens, max_size=num_tokens))
    token_ids_T = torch.tensor(ids, dtype=torch.int64)
    table_VE = torch.randn(num_rows, width).to(dtype)
    found_TE = embedding(token_ids_T, table_VE)
    assert torch.equal(found_TE, embedding_reference(token_ids_T, table_VE))


def test_the_rows_are_a_copy() -> None:
    table_VE = torch.zeros(3, 8)
    embedding(torch.tensor([1]), table_VE).add_(1)
    assert not table_VE.any()


def test_a_strided_table_is_taken_too() -> None:
    table_VE = torch.randn(5, 20)[:, ::2]
    token_ids_T = torch.tensor([4, 0, 4])
    assert torch.equal(embedding(token_ids_T, table_VE), table_VE[token_ids_T])


def test_other_shapes_and_types_are_refused() -> None:
    table_VE = torch.zeros(3, 8)
    for token_ids in (torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="embedding takes int64 ids"):
            embedding(token_ids, table_VE)
