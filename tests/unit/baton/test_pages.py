import random
import struct
from hashlib import blake2b
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.kernels import kv_rows
from baton.messages.bounds import KEY_BYTES
from baton.pages import SCALE_BYTES, PageKeys, PageLayout
from baton.tenants import with_public, without_public

TOKENS = list(range(100, 120))


def chain(page_keys: PageKeys, token_ids: list[int], num_pages: int, salt: bytes = b"") -> list[bytes]:
    keys: list[bytes] = []
    page_keys.extend(keys, token_ids, num_pages, salt)
    return keys


def make(page_size: int = 4, model: str = "m", dtype: str = "bfloat16") -> PageKeys:
    return PageKeys(model_fingerprint=model, dtype=dtype, page_size=page_size)


def test_key_is_the_documented_hash() -> None:
    identity = blake2b(digest_size=32, person=b"baton-model")
    identity.update(struct.pack("<Q", 1) + b"m" + struct.pack("<Q", 8) + b"bfloat16")
    page_hash = blake2b(digest_size=16, key=identity.digest(), person=b"baton-page")
    page_hash.update(make().root(b"salt") + struct.pack("<4I", *TOKENS[:4]))
    assert chain(make(), TOKENS, 1, b"salt") == [page_hash.digest()]


def test_growing_a_chain_equals_hashing_it_at_once() -> None:
    page_keys, keys = make(), list[bytes]()
    for num_pages in range(6):
        page_keys.extend(keys, TOKENS, num_pages, b"x")
        assert keys == chain(make(), TOKENS, num_pages, b"x")
    assert all(len(key) == KEY_BYTES for key in keys)


def test_model_dtype_and_salt_all_separate() -> None:
    variants = [
        chain(make(), TOKENS, 1),
        chain(make(model="m2"), TOKENS, 1),
        chain(make(dtype="float16"), TOKENS, 1),
        chain(make(), TOKENS, 1, b"tenant"),
        chain(make(model="mb", dtype="float16"), TOKENS, 1),
    ]
    assert len({keys[0] for keys in variants}) == len(variants)


def test_salt_that_looks_like_a_page_is_not_one() -> None:
    page_keys = make()
    page = page_keys.root(b"") + struct.pack("<4I", *TOKENS[:4])
    assert page_keys.root(page) != chain(page_keys, TOKENS, 1)[0]


def test_random_chains_collide_exactly_when_prefixes_are_equal() -> None:
    rng, seen = random.Random(0), dict[bytes, tuple[int, ...]]()
    for _ in range(300):
        tokens = [rng.randrange(2) for _ in range(12)]
        for index, key in enumerate(chain(make(), tokens, 3)):
            prefix = tuple(tokens[: 4 * (index + 1)])
            assert seen.setdefault(key, prefix) == prefix


def test_only_public_pages_are_shared() -> None:
    page_keys, num_pages = make(), 5
    for num_public in range(21):
        one, other = (
            chain(page_keys, TOKENS, num_pages, with_public(salt, num_public)) for salt in (b"a", b"b")
        )
        num_shared = num_public // 4
        assert one[:num_shared] == other[:num_shared]
        assert not set(one[num_shared:]) & set(other[num_shared:])


def test_public_pages_are_never_private_pages() -> None:
    public = chain(make(), TOKENS, 5, with_public(b"a", 20))
    for salt in (b"a", b"", b"baton public:", with_public(b"a", 3)):
        assert not set(public) & set(chain(make(), TOKENS, 5, salt))


def test_private_pages_depend_on_the_number_of_public_pages() -> None:
    grown = list[bytes]()
    for num_pages in range(6):
        make().extend(grown, TOKENS, num_pages, with_public(b"a", 9))
    assert (
        grown
        == chain(make(), TOKENS, 5, with_public(b"a", 9))
        == chain(make(), TOKENS, 5, with_public(b"a", 11))
    )
    assert grown[2:] != chain(make(), TOKENS, 5, with_public(b"a", 12))[2:]


def test_salt_without_public_tokens_is_unchanged() -> None:
    assert with_public(b"a", 0) == b"a" == without_public(b"a") == without_public(with_public(b"a", 7))


EIGHT_BILLION: dict[str, Any] = {
    "tp_size": 1,
    "page_size": 16,
    "num_layers": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_ranks_share_the_bytes_of_a_page(tp_size: int) -> None:
    layout = PageLayout(**EIGHT_BILLION | {"tp_size": tp_size})
    assert layout.heads_per_rank == 8 // tp_size
    assert layout.page_bytes * tp_size == PageLayout(**EIGHT_BILLION).page_bytes


def test_more_ranks_than_heads_hold_copies() -> None:
    layout = PageLayout(**EIGHT_BILLION | {"tp_size": 16})
    assert [list(layout.heads_of(rank)) for rank in (0, 1, 2, 15)] == [[0], [0], [1], [7]]
    assert layout.page_bytes == PageLayout(**EIGHT_BILLION).page_bytes // 8
    assert layout.sent_token_bytes == 2 * PageLayout(**EIGHT_BILLION).sent_token_bytes


def test_rows_of_one_plane_take_half() -> None:
    both, latent = (PageLayout(**EIGHT_BILLION | {"num_planes": planes}) for planes in (2, 1))
    assert (latent.page_bytes, latent.sent_token_bytes) == (both.page_bytes // 2, both.sent_token_bytes // 2)


@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_pages_of_codes_take_little_more_than_half(cache_dtype: str, head_dim: int) -> None:
    plain = PageLayout(**EIGHT_BILLION | {"head_dim": head_dim})
    codes = PageLayout(**EIGHT_BILLION | {"head_dim": head_dim, "cache_dtype": cache_dtype})
    assert codes.page_bytes == plain.page_bytes * (head_dim + SCALE_BYTES) // (2 * head_dim)
    assert plain.page_bytes >= 1.9 * codes.page_bytes and codes.page_bytes <= 0.53 * plain.page_bytes
    assert SCALE_BYTES == kv_rows.SCALE_BYTES


@pytest.mark.parametrize("transfer_dtype", ["int8", "fp8"])
@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.51), ("float32", 0.26)])
def test_rows_that_are_sent_as_codes_stay_plain_in_pages(
    transfer_dtype: str, dtype: str, share: float
) -> None:
    plain = PageLayout(**EIGHT_BILLION | {"dtype": dtype})
    layout = PageLayout(**EIGHT_BILLION | {"dtype": dtype, "transfer_dtype": transfer_dtype})
    assert layout.page_bytes == plain.page_bytes and layout.element_type == dtype
    assert plain.sent_row_bytes == plain.row_bytes
    assert 128 < layout.sent_row_bytes <= share * layout.row_bytes


def test_keys_name_the_dtype_of_the_model_of_its_pages_and_of_transfers() -> None:
    layouts = [
        PageLayout(**EIGHT_BILLION | {"dtype": dtype, f"{where}_dtype": codes})
        for dtype in ("bfloat16", "float32")
        for where, codes in (("cache", "auto"), *product(("cache", "transfer"), ("fp8", "int8")))
    ]
    keys = [PageKeys(model_fingerprint="m", dtype=layout.kv_dtype, page_size=1) for layout in layouts]
    assert len({each.root(b"") for each in keys}) == len(layouts)


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
        ({"tp_size": 12}, "8 KV heads cannot be split over 12 ranks"),
        ({"num_planes": 3}, "num_planes must be 1 or 2, got 3"),
        ({"cache_dtype": "int4"}, "cache_dtype must be one of .*, got 'int4'"),
        ({"dtype": "int8"}, "dtype must be one of .*, got 'int8'"),
        ({"transfer_dtype": "int4"}, "transfer_dtype must be one of .*, got 'int4'"),
        (
            {"cache_dtype": "int8", "transfer_dtype": "int8"},
            "transfer_dtype must be auto for pages of int8, got 'int8'",
        ),
    ],
)
def test_impossible_layouts(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PageLayout(**EIGHT_BILLION | change)


@pytest.mark.parametrize(("num_groups", "sizes"), [(1, [7]), (2, [3, 4]), (3, [2, 2, 3]), (7, [1] * 7)])
def test_groups_of_layers_are_as_equal_as_can_be(num_groups: int, sizes: list[int]) -> None:
    layout = PageLayout(tp_size=1, page_size=16, num_layers=7, num_kv_heads=1, head_dim=8, dtype="float32")
    assert [stop - first for first, stop in layout.layer_groups(num_groups)] == sizes
