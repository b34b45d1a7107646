"""The CPU paths of the ops on rows and pages, from their definitions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from baton.kernels.pages import (
    copy_pages,
    gather_pages,
    gather_pages_reference,
    scatter_pages,
    scatter_pages_reference,
)
from baton.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from baton.kernels.rope import rope, rope_reference
from baton.kernels.silu_mul import silu_mul, silu_mul_reference
from baton.kernels.store_kv import store_kv, store_kv_reference
from tests.kernels.outcomes import DTYPES, normal

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
Move = Callable[[Tensor, Tensor, Tensor], None]

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
normalisers = pytest.mark.parametrize("normalise", [rms_norm, rms_norm_reference])
adders = pytest.mark.parametrize("add_and_normalise", [add_rms_norm, add_rms_norm_reference])
rotations = pytest.mark.parametrize("rotate", [rope, rope_reference])
gates = pytest.mark.parametrize("gate", [silu_mul, silu_mul_reference])
stores = pytest.mark.parametrize("store", [store_kv, store_kv_reference])
moves = pytest.mark.parametrize(
    ("gather", "scatter"),
    [(gather_pages, scatter_pages), (gather_pages_reference, scatter_pages_reference)],
)


def close(got: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.double(), expected.double(), atol=tolerance, rtol=tolerance)


def definition(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean_square = x.double().square().mean(-1, keepdim=True)
    return x.double() / (mean_square + eps).sqrt() * weight.double()


@normalisers
@dtypes
@pytest.mark.parametrize("shape", [(3, 40), (0, 8), (1, 1), (2, 5, 24)], ids=str)
def test_rms_norm(normalise: Callable[..., Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = normal(*shape[:-1], shape[-1] + 5, dtype=dtype, device=CPU)[..., : shape[-1]]
    weight = normal(shape[-1], dtype=dtype, device=CPU)
    out = normalise(x, weight, 1e-3)
    assert out.dtype == dtype and out.shape == shape and out.is_contiguous()
    close(out, definition(x, weight, 1e-3))


@adders
@dtypes
def test_add_rms_norm_keeps_the_sum_as_the_residual(
    add_and_normalise: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    x, residual = (normal(rows, 33, dtype=dtype, device=CPU)[-4:] for rows in (4, 5))
    weight = normal(33, dtype=dtype, device=CPU)
    added, kept_x = x + residual, x.clone()
    out = add_and_normalise(x, residual, weight, 1e-5)
    assert torch.equal(residual, added) and torch.equal(x, kept_x)
    close(out, definition(added, weight, 1e-5))


@gates
@dtypes
@pytest.mark.parametrize("shape", [(3, 38), (0, 8), (1, 2)], ids=str)
def test_silu_mul(gate: Callable[[Tensor], Tensor], dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate_up = normal(shape[0], shape[1] + 3, dtype=dtype, device=CPU)[:, : shape[1]]
    first, second = gate_up.double().chunk(2, dim=1)
    out = gate(gate_up)
    assert out.dtype == dtype and out.shape == (shape[0], shape[1] // 2)
    close(out, first / (1 + torch.exp(-first)) * second)


@rotations
@dtypes
def test_rope_turns_each_pair_by_its_angle(rotate: Callable[..., None], dtype: torch.dtype) -> None:
    qkv = normal(3, 9, 20, dtype=dtype, device=CPU)
    before = qkv.clone()
    angle = torch.rand(11, 10, generator=torch.Generator().manual_seed(0)) * 6
    positions = torch.tensor([0, 10, 3])
    rotate(qkv[:, :6], qkv[:, 6:8], torch.cat((angle.cos(), angle.sin()), dim=1), positions)
    pairs = torch.complex(*before[:, :8].double().chunk(2, dim=2))
    turned = pairs * torch.polar(torch.ones(3, 1, 10).double(), angle[positions].double()[:, None])
    close(qkv[:, :8], torch.cat((turned.real, turned.imag), dim=2))
    assert torch.equal(qkv[:, 8], before[:, 8])  # the values in the same buffer


@rotations
def test_rope_of_no_tokens(rotate: Callable[..., None]) -> None:
    rotate(torch.empty(0, 2, 8), torch.empty(0, 1, 8), torch.empty(4, 8), torch.empty(0, dtype=torch.int64))


@stores
@dtypes
@pytest.mark.parametrize("slots", [(9, -1, 31, 2), (), (-1, -1), (0,)], ids=str)
def test_store_kv_writes_the_named_slots_only(
    store: Callable[..., None], dtype: torch.dtype, slots: tuple[int, ...]
) -> None:
    num_pages, page_size, num_kv_heads, head_dim = 4, 8, 2, 12
    qkv = normal(len(slots), 8, head_dim, dtype=dtype, device=CPU)
    key, value = qkv[:, 4:6], qkv[:, 6:]
    pool = normal(num_pages, 3, 2, num_kv_heads, page_size, head_dim, dtype=dtype, device=CPU)
    expected = pool.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // page_size, 1, 0, :, slot % page_size] = key[token]
            expected[slot // page_size, 1, 1, :, slot % page_size] = value[token]
    store(key, value, pool[:, 1], torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(pool, expected)


@moves
@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8], ids=str)
@pytest.mark.parametrize("page_ids", [(4, 0, 2), (), (3,)], ids=str)
def test_pages_go_to_staging_and_back(
    gather: Move, scatter: Move, dtype: torch.dtype, page_ids: tuple[int, ...]
) -> None:
    pool = torch.arange(5 * 3 * 14).view(5, 3, 2, 7).to(dtype)
    before, ids = pool.clone(), torch.tensor(page_ids, dtype=torch.int64)
    staging = torch.zeros(len(page_ids), 14, dtype=dtype)
    gather(pool[:, 1], ids, staging)
    assert torch.equal(staging, before[ids, 1].flatten(1))
    scatter(staging, ids, pool[:, 2])
    before[ids, 2] = before[ids, 1]
    assert torch.equal(pool, before)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8], ids=str)
@pytest.mark.parametrize("page_ids", [(4, 0, 2), (), (3,)], ids=str)
def test_pages_go_from_pool_to_pool(dtype: torch.dtype, page_ids: tuple[int, ...]) -> None:
    source = torch.arange(5 * 3 * 14).view(5, 3, 2, 7).to(dtype)
    destination, ids = torch.ones(6, 2, 7, dtype=dtype), torch.tensor(page_ids, dtype=torch.int64)
    expected = destination.clone()
    for page in page_ids:
        expected[5 - page] = source[page, 1]
    copy_pages(source[:, 1], ids, destination, 5 - ids)
    assert torch.equal(destination, expected)
