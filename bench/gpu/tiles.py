"""Tuned tiles: candidates, compiled and judged, and the table of the best ones, kernels/triton/tuned.json.

A candidate is compiled for sm_90 in every kind of launch that would use it. One that spills registers, or
has more shared memory than a program may have, is dropped. On a GPU the others are judged by the time of
launches, elsewhere by a model of a multiprocessor of an H200, whose constants are estimates: no GPU has
measured them. docs/decisions/0034 says what a row of the table is found by.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import version
from itertools import product
from typing import Final, Literal
from unittest import mock

import torch
from msgspec.structs import replace
from torch import Tensor

from baton.bench.machine import Call, seconds_per_call
from baton.bench.report import Report, Row, suite
from baton.kernels import linear, paged_attention
from baton.kernels import prefill_attention as prefill
from baton.kernels.gated import SILU
from baton.kernels.linear import NUM_MULTIPROCESSORS
from baton.kernels.triton import attention_tile
from baton.kernels.triton.attention_tile import NUM_STAGES
from baton.kernels.triton.kernel import (
    SHARED_MEMORY_BYTES,
    Kernel,
    Launch,
    TileKind,
    TunedDtype,
    TunedTile,
    compile_for_hopper,
    write_tuned,
)

COMPILED_INPUTS: Final = 4096  # a product compiles to the same for all inputs that are multiples of block_k
# (splits, is_gated, has_bias): row-parallel, the gate and its value, column-parallel products.
LINEAR_SORTS: Final = ((2, False, False), (1, True, False), (1, False, True))
LINEAR_OUTPUTS: Final = (4096, 6144, 28672)  # that a width is judged by
TUNED_CONTEXT: Final = 2048  # keys of a sequence, where tiles are timed
TUNED_TOKENS: Final = {64: 64, 128: 2048}  # rows of a tile -> tokens that it is judged by
# The model of one of 132 multiprocessors.
LATENCY_S: Final = 1.1e-6  # of memory
NEEDED_BYTES: Final = 40_000  # under way, for all of its share of the read bandwidth during that time
READ_BYTES_PER_S: Final = 4.8e12 / NUM_MULTIPROCESSORS
CACHE_BYTES_PER_S: Final = 5.5e12 / NUM_MULTIPROCESSORS  # from the second level, which tiles share
FLOPS_PER_S: Final = 800e12 / NUM_MULTIPROCESSORS
PROGRAM_BYTES: Final = 1024  # of shared memory, that a program takes for itself
BLOCK_OVERHEAD_KEYS: Final = 8  # keys that could be met in the time that a block costs beside its keys
REGISTERS: Final = 65_536


def num_programs(tile: TunedTile) -> int:
    """Return the programs of a compiled tile that a multiprocessor has room for at once."""
    by_registers = REGISTERS // (max(1, tile.registers) * 32 * tile.num_warps)
    return min(by_registers, SHARED_MEMORY_BYTES // (tile.shared_bytes + PROGRAM_BYTES))


def candidates(kind: TileKind, width: int) -> list[TunedTile]:
    """Return the tiles of a kind that are tried, in bf16; they have not been compiled."""
    sizes: list[tuple[int, int, int, int, int]]
    if kind == "linear":
        sizes = [
            (rows, outputs, inputs, rows // per_warp, stages)
            for rows in (64, 128)
            for outputs in (64, 128, 256)
            for inputs in (64, 128)
            for per_warp in (16, 8)
            for stages in (3, 4, 5, 6)
            if stages * (rows + outputs) * inputs * 2 <= SHARED_MEMORY_BYTES + 2 * (rows + outputs) * inputs
        ]
    else:  # with other stages, a product waits for loads: tests/kernels/test_aot.py
        heights = (64,) if kind == "decode" else (64, 128)
        sizes = [(rows, keys, 0, rows // 16, NUM_STAGES) for rows in heights for keys in (32, 64, 128)]
    return [
        TunedTile(
            kind=kind,
            dtype="bfloat16",
            width=width,
            block_m=rows,
            block_n=outputs,
            block_k=inputs,
            num_warps=warps,
            num_stages=stages,
            registers=0,
            shared_bytes=0,
            chosen_by="model",
            triton=version("triton"),
        )
        for rows, outputs, inputs, warps, stages in sizes
    ]


class Recorder:
    """Stands where a kernel stands and remembers how it was launched."""

    def __init__(self, kernel: Kernel, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: self._launches.append(Launch(self._kernel, arguments, options))


@contextmanager
def _in_use(tile: TunedTile) -> Iterator[None]:
    """Make launchers use this tile in place of the table's."""
    with (
        mock.patch.object(linear, "tuned_tile", lambda key: tile),
        mock.patch.object(attention_tile, "tuned_tile", lambda key: tile),
    ):
        yield


def tile_launches(tile: TunedTile) -> list[Launch]:
    """Return every kind of launch that has such a tile, as a CPU's tensors make it."""
    launches: list[Launch] = []
    module, name = {
        "linear": (linear, "linear_kernel"),
        "decode": (paged_attention, "paged_attention_kernel"),
        "prefill": (prefill, "prefill_attention_kernel"),
    }[tile.kind]
    with mock.patch.object(module, name, Recorder(getattr(module, name), launches)), _in_use(tile):
        for call in _tile_calls(tile, torch.device("cpu")):
            call()
    return launches


def _tile_calls(tile: TunedTile, device: torch.device) -> Iterator[Call]:
    """Yield launches: on a GPU at the shapes that are timed, on a CPU one of each sort."""
    kind, dtype, width, block_m = tile.key

    def values(*shape: int) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=device)
        return made.normal_() if made.is_cuda else made

    if kind == "linear":
        # Programs share the parts of a tile where there are few tiles, and compute whole tiles otherwise.
        is_timed = device.type == "cuda"
        outputs = LINEAR_OUTPUTS if is_timed else (4096, 128_256)
        num_tokens = TUNED_TOKENS[block_m] if is_timed else block_m
        for num_outputs, (num_splits_, is_gated, has_bias) in product(outputs, LINEAR_SORTS):
            num_inputs = num_splits_ * width
            weight = linear.LinearWeight(
                values(num_outputs, num_inputs),
                num_outputs,
                num_inputs,
                dtype,
                is_packed=False,
                arrivals=linear.new_arrivals(device),
            )
            yield partial(
                linear.linear_triton,
                values(num_tokens, num_inputs),
                weight,
                torch.zeros(num_outputs, device=device) if has_bias else None,
                num_splits=num_splits_,
                gate=SILU if is_gated else None,
            )
        return
    # Decode steps and chunks of 16 tokens read long contexts; a prompt is computed in one chunk.
    num_queries = 1 if kind == "decode" else 16 if block_m == 64 else TUNED_CONTEXT
    num_sequences = 64 if num_queries < TUNED_CONTEXT else 1
    for window, page_size in ((None, 16), (4096, 64)):
        num_pages = TUNED_CONTEXT // page_size
        pages = values(num_sequences * num_pages, 2, 8, page_size, width)
        table = torch.arange(len(pages), dtype=torch.int32, device=device).view(num_sequences, num_pages)
        lens = torch.full((num_sequences,), TUNED_CONTEXT, dtype=torch.int32, device=device)
        query = values(num_sequences * num_queries, 32, width)
        if kind == "decode":
            decode = paged_attention.paged_attention_decode_triton
            yield partial(decode, query, pages, table, lens, scale=0.1, window=window)
        else:
            starts = num_queries * torch.arange(num_sequences + 1, dtype=torch.int32, device=device)
            yield partial(
                prefill.prefill_attention_triton,
                *(query, pages, table, starts, lens),
                scale=0.1,
                window=window,
                max_seqlen_q=num_queries,
            )


def compile_tile(tile: TunedTile) -> TunedTile | None:
    """Return the tile with the most that any launch takes; None where one spills or has no room."""
    width = COMPILED_INPUTS if tile.kind == "linear" else tile.width
    needs = _needs(replace(tile, width=width, registers=0, shared_bytes=0))
    return None if needs is None else replace(tile, registers=needs[0], shared_bytes=needs[1])


@cache
def _needs(tile: TunedTile) -> tuple[int, int] | None:
    """Return the registers and the bytes of shared memory; None: see above."""
    compiled = [compile_for_hopper(launch) for launch in tile_launches(tile)]
    if any(made.local_bytes or made.shared_bytes > SHARED_MEMORY_BYTES for made in compiled):
        return None
    return max(made.registers for made in compiled), max(made.shared_bytes for made in compiled)


def model_seconds(tile: TunedTile) -> float:
    """Return the time of typical work by the model of a multiprocessor; it compares tiles of one width."""
    if tile.kind == "linear":
        return sum(_linear_seconds(tile, num_outputs) for num_outputs in LINEAR_OUTPUTS)
    num_buffers = (tile.num_stages - 1) // 2
    blocks = 1 + BLOCK_OVERHEAD_KEYS / tile.block_n
    if tile.kind == "decode":  # reads keys and values; all buffers but the one in use are under way
        under_way = (num_buffers - 1) * 4 * tile.block_n * tile.width * num_programs(tile)
        return blocks * NEEDED_BYTES / max(1, min(under_way, NEEDED_BYTES))
    # An instruction of 64 rows takes block_n / 2 cycles and reads queries and keys at 128 bytes a cycle.
    scores = max(1.0, (64 * 32 + 32 * tile.block_n) / 128 / (tile.block_n / 2))
    return blocks * (scores + 1) / 2 * (1.0 if num_programs(tile) * tile.num_warps >= 8 else 1.5)


def _linear_seconds(tile: TunedTile, num_outputs: int) -> float:
    width, num_tokens = tile.width, TUNED_TOKENS[tile.block_m]
    num_tiles = -(-num_outputs // tile.block_n) * -(-num_tokens // tile.block_m)
    num_parts = -(-width // max(linear.LEAST_PART, -(-width // linear.MAX_PARTS)))
    units = num_tiles * num_parts if num_tiles <= NUM_MULTIPROCESSORS else num_tiles
    launched = 2 if tile.block_m == 64 else 1  # programs of a multiprocessor, as linear_triton launches them
    programs = min(launched, max(1, num_programs(tile)))  # at once
    rounds = -(-units // (NUM_MULTIPROCESSORS * launched)) * launched  # units of the busiest multiprocessor
    inputs = width * num_tiles / units
    loaded = (tile.block_m + tile.block_n) * inputs * 2
    under_way = programs * (tile.num_stages - 1) * tile.block_n * tile.block_k * 2
    weight_s = tile.block_n * inputs * 2 / READ_BYTES_PER_S / min(1.0, under_way / NEEDED_BYTES)
    weight_s /= -(-num_tokens // tile.block_m)  # the rows of tiles share what one of them has read
    product_s = 2 * tile.block_m * tile.block_n * inputs / FLOPS_PER_S
    sums_s = tile.block_m * tile.block_n * 8 / CACHE_BYTES_PER_S if units > num_tiles else 0.0
    # The first loads of a unit are waited for, unless another program computes meanwhile.
    return rounds * (max(weight_s, loaded / CACHE_BYTES_PER_S, product_s) + sums_s + LATENCY_S / programs)


def timed_seconds(tile: TunedTile) -> float:
    """Return the time of the launches of `tile_launches` on the current GPU."""
    device = torch.device("cuda")
    with _in_use(tile):
        return sum(seconds_per_call([call], device) for call in list(_tile_calls(tile, device)))


# The table.

# Inputs of one rank's split, of the Llama 3, Mistral, Qwen2.5 and Qwen3 families on one to four ranks.
LINEAR_WIDTHS: Final = (
    *(896, 1024, 1536, 2048, 2432, 2560, 3072, 3584, 4096, 4480, 4864, 5120, 6144, 6912, 7168, 8192, 8704),
    *(9472, 12800, 13824, 14336),
)
HEAD_DIMS: Final = (64, 128)
# Kinds whose tiles agree in the blocks that order sums, and their widths.
TUNED: Final[Mapping[tuple[TileKind, ...], tuple[int, ...]]] = {
    ("linear",): LINEAR_WIDTHS,
    ("decode", "prefill"): HEAD_DIMS,
}
TUNED_DTYPES: Final[tuple[TunedDtype, ...]] = ("bfloat16", "float16")


def blocks(tile: TunedTile) -> tuple[int, int, int]:
    """Return what all rows of a width agree in: outputs, inputs, and warps of 64 rows."""
    return tile.block_n, tile.block_k, tile.num_warps * 64 // tile.block_m


def choose_tiles(
    compiled: Sequence[TunedTile], judge: Callable[[TunedTile], float]
) -> dict[tuple[TileKind, int], TunedTile]:
    """Return the best tile of each kind and height; all have the same `blocks`. Empty when none do.

    compiled: of one width. judge: gives seconds. They count relative to the best of their kind and height. Of
    equals the one with more programs on a multiprocessor is better, then the one with more stages.
    """
    places = {(tile.kind, tile.block_m) for tile in compiled}
    by_blocks: dict[tuple[int, int, int], dict[tuple[TileKind, int], tuple[float, int, TunedTile]]] = {}
    for order, tile in enumerate(sorted(compiled, key=lambda tile: (-num_programs(tile), -tile.num_stages))):
        if tile.block_k and tile.width % tile.block_k:
            continue  # masks of inputs take registers
        found, place = by_blocks.setdefault(blocks(tile), {}), (tile.kind, tile.block_m)
        judged = judge(tile), order, tile
        found[place] = min(found.get(place, judged), judged, key=lambda each: each[:2])
    whole = [found for found in by_blocks.values() if found.keys() == places]
    if not whole:
        return {}
    least = {place: min(found[place][0] for found in whole) for place in places}
    best = min(whole, key=lambda found: sum(found[place][0] / least[place] for place in places))
    return {place: best[place][-1] for place in sorted(places)}


def tune(device: torch.device, tell: Callable[[str], None]) -> list[TunedTile]:
    """Return the rows of the table of tuned tiles, judged by time on a GPU. tell: hears of the progress.

    A width has no rows in a dtype in which one of the chosen tiles does not fit.
    """
    by: Literal["model", "time"] = "time" if device.type == "cuda" else "model"
    judge, rows = timed_seconds if by == "time" else model_seconds, list[TunedTile]()
    for kinds, widths in TUNED.items():
        for width in widths:
            tell(f"compiling {' and '.join(kinds)}, width {width}")
            tried = [compile_tile(tile) for kind in kinds for tile in candidates(kind, width)]
            for dtype in TUNED_DTYPES:
                tell(f"choosing for width {width}, {dtype}")
                fitting = [replace(each, dtype=dtype, chosen_by=by) for each in tried if each]
                made = [compile_tile(tile) for tile in choose_tiles(fitting, judge).values()]
                rows += [tile for tile in made if tile is not None and None not in made]
    return rows


@suite("gpu-tiles", "Tuned tiles of the kernels")
def measure(options: Namespace, report: Report) -> None:
    """Write the table. Rows: the shared memory that each tile takes."""
    tiles = tune(torch.device("cuda" if torch.cuda.is_available() else "cpu"), report.tell)
    write_tuned(tiles)
    for tile in tiles:
        name = f"{tile.kind}, {tile.dtype}, {tile.width}, {tile.block_m} rows"
        report.rows.append(Row(name, tile.shared_bytes / 1024, "KiB"))
