from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.pages import PageLayout

EIGHT_BILLION: dict[str, Any] = {
    "tp_size": 1,
    "page_size": 16,
    "num_layers": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
}


def test_a_page_of_an_8b_model_takes_two_mebibytes() -> None:
    layout = PageLayout(**EIGHT_BILLION)
    assert layout.page_bytes == 2 * 2**20
    assert layout.token_bytes == 128 * 2**10


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_ranks_share_the_bytes_of_a_page(tp_size: int) -> None:
    layout = PageLayout(**EIGHT_BILLION | {"tp_size": tp_size})
    assert layout.heads_per_rank == 8 // tp_size
    assert layout.page_bytes * tp_size == PageLayout(**EIGHT_BILLION).page_bytes


@given(num_tokens=st.integers(0, 10**6), exponent=st.integers(0, 8))
def test_pages_are_just_enough(num_tokens: int, exponent: int) -> None:
    layout = PageLayout(**EIGHT_BILLION | {"page_size": 2**exponent})
    num_pages = layout.num_pages(num_tokens)
    assert (num_pages - 1) * layout.page_size < max(num_tokens, 1) or num_pages == 0
    assert num_pages * layout.page_size >= num_tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 24}, "page_size must be a power of two, got 24"),
        ({"num_layers": 0}, "PageLayout.num_layers must be at least 1, got 0"),
        ({"tp_size": 3}, "8 KV heads cannot be split over 3 ranks"),
        ({"dtype": "int8"}, "dtype must be one of .*, got 'int8'"),
    ],
)
def test_impossible_layouts(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PageLayout(**EIGHT_BILLION | change)
