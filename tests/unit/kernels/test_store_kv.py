"""New keys and values into their pages, on the CPU. Shapes: T tokens, K kv heads, D head dim."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.kernels.store_kv import store_kv, store_kv_reference
from tests.kernels.outcomes import DTYPES, normal

CPU = torch.device("cpu")
NUM_PAGES, NUM_LAYERS = 5, 3


@given(
    page_size=st.sampled_from((1, 4, 16, 64)),
    num_kv_heads=st.integers(1, 4),
    head_dim=st.integers(1, 33),
    dtype=st.sampled_from(DTYPES),
    store=st.sampled_from((store_kv, store_kv_reference)),
    data=st.data(),
)
def test_named_slots_of_one_layer_are_written_and_no_others(
    page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, store: object, data: st.DataObject
) -> None:
    distinct = st.lists(st.integers(0, NUM_PAGES * page_size - 1), max_size=8, unique=True)
    slots = data.draw(distinct.flatmap(lambda kept: st.permutations([*kept, -1, -1])))
    heads = normal(len(slots), 2 * num_kv_heads + 3, head_dim, dtype=dtype, device=CPU)
    key, value = heads[:, 3:].chunk(2, dim=1)
    shape = (NUM_PAGES, NUM_LAYERS, 2, num_kv_heads, page_size, head_dim)
    pool = torch.full(shape, math.nan, dtype=dtype)
    expected = pool.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // page_size, 1, 0, :, slot % page_size] = key[token]
            expected[slot // page_size, 1, 1, :, slot % page_size] = value[token]
    assert callable(store)
    store(key, value, pool[:, 1], torch.tensor(slots))
    assert torch.equal(pool.view(torch.uint8), expected.view(torch.uint8))  # NaN equals itself


def test_arguments_that_do_not_fit_are_refused() -> None:
    key, pages, slots = torch.zeros(2, 2, 8), torch.zeros(4, 2, 2, 16, 8), torch.tensor([0, 1])
    for wrong in (slots.int(), torch.zeros(4, dtype=torch.int64)[::2]):
        with pytest.raises(ValueError, match=r"slots must be contiguous int64 \[2\]"):
            store_kv(key, key, pages, wrong)
    for value, kv_pages in ((key, pages[:, :, :1]), (key[:, :1], pages)):
        with pytest.raises(ValueError, match="kv_pages"):
            store_kv(key, value, kv_pages, slots)
