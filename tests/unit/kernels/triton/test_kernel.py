import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baton.kernels import linear
from baton.kernels.linear import default_tile, linear_tile
from baton.kernels.triton import attention_tile
from baton.kernels.triton.attention_tile import (
    FIRST_SPLIT,
    NUM_STAGES,
    STAGES_OF_SMALL_GPUS,
    key_block,
    tile_options,
)
from baton.kernels.triton.kernel import (
    SHARED_MEMORY_BYTES,
    TILES,
    TileKey,
    TileKind,
    read_tuned,
    write_tuned,
)

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
sys.modules["triton"] = None  # importing it now fails, as on a machine without it
import torch
from baton.kernels import pages, paged_attention, prefill_attention, rms_norm
from baton.kernels import sample, gated, store_kv
assert gated.gated(torch.ones(2, 6)).shape == (2, 3)
three, int64s = torch.ones(3, 2, 6), torch.zeros(3, dtype=torch.int64)
table, kv_pages = torch.ones(4, 6), torch.ones(1, 2, 2, 4, 6)
for launch in (
    lambda: gated.gated_triton(torch.ones(2, 6)),
    lambda: store_kv.rope_and_store_triton(three, three, three, table, int64s, kv_pages, int64s),
):
    try:
        launch()
    except RuntimeError as error:
        print(error)
"""


def test_ops_run_on_the_cpu_and_launchers_name_the_missing_package() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["tensors on a GPU need Triton: pip install triton"] * 2


# The table of tuned tiles.

ROWS = list(read_tuned().values())
LINEAR: tuple[tuple[TileKind, int], ...] = (("linear", 64), ("linear", 128))  # kinds and rows of their tiles
ATTENTION: tuple[tuple[TileKind, int], ...] = (("decode", 64), ("prefill", 64), ("prefill", 128))


def test_table_has_the_products_and_the_attention_of_an_8b_model() -> None:
    # Inputs of a rank's split, and the head dim. One rank sums row-parallel products in two parts.
    products = [(LINEAR, 4096), (LINEAR, 2048), (LINEAR, 7168)]
    for kinds, width in (*products, (ATTENTION, 128)):
        for kind, rows in kinds:
            for dtype in (torch.bfloat16, torch.float16):
                assert TileKey(kind, dtype, width, rows) in read_tuned()


def test_rows_of_a_width_order_sums_alike() -> None:
    """Else a token would depend on its batch, or on whether it is computed in a chunk or a decode step."""
    orders: dict[tuple[bool, str, int], set[tuple[int, int, int]]] = {}
    heights: dict[tuple[bool, str, int], set[tuple[TileKind, int]]] = {}
    for row in ROWS:
        width = row.kind == "linear", row.dtype, row.width
        warps_of_64_rows = row.num_warps * 64 // row.block_m
        orders.setdefault(width, set()).add((row.block_n, row.block_k, warps_of_64_rows))
        heights.setdefault(width, set()).add((row.kind, row.block_m))
    assert orders and all(len(found) == 1 for found in orders.values())
    for (is_product, _, _), found in heights.items():
        assert found == set(LINEAR if is_product else ATTENTION)


def test_rows_fit_an_h100_and_their_shapes() -> None:
    for row in ROWS:
        assert row.shared_bytes <= SHARED_MEMORY_BYTES and 0 < row.registers <= 255, row
        assert row.registers * row.num_warps * 32 <= 65_536, row
        if row.kind == "linear":
            assert row.width % row.block_k == 0, row
        else:
            assert FIRST_SPLIT % row.block_n == 0 and row.block_k == 0, row


def test_launchers_pick_the_row_of_their_shape() -> None:
    for row in ROWS:
        dtype, cpu = row.key.dtype, torch.device("cpu")
        tile: dict[str, int]
        if row.kind == "linear":
            x = torch.empty(3 if row.block_m == 64 else 300, row.width, dtype=dtype, device="meta")
            tile = linear_tile(x, row.width)
            assert (tile["BLOCK_M"], tile["BLOCK_K"]) == (row.block_m, row.block_k), row
        else:
            tile = tile_options(row.kind, row.block_m, 4, row.width, dtype, cpu)
        found = tile["BLOCK_N"], tile["num_warps"], tile["num_stages"]
        assert found == (row.block_n, row.num_warps, row.num_stages), row


def test_shape_without_a_row_has_the_rule_of_its_kernel() -> None:
    x = torch.empty(3, 1100, dtype=torch.bfloat16)
    assert linear_tile(x, 1100) == default_tile(64, 1100, num_stages=4)
    options = tile_options("decode", 64, 4, 80, torch.bfloat16, torch.device("cpu"))
    assert options["BLOCK_N"] == key_block(80, torch.bfloat16) and options["num_stages"] == NUM_STAGES
    # Both kernels need the rule where one of them has tiles that are not tuned.
    for kind, _ in ATTENTION:
        wide = tile_options(kind, 128, 128, 128, torch.bfloat16, torch.device("cpu"))
        assert wide["BLOCK_N"] == key_block(128, torch.bfloat16)


def test_small_gpu_has_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_large_shared_memory", lambda device: False)
    monkeypatch.setattr(attention_tile, "has_large_shared_memory", lambda device: False)
    x = torch.empty(3, 4096, dtype=torch.bfloat16)
    assert linear_tile(x, 4096) == default_tile(64, 4096, num_stages=2)
    options = tile_options("decode", 64, 4, 128, torch.bfloat16, torch.device("cpu"))
    assert options["num_stages"] == STAGES_OF_SMALL_GPUS


def test_written_table_is_read_again(tmp_path: Path) -> None:
    write_tuned(ROWS[::-1], tmp_path / "tuned.json")
    assert (tmp_path / "tuned.json").read_text() == TILES.read_text()
