"""New keys and values into their pages, on the CPU. Shapes: T tokens, K kv heads, D head dim."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.kernels.kv_rows import LARGEST_CODE, SCALE_BYTES, SMALLEST_SCALE, decode_rows
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("store", [store_kv, store_kv_reference])
def test_row_of_one_plane_is_the_value_and_the_rest_of_the_key(dtype: torch.dtype, store: object) -> None:
    key, value = (normal(3, 2, width, dtype=dtype, device=CPU) for width in (6, 10))
    pool = torch.full((NUM_PAGES, NUM_LAYERS, 1, 2, 4, 16), math.nan, dtype=dtype)
    expected = pool.clone()
    expected[4, 1, 0, :, 3], expected[0, 1, 0, :, 0] = (torch.cat((value[i], key[i]), dim=1) for i in (0, 2))
    assert callable(store)
    store(key, value, pool[:, 1], torch.tensor([19, -1, 0]))
    assert torch.equal(pool.view(torch.uint8), expected.view(torch.uint8))


codes = pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=str)


@codes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [2, 16, 40, 128])
def test_codes_are_those_of_the_reference_however_many_tokens_come_at_a_time(
    codes: torch.dtype, dtype: torch.dtype, head_dim: int
) -> None:
    key, value = normal(40, 4, head_dim, dtype=dtype, device=CPU).chunk(2, dim=1)
    key[3], key[4, 1, 0], key[5], value[6] = 0.0, 1e4, key[5] * 1e-5, value[6] * 1e5
    key[7, 0, 1], value[8, 1, 0], value[9, 0, 1] = math.nan, math.inf, -math.inf
    key[10], value[11], key[12], value[13] = key[10] * 1e-36, value[11] * 1e-37, key[12] * 1e-38, -0.0
    expected = torch.zeros(4, 2, 2, 16, head_dim + SCALE_BYTES, dtype=codes)
    store_kv_reference(key, value, expected, torch.arange(40))
    got = torch.zeros_like(expected)
    for first, stop in ((0, 1), (1, 18), (18, 40)):
        store_kv(key[first:stop], value[first:stop], got, torch.arange(first, stop))
    decoded, exact = decode_rows(got, torch.float32), decode_rows(expected, torch.float32)
    torch.testing.assert_close(decoded, exact, rtol=0, atol=0, equal_nan=True)
    is_finite = ~exact.isnan().any(dim=-1)
    assert torch.equal(got.view(torch.uint8)[is_finite], expected.view(torch.uint8)[is_finite])
    bad = [7, 8, 9]  # NaN as a whole, not wrong
    assert exact[0, 0, 0, bad[0]].isnan().all() and exact[0, 1, 1, bad[1]].isnan().all()
    assert (~is_finite).sum() == len(bad)


@codes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("store", [store_kv, store_kv_reference])
def test_largest_element_of_tiny_rows_is_not_above_the_largest_code(
    codes: torch.dtype, dtype: torch.dtype, store: object
) -> None:
    factor = torch.cat((torch.linspace(0.25, 4, 1000), torch.tensor([1.4 / 128, 1.49 / 128])))
    largest = factor * LARGEST_CODE[codes] * SMALLEST_SCALE  # 1.4 / 128: of subnormal floats
    heads = largest[:, None, None].to(dtype) * torch.tensor([1.0, -1.0, 0.5, -0.0])
    heads = heads.to(dtype)
    pages = torch.zeros(1, 2, 1, len(heads), heads.shape[2] + SCALE_BYTES, dtype=codes)
    assert callable(store)
    store(heads, heads, pages, torch.arange(len(heads)))
    got, exact = decode_rows(pages[0, 0, 0], torch.float32).double(), heads[:, 0].double()
    quotient = heads[:, 0, :1].float() / LARGEST_CODE[codes]
    assert bool(((got - exact).abs() <= exact.abs() / 16).where(quotient >= SMALLEST_SCALE, got == 0).all())
    assert bool((quotient >= SMALLEST_SCALE).any())


def test_arguments_that_do_not_fit_are_refused() -> None:
    key, pages, slots = torch.zeros(2, 2, 8), torch.zeros(4, 2, 2, 16, 8), torch.tensor([0, 1])
    for wrong in (slots.int(), torch.zeros(4, dtype=torch.int64)[::2]):
        with pytest.raises(ValueError, match=r"slots must be contiguous int64 \[2\]"):
            store_kv(key, key, pages, wrong)
    for value, kv_pages in ((key, pages[:, :, :1]), (key[:, :1], pages), (key, pages[:, :1, :1])):
        with pytest.raises(ValueError, match="kv_pages"):
            store_kv(key, value, kv_pages, slots)
    with pytest.raises(ValueError, match="keys of 8 and values of 4 elements need pages of one plane"):
        store_kv(key, key[..., :4].contiguous(), pages, slots)
    with pytest.raises(ValueError, match="pages of one plane hold no codes"):
        store_kv(key, key, pages[:, :1].to(torch.int8), slots)
    for kv_pages in (pages.to(torch.int8), pages[..., :6].bfloat16(), pages.bfloat16()):
        with pytest.raises(ValueError, match=r"do not take heads of torch.float32 and 8 elements"):
            store_kv(key, key, kv_pages.contiguous(), slots)
