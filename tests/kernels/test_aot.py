"""Every kernel compiles for Hopper on a machine without a GPU, exactly as its launcher would launch it."""

import importlib
import inspect
import os
import re
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec
import pytest
import torch
from _pytest.mark import ParameterSet

from baton.bench.gpu.tiles import compile_tile
from baton.kernels import sample
from baton.kernels.triton.kernel import (
    HAS_TRITON,
    SHARED_MEMORY_BYTES,
    Compiled,
    Kernel,
    TileKey,
    TileKind,
    TunedTile,
    compile_for_hopper,
    read_tuned,
)
from tests.kernels.launches import Scenario, record, scenarios

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]

SCENARIOS = list(scenarios()) if HAS_TRITON else []


def compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """The compiled kernel of the scenario with this name."""
    (scenario,) = (scenario for scenario in SCENARIOS if scenario.name == name)
    with monkeypatch.context() as patch:
        (launch,) = record(scenario, patch)
    return compile_for_hopper(launch)


def slow(*values: object) -> ParameterSet:
    """Return a parameter that `make kernels` has beside those of `make test`."""
    return pytest.param(*values, marks=pytest.mark.slow)


# Shapes of one kernel differ in their constants. `make test` has attention in bf16 and int8 at one head size,
# products at a few shapes, codes of weights in products whose inputs are split, and sampling with all masks.
SLOW: Final = re.compile(
    r"-(float16|float32|(64|80|96|256|576)-bfloat16)$|^(prefill|decode)-.*-64$"
    r"|^linear-(down|head|odd)-(300|8192)-|^experts-(gate_up-8192|down-8)-"
    r"|^linear-(qkv|gate_up)-(300|8192)-|^(int|fp8|mxfp4).*-(qkv|gate_up)-|^(int4|fp8|mxfp4)(_\w+)?-out-300$"
    r"|^(prefill|decode|rope_and_store)-float8_|^sample-\w+-(random|top_k|top_p)$"
)


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(each, id=each.name, marks=pytest.mark.slow if SLOW.search(each.name) else ())
        for each in SCENARIOS
    ],
)
def test_kernel_compiles_for_hopper(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record(scenario, monkeypatch)
    assert launches
    for launch in launches:
        compiled = compile_for_hopper(launch)
        assert ".target sm_90" in compiled.asm["ptx"]
        assert compiled.shared_bytes <= SHARED_MEMORY_BYTES
        assert compiled.local_bytes == 0, "registers are spilled"


# The table of tuned tiles.


def distinct_rows() -> list[TunedTile]:
    """One row of each tile that is compiled: products compile to the same at every width."""
    found: dict[object, TunedTile] = {}
    for row in read_tuned().values():
        width = 0 if row.kind == "linear" else row.width
        found.setdefault(msgspec.structs.astuple(msgspec.structs.replace(row, width=width)), row)
    return list(found.values())


def assert_compiles_as_recorded(row: TunedTile) -> None:
    made = compile_tile(row)
    assert made is not None, "the row spills registers, or has no room in shared memory"
    if version("triton") == row.triton:
        assert (made.registers, made.shared_bytes) == (row.registers, row.shared_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("row", distinct_rows(), ids=lambda row: "-".join(map(str, row.key)))
def test_every_row_of_the_table_compiles_without_spills(row: TunedTile) -> None:
    assert_compiles_as_recorded(row)


@pytest.mark.parametrize(
    ("kind", "width", "rows"),
    [slow("linear", 4096, 64), ("linear", 4096, 128), ("decode", 128, 64)],
)
def test_rows_of_an_8b_model_compile_without_spills(kind: TileKind, width: int, rows: int) -> None:
    assert_compiles_as_recorded(read_tuned()[TileKey(kind, torch.bfloat16, width, rows)])


@pytest.mark.parametrize(
    "name", ["prefill-128-bfloat16", slow("prefill-80-float16"), slow("prefill-256-bfloat16")]
)
def test_prefill_runs_on_the_matrix_units_of_hopper(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "wgmma.mma_async" in compiled(name, monkeypatch).asm["ptx"]


@pytest.mark.parametrize(
    "name",
    [
        *("decode-split-128-bfloat16", "decode-whole-128-bfloat16", "prefill-128-bfloat16"),
        *map(slow, ("decode-split-80-float16", "decode-split-256-bfloat16")),
        *map(slow, ("prefill-80-float16", "prefill-256-bfloat16")),
        *map(slow, ("decode-split-576-bfloat16", "prefill-576-bfloat16")),
    ],
)
def test_attention_loads_the_next_blocks_while_it_computes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ir = compiled(name, monkeypatch).asm["ttgir"]
    depths = [int(depth) for depth in re.findall(r"ttg\.async_wait .*num = (\d+)", ir)]
    buffers = [int(number) for number in re.findall(r"ttg\.local_alloc : .*memdesc<(\d+)x", ir)]
    # Waits for page ids, keys and values in a loop leave later loads under way; one comes after it.
    num_loops = depths.count(0)
    assert num_loops and sum(depth >= 2 for depth in depths) == 3 * num_loops == len(depths) - num_loops
    assert buffers and min(buffers) >= 2


@pytest.mark.parametrize("label", ["out", *map(slow, ("qkv", "gate_up", "down", "head"))])
def test_products_load_the_next_blocks_while_they_compute(
    label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for num_tokens in (3, 300, 8192):
        assert_loads_ahead(compiled(f"linear-{label}-{num_tokens}-bfloat16", monkeypatch))


@pytest.mark.parametrize(
    "name", [slow("int8-qkv"), slow("int4_zeros-out"), slow("fp8-gate_up"), "int8_rounded-out"]
)
def test_products_with_codes_load_the_next_blocks_sixteen_bytes_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for num_tokens in (3, 300):
        made = compiled(f"{name}-{num_tokens}", monkeypatch)
        assert_loads_ahead(made)
        assert "cp.async.cg.shared.global" in made.asm["ptx"]


def assert_loads_ahead(made: Compiled) -> None:
    """Products wait while later loads are under way."""
    ir = made.asm["ttgir"]
    depths = [int(depth) for depth in re.findall(r"ttg\.async_wait .*num = (\d+)", ir)]
    buffers = [int(number) for number in re.findall(r"ttg\.local_alloc : .*memdesc<(\d+)x", ir)]
    assert depths.count(0) == sum(depth >= 2 for depth in depths) == len(depths) / 2 > 0
    assert buffers and min(buffers) >= 2


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "names",
    [
        ("linear-out-3", "linear-out-300", "linear-out-8192"),
        *(
            slow(tuple(f"linear-{label}-{number}" for number in (3, 300, 8192)))
            for label in ("qkv", "gate_up")
        ),
        ("decode-split-128", "decode-whole-128", "prefill-128"),
        *(
            slow((f"decode-split-{size}", f"decode-whole-{size}", f"prefill-{size}"))
            for size in (80, 256, 576)
        ),
    ],
    ids=lambda names: names[0],
)
def test_batch_size_does_not_change_the_matrix_instructions(
    names: tuple[str, ...], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of the sums within an instruction is the hardware's."""
    assert_same_instructions([f"{name}-{dtype}" for name in names], monkeypatch)


@pytest.mark.parametrize(
    "names",
    [
        *((f"{name}-out-3", f"{name}-out-300") for name in ("int8", "int8_rounded")),
        *(slow((f"{name}-out-3", f"{name}-out-300")) for name in ("int4_zeros", "fp8")),
        ("decode-int8-128", "prefill-int8-128"),
        slow(("decode-float8_e4m3fn-128", "prefill-float8_e4m3fn-128")),
    ],
    ids=lambda names: names[0],
)
def test_batch_size_does_not_change_the_matrix_instructions_of_codes(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same_instructions(names, monkeypatch)


def assert_same_instructions(names: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    instructions = [
        set(re.findall(r"mma\S*\.m\d+n\d+k\d+\S*", compiled(name, monkeypatch).asm["ptx"])) for name in names
    ]
    assert instructions[0] and all(each == instructions[0] for each in instructions)


def test_rounded_inputs_are_multiplied_as_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("int8_rounded-qkv-3", "int4_rounded-gate_up-300"):
        assert re.search(r"wgmma\S*\.s32\.s8\.s8", compiled(name, monkeypatch).asm["ptx"])


@pytest.mark.parametrize("name", ["decode-split-128-bfloat16", slow("decode-split-80-float16")])
def test_decode_prefetches_pages_sixteen_bytes_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cp.async.cg.shared.global" in compiled(name, monkeypatch).asm["ptx"]


@pytest.mark.parametrize("name", ["peak_kernel", "select_kernel", "draw_kernel", "join_parts_kernel"])
def test_sampling_is_warmed_up_with_every_constant_of_a_later_launch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = partial(sample.warm_up_triton, torch.empty(1, 128256))
    warmed = [launch.options for launch in record(Scenario("warm", sample, name, run), monkeypatch)]
    monkeypatch.undo()
    sampling = [scenario for scenario in SCENARIOS if scenario.kernel_name == name]
    launches = [launch for scenario in sampling for launch in record(scenario, monkeypatch)]
    assert launches and all(launch.options in warmed for launch in launches)


def test_no_kernel_is_left_out() -> None:
    folder = Path(inspect.getfile(record)).parents[2] / "kernels"
    paths = [path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py")]
    modules = [".".join(("baton.kernels", *path.parts)) for path in paths]
    written = {
        name
        for module in (*modules, "baton.bench.gpu.kernels")
        for name, found in vars(importlib.import_module(module)).items()
        if isinstance(found, Kernel)
    }
    assert written == {scenario.kernel_name for scenario in SCENARIOS}
