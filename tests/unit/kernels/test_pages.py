"""Copies of whole pages on the CPU; pages and runs of a pool as rows of codes, and back.

Shapes: N runs, R rows of a run or page, D elements of a row.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels.kv_rows import decode_rows, encode_rows
from baton.kernels.pages import CodedRows, copy_pages, decode_pages, decode_runs, encode_pages, encode_runs
from tests.kernels.outcomes import DTYPES, normal

CPU = torch.device("cpu")
CODES = (torch.int8, torch.float8_e4m3fn)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8], ids=str)
@pytest.mark.parametrize("page_ids", [(4, 0, 2), (), (3,)], ids=str)
def test_pages_go_from_pool_to_pool_and_through_staging(
    dtype: torch.dtype, page_ids: tuple[int, ...]
) -> None:
    source, ids = torch.arange(5 * 3 * 14).view(5, 3, 2, 7).to(dtype), torch.tensor(page_ids).long()
    direct, staged = (torch.ones(6, 2, 7, dtype=dtype) for _ in range(2))
    expected = direct.clone()
    for page in page_ids:
        expected[5 - page] = source[page, 1]
    copy_pages(source[:, 1], ids, direct, 5 - ids)
    staging, again = (torch.zeros(len(page_ids), 2, 7, dtype=dtype) for _ in range(2))
    copy_pages(source[:, 1], ids, staging, None)
    copy_pages(staging, None, again, None)
    copy_pages(again, None, staged, 5 - ids)
    assert torch.equal(direct, expected) and torch.equal(staged, expected)


@given(
    dtype=st.sampled_from(DTYPES),
    codes=st.sampled_from(CODES),
    head_dim=st.integers(1, 40),
    rows_per_run=st.integers(1, 5),
    numbers=st.permutations(range(6)),
)
def test_runs_have_the_codes_of_their_rows_and_become_what_these_stand_for(
    dtype: torch.dtype, codes: torch.dtype, head_dim: int, rows_per_run: int, numbers: list[int]
) -> None:
    rows = CodedRows(head_dim, dtype, codes)
    run_bytes = rows_per_run * rows.plain_bytes
    pool = normal(8, rows_per_run, head_dim, dtype=dtype, device=CPU)
    pool[numbers[0], 0] = 0.0
    offset_N = np.array(numbers[:4], dtype=np.int64) * run_bytes
    packed = torch.zeros(4 * rows_per_run * rows.coded_bytes, dtype=torch.uint8)
    encode_runs(pool, offset_N, run_bytes, rows, packed)
    assert torch.equal(packed, encode_rows(pool[numbers[:4]], codes).view(-1))

    got = pool.new_full(pool.shape, -1.0)
    expected = got.clone()
    expected[numbers[:4]] = decode_rows(encode_rows(pool[numbers[:4]], codes).view(codes), dtype)
    decode_runs(got, offset_N, run_bytes, rows, packed)
    assert torch.equal(bytes_of(got), bytes_of(expected))


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_have_the_same_codes_as_their_runs(codes: torch.dtype, dtype: torch.dtype) -> None:
    pages, ids = normal(5, 6, 8, dtype=dtype, device=CPU), torch.tensor([4, 0, 3])
    packed = torch.zeros(3, 6, 10, dtype=torch.uint8)
    encode_pages(pages, ids, codes, packed)
    assert torch.equal(packed, encode_rows(pages[ids], codes))
    got = torch.zeros_like(pages)
    decode_pages(got, 4 - ids, codes, packed)
    assert torch.equal(got[4 - ids], decode_rows(packed.view(codes), dtype)) and not got[[2, 3]].any()


ROWS = CodedRows(4, torch.float32, torch.int8)


@pytest.mark.parametrize(
    ("offsets", "run_bytes", "num_bytes", "complaint"),
    [
        ([0, 80], 32, 24, "are not within 96 bytes"),
        ([-16], 16, 6, "are not within 96 bytes"),
        ([0], 24, 6, "in rows of 16, have codes of 6 bytes, got .* \\(6,\\)"),
        ([0], 32, 11, "have codes of 12 bytes, got .* \\(11,\\)"),
    ],
)
def test_runs_and_codes_that_do_not_fit_are_refused(
    offsets: list[int], run_bytes: int, num_bytes: int, complaint: str
) -> None:
    pool, packed = torch.zeros(6, 4), torch.zeros(num_bytes, dtype=torch.uint8)
    offset_N = np.array(offsets, dtype=np.int64)
    with pytest.raises(ValueError, match=complaint):
        encode_runs(pool, offset_N, run_bytes, ROWS, packed)
    with pytest.raises(ValueError, match=complaint):
        decode_runs(pool, offset_N, run_bytes, ROWS, packed)


def test_pages_and_codes_that_do_not_fit_are_refused() -> None:
    pages, ids, packed = torch.zeros(5, 6, 8), torch.tensor([1, 2]), torch.zeros(2, 6, 10, dtype=torch.uint8)
    for complaint, arguments in {
        r"D even, got \(5, 6, 7\)": (torch.zeros(5, 6, 7), ids, torch.int8, packed),
        "as torch.int16": (pages, ids, torch.int16, packed),
        "page ids must be": (pages, ids.int(), torch.int8, packed),
        r"uint8 \(2, 6, 10\), got": (pages, ids, torch.int8, packed[:1]),
    }.items():
        with pytest.raises(ValueError, match=complaint):
            encode_pages(*arguments)
