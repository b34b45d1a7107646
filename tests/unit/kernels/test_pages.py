"""Copies of whole pages on the CPU."""

import pytest
import torch

from baton.kernels.pages import copy_pages
from tests.kernels.outcomes import DTYPES


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
