"""Every kernel compiles for Hopper on a machine without a GPU, exactly as its launcher would launch it."""

import importlib
import inspect
import os
import re
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.kernels import sample
from baton.kernels.triton_import import HAS_TRITON, Kernel, triton
from tests.kernels.launches import Launch, Scenario, record, scenarios, type_name

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]

SHARED_MEMORY_BYTES = 227 * 1024  # what one block may have on sm_90
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
SCENARIOS = list(scenarios()) if HAS_TRITON else []


def compile_for_hopper(launch: Launch) -> Any:
    kernel = launch.kernel.jitted
    names: list[str] = kernel.arg_names
    values = dict(zip(names, launch.arguments, strict=False))
    options = {name: value for name, value in launch.options.items() if name in OPTIONS}
    constants = {name: value for name, value in launch.options.items() if name not in OPTIONS}
    varying = {param.name for param in kernel.params if param.do_not_specialize}
    specialised = [name for name in values if name not in varying]
    constants |= {name: 1 for name in specialised if _is_one(values[name])}
    signature = {name: "constexpr" if name in constants else type_name(values[name]) for name in names}
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name in specialised
        if name not in constants and _is_divisible_by_16(values[name])
    }
    compiler = importlib.import_module("triton.compiler")
    source = compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"enable_fp_fusion": True} | options)


def compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The compiled kernel of the scenario with this name."""
    (scenario,) = (scenario for scenario in SCENARIOS if scenario.name == name)
    with monkeypatch.context() as patch:
        (launch,) = record(scenario, patch)
    return compile_for_hopper(launch)


def local_memory_bytes(compiled: Any) -> int:
    """Return what a thread keeps outside its registers, by the cubin's own account."""
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(folder / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (stack,), (local,) = re.findall(r"STACK:(\d+)", usage), re.findall(r"LOCAL:(\d+)", usage)
    return int(stack) + int(local)


def _is_one(value: object) -> bool:
    return isinstance(value, int) and value == 1


def _is_divisible_by_16(value: object) -> bool:
    number = value.data_ptr() if isinstance(value, Tensor) else value
    return isinstance(number, int) and number % 16 == 0


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_kernel_compiles_for_hopper(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record(scenario, monkeypatch)
    assert launches
    for launch in launches:
        compiled = compile_for_hopper(launch)
        assert ".target sm_90" in compiled.asm["ptx"]
        assert compiled.metadata.shared <= SHARED_MEMORY_BYTES
        assert local_memory_bytes(compiled) == 0, "registers are spilled"


@pytest.mark.parametrize("name", ["prefill-128-bfloat16", "prefill-80-float16", "prefill-256-bfloat16"])
def test_prefill_runs_on_the_matrix_units_of_hopper(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "wgmma.mma_async" in compiled(name, monkeypatch).asm["ptx"]


@pytest.mark.parametrize(
    "name",
    [
        *("decode-split-128-bfloat16", "decode-whole-128-bfloat16", "decode-split-80-float16"),
        *("decode-split-256-bfloat16", "prefill-128-bfloat16", "prefill-80-float16", "prefill-256-bfloat16"),
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


@pytest.mark.parametrize("label", ["qkv", "out", "gate_up", "down", "head"])
def test_products_load_the_next_blocks_while_they_compute(
    label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for num_tokens in (3, 300, 8192):
        ir = compiled(f"linear-{label}-{num_tokens}-bfloat16", monkeypatch).asm["ttgir"]
        depths = [int(depth) for depth in re.findall(r"ttg\.async_wait .*num = (\d+)", ir)]
        buffers = [int(number) for number in re.findall(r"ttg\.local_alloc : .*memdesc<(\d+)x", ir)]
        assert depths.count(0) == sum(depth >= 2 for depth in depths) == len(depths) / 2 > 0
        assert buffers and min(buffers) >= 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "names",
    [
        *(
            tuple(f"linear-{label}-{number}" for number in (3, 300, 8192))
            for label in ("qkv", "out", "gate_up")
        ),
        *((f"decode-split-{size}", f"decode-whole-{size}", f"prefill-{size}") for size in (80, 128, 256)),
    ],
    ids=lambda names: names[0],
)
def test_batch_size_does_not_change_the_matrix_instructions(
    names: tuple[str, ...], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of the sums within an instruction is the hardware's."""
    instructions = [
        set(re.findall(r"mma\S*\.m\d+n\d+k\d+\S*", compiled(f"{name}-{dtype}", monkeypatch).asm["ptx"]))
        for name in names
    ]
    assert instructions[0] and all(each == instructions[0] for each in instructions)


@pytest.mark.parametrize("name", ["decode-split-128-bfloat16", "decode-split-80-float16"])
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
    modules = [f"baton.kernels.{path.stem}" for path in folder.glob("*.py")]
    written = {
        name
        for module in (*modules, "baton.bench.gpu.kernels")
        for name, found in vars(importlib.import_module(module)).items()
        if isinstance(found, Kernel)
    }
    assert written == {scenario.kernel_name for scenario in SCENARIOS}
