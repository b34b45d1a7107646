"""The GPU suite at toy size: every stage, and what its runner does when a stage fails, crashes or hangs."""

import json
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from baton.bench.engine.replica import num_head_parameters, num_layer_parameters
from baton.bench.gpu import kernels, model, suite
from baton.bench.gpu.model import prefill_flops, step_arrays
from baton.bench.gpu.session import (
    FULL,
    LLAMA_8B,
    TOY,
    Rates,
    Session,
    WrongResult,
    require_close,
    require_equal,
)
from baton.bench.gpu.suite import STAGES, StageRunner, function_named
from baton.bench.gpu.tiles import candidates, choose_tiles, model_seconds
from baton.bench.machine import Call
from baton.bench.report import Report, Row
from baton.kernels.triton.kernel import TileKind, TunedTile
from tests.unit.bench.gpu.toy_stages import toy_stage
from tests.waiting import wait_for

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[4]
GPU_PACKAGES = ("torch", "triton", "numpy", "msgspec", "safetensors", "xxhash")
# What torch itself imports.
TORCH_PACKAGES = (
    *("torchgen", "numpy.libs", "typing_extensions.py", "sympy", "mpmath", "networkx", "jinja2"),
    *("markupsafe", "fsspec", "filelock"),
)


@pytest.fixture(autouse=True)
def stages_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def run_toy(folder: Path, *names: str, minutes: float = 9.0) -> Report:
    """Run stages of toy_stages.py in processes of their own; toy.json in the folder has the figures."""
    report = Report("toy", "toy", folder)
    StageRunner(report, "cpu", "toy").run([toy_stage(name) for name in names], minutes)
    return report


def values_of(report: Report) -> list[tuple[str, float | None]]:
    return [(row.name, row.value) for row in report.rows]


@pytest.mark.slow
def test_every_stage_runs_at_toy_size() -> None:
    session, rows = Session(CPU, TOY), list[Row]()
    with torch.no_grad():
        for stage in STAGES:
            rows += function_named(stage.function)(session)
    names = "\n".join(row.name for row in rows)
    for part in ("read bandwidth", "pages of 64", "prefill kernel", "kv gather", "kv scatter", "cuda_ipc"):
        assert part in names
    assert "decode step, 4" in names and "ragged" in names
    for part in ("worst of 1 to 3 x 64", "as fast as torch SDPA", "matrix products alone"):
        assert part in names
    assert sum("of the floor" in row.note for row in rows) == 5  # three decode steps and two prefills


@pytest.mark.slow
def test_command_needs_only_six_packages(tmp_path: Path) -> None:
    site_packages = Path(torch.__file__).parents[1]
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in GPU_PACKAGES + TORCH_PACKAGES:
        for path in (site_packages / name, *site_packages.glob(f"{name}-*.dist-info")):
            if path.exists():
                (packages / path.name).symlink_to(path)
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    paths = f"{ROOT}\n{packages}\n"
    next(environment.glob("lib/python*/site-packages")).joinpath("packages.pth").write_text(paths)
    command = [str(python), "-m", "baton.bench.gpu", "--toy", "--output", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    content = json.loads((tmp_path / "gpu-toy.json").read_text())
    assert set(content["seconds"]) == {stage.name for stage in STAGES}
    assert all(row["value"] is not None or row["note"] for row in content["rows"])
    assert sum(row["value"] is not None for row in content["rows"]) > 25


def test_failed_stages_are_named_and_their_rows_are_kept_and_the_rest_goes_on(tmp_path: Path) -> None:
    report = run_toy(tmp_path, "bad", "crashes")
    assert values_of(report) == [("before", 1.0), ("bad", None), ("before", 1.0), ("crashes", None)]
    assert report.rows[1].note == "WrongResult: kernel: off by one" and report.rows[1].has_failed
    assert report.rows[3].note == "its process ended with exit code -11" and report.rows[3].has_failed
    failures = json.loads((tmp_path / "toy.json").read_text())["failures"]
    assert list(failures) == ["bad", "crashes"] and "second line" in failures["bad"]


def test_rows_before_a_hang_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = tmp_path / "gpu-hangs.jsonl"

    class Hurried(subprocess.Popen[bytes]):
        """The time of the stage is over once its first row is there."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                wait_for(lambda: rows.stat().st_size > 0, timeout)
            return super().wait(timeout and 0.1)

    monkeypatch.setattr(suite, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Hurried}))
    report = run_toy(tmp_path, "hangs")
    assert values_of(report) == [("before", 1.0), ("hangs", None)]
    assert report.rows[1].note == "killed after 300 s" and report.rows[1].has_failed


@pytest.mark.slow
def test_stage_without_a_package_gives_the_reason_and_is_no_failure(tmp_path: Path) -> None:
    lacking, mistaken = run_toy(tmp_path, "lacks", "mistaken").rows
    assert (lacking.value, lacking.met) == (None, None)
    assert lacking.note.startswith("needs no_such_package, which is not installed")
    assert mistaken.has_failed, "a module of Baton's own is no missing package"


@pytest.mark.slow
def test_figures_of_a_stage_reach_later_stages(tmp_path: Path) -> None:
    report = run_toy(tmp_path, "measures", "compares")
    assert values_of(report) == [("copy", 2.0), ("step", 0.5)]


@pytest.mark.slow
def test_stage_that_the_time_of_the_suite_ends_is_no_failure(tmp_path: Path) -> None:
    report = run_toy(tmp_path, "hangs", minutes=4 / 60)
    assert values_of(report)[-1] == ("hangs", None) and not report.rows[-1].has_failed
    assert report.rows[-1].note.startswith("stopped after the ")


@pytest.mark.slow
def test_stage_that_may_not_end_in_time_is_not_started(tmp_path: Path) -> None:
    report = Report("full", "full", tmp_path)
    StageRunner(report, "cpu", "full").run([toy_stage("bad", 100), toy_stage("good", 1)], 50 / 60)
    assert values_of(report) == [("bad", None), ("figure", 1.0)]
    assert report.rows[0].note == "not started: 50 s are left, it needs 100" and not report.extra["failures"]


def test_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(query_BHD: torch.Tensor, *arguments: object, **settings: object) -> torch.Tensor:
        return torch.zeros_like(query_BHD)

    monkeypatch.setattr(kernels, "ragged_attention", zeros)
    with pytest.raises(WrongResult, match="decode kernel: relative error"):
        next(kernels.decode_kernel(Session(CPU, TOY)))


VLLM_ON_TRANSFORMERS = """
from types import SimpleNamespace
import torch
import transformers

__version__ = "of this test"
print("a line of the log")


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, dtype, **settings):
        assert settings["skip_tokenizer_init"] and not settings["enable_prefix_caching"]
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))

    def generate(self, prompts, sampling, use_tqdm):
        return [self.answer(each["prompt_token_ids"], of) for each, of in zip(prompts, sampling, strict=True)]

    def answer(self, prompt, of):
        assert of.temperature == 0.0 and of.ignore_eos
        tokens = torch.tensor([(prompt[::-1] if REVERSES else prompt)])
        out = self.model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=of.max_tokens, do_sample=False,
            min_new_tokens=of.max_tokens, pad_token_id=0
        )
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=out[0, len(prompt):].tolist())])
"""


def python_with_vllm(folder: Path, *, reverses: bool) -> str:
    """Return an interpreter whose `vllm` computes with transformers, of reversed prompts if so told."""
    (folder / "vllm.py").write_text(f"REVERSES = {reverses}\n{VLLM_ON_TRANSFORMERS}")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.slow
def test_another_interpreter_answers_with_our_weights(tmp_path: Path) -> None:
    session = Session(CPU, TOY, rival_python=python_with_vllm(tmp_path, reverses=False))
    with torch.no_grad():
        agreement, *rows = model.against_vllm(session)
    assert agreement.note == "vLLM of this test" and agreement.value == 100.0
    assert [row.name.partition(": ")[2] for row in rows] == 2 * ["Baton", "vLLM", "times as fast as vLLM"]
    assert rows[0].name.startswith("lengths like ShareGPT's, 4 ") and rows[-1].name.startswith("32 in, 8 out")
    ours, theirs, ratio = (row.value for row in rows[:3])
    assert ours and theirs and ratio == pytest.approx(ours / theirs) and rows[2].note == "goal 1.1"


@pytest.mark.slow
def test_rival_that_computes_something_else_has_no_figure(tmp_path: Path) -> None:
    session = Session(CPU, TOY, rival_python=python_with_vllm(tmp_path, reverses=True))
    with torch.no_grad(), pytest.raises(WrongResult, match="of first tokens are ours"):
        list(model.against_vllm(session))


def test_missing_or_broken_vllm_is_named(tmp_path: Path) -> None:
    (row,) = model.against_vllm(Session(CPU, TOY))
    assert (row.value, row.met) == (None, None) and row.note.startswith("skipped: not installed for ")
    python = python_with_vllm(tmp_path, reverses=False)
    (tmp_path / "vllm.py").write_text("raise ImportError('no such library')")
    with torch.no_grad(), pytest.raises(RuntimeError, match="vLLM's process has ended"):
        list(model.against_vllm(Session(CPU, TOY, rival_python=python)))


def test_lengths_are_like_those_of_sharegpt() -> None:
    jobs, fixed = model.rival_loads(replace(FULL, num_rival_requests=2000, model=TOY.model)).values()
    assert sum(len(prompt) for prompt, _ in jobs) / len(jobs) == pytest.approx(220, rel=0.15)
    assert sum(num_tokens for _, num_tokens in jobs) / len(jobs) == pytest.approx(200, rel=0.15)
    assert {(len(prompt), num_tokens) for prompt, num_tokens in fixed} == {(1024, 128)}


def test_worst_number_of_sequences_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(calls: Sequence[Call], device: torch.device, *, num_runs: int) -> float:
        batch = len(calls[0]().context_lens)  # type: ignore[attr-defined]
        return 1e-6 * batch * (10.0 if batch == 2 else 1.0)

    def decode(query_BHD: torch.Tensor, kv: kernels.PagedKv, layer: int) -> Call:
        return lambda: kv

    monkeypatch.setattr(kernels, "seconds_per_call", seconds)
    monkeypatch.setattr(kernels, "_decode", decode)
    monkeypatch.setattr(kernels, "_check_decode", lambda query_BHD, kv: None)
    session = Session(CPU, replace(TOY, has_bars=True))
    num_bytes = 64 * 2 * TOY.model.num_kv_heads * TOY.model.head_dim * 2
    session.figures.rates = Rates(num_bytes / 1e3, 1.0, 1.0)
    (row,) = kernels.decode_kernel_batches(session)
    assert row.value == pytest.approx(10.0) and row.met is False
    assert row.note == "at 2 sequences, median 100; below the bar: 2: 10, 1 in all"


def test_stages_that_need_the_rates_say_so() -> None:
    with pytest.raises(RuntimeError, match="rates were not measured"):
        _ = Session(CPU, TOY).rates


def test_full_size_has_bars_and_toy_size_none() -> None:
    assert Session(CPU, FULL).bar("x", 50, "%", 80).met is False
    assert Session(CPU, TOY).bar("x", 50, "%", 80).limit is None


def test_wrong_numbers_are_refused() -> None:
    right = torch.randn(8)
    require_close("kernel", right * 1.001, right)
    with pytest.raises(WrongResult, match="kernel: relative error"):
        require_close("kernel", right * 1.1, right)
    with pytest.raises(WrongResult):
        require_close("kernel", right * float("nan"), right)
    with pytest.raises(WrongResult):
        require_equal("kernel", right, right + 1)


def test_shape_of_the_8b_model_has_its_parameters() -> None:
    assert num_layer_parameters(LLAMA_8B) == pytest.approx(6.98e9, rel=0.001)
    assert num_head_parameters(LLAMA_8B) == 128256 * 4096
    assert prefill_flops(LLAMA_8B, 2048) == pytest.approx(
        2 * 6.98e9 * 2048 + 262_144 * 2048**2 + 2 * 128256 * 4096, rel=0.001
    )


def test_steps_of_an_idle_engine_give_each_sequence_its_own_slots() -> None:
    arrays = step_arrays([0, 20], [[1, 2, 3], [4]])
    assert arrays.slots.tolist() == [0, 1, 2, 8 * 16 + 20]
    assert arrays.positions.tolist() == [0, 1, 2, 20]
    assert arrays.context_lens.tolist() == [3, 21]
    assert arrays.logit_rows.tolist() == [2, 3]
    assert arrays.num_decodes == 0
    assert step_arrays([5, 20], [[1], [4]]).num_decodes == 2


# The table of tuned tiles.


def tile(rows: int, outputs: int, stages: int, shared_bytes: int = 2**16, width: int = 4096) -> TunedTile:
    base = candidates("linear", width)[0]
    sizes = {"block_m": rows, "block_n": outputs, "num_warps": rows // 16, "num_stages": stages}
    return msgspec.structs.replace(base, **sizes, registers=128, shared_bytes=shared_bytes)


def test_chosen_tiles_agree_in_what_orders_sums_and_are_best_in_sum() -> None:
    narrow = [tile(64, 64, 3), tile(64, 64, 4), tile(128, 64, 4)]
    wide = [tile(64, 128, 3), tile(128, 128, 3)]
    unpaired = tile(64, 256, 3)
    seconds = dict(zip([*narrow, *wide, unpaired], (3.0, 2.0, 4.0, 3.0, 3.0, 0.1), strict=True))
    chosen = choose_tiles(list(seconds), seconds.__getitem__)
    assert chosen == {("linear", 64): narrow[1], ("linear", 128): narrow[2]}  # 2 / 2 + 4 / 3 < 3 / 2 + 3 / 3
    seconds[narrow[2]] = 5.0
    chosen = choose_tiles(list(seconds), seconds.__getitem__)
    assert chosen == {("linear", 64): wide[0], ("linear", 128): wide[1]}


def test_of_equal_tiles_the_deepest_of_which_most_fit_a_multiprocessor_is_chosen() -> None:
    tiles = [tile(64, 64, 4, 2**17), tile(64, 64, 2, 2**16), tile(64, 64, 3, 2**16)]
    assert choose_tiles(tiles, lambda tile: 1.0) == {("linear", 64): tiles[2]}


def test_tile_whose_inputs_do_not_divide_the_width_is_not_chosen() -> None:
    assert choose_tiles([tile(64, 64, 3, width=4000)], lambda tile: 1.0) == {}


def test_model_prefers_more_bytes_under_way_until_they_suffice() -> None:
    """Loads of a decode step, and of keys and values, are bound by the latency of memory."""
    few, enough, more = (model_seconds(tile(64, 64, stages)) for stages in (2, 4, 6))
    assert few > enough == more
    kinds: tuple[TileKind, ...] = ("decode", "prefill")
    for kind in kinds:
        like = msgspec.structs.replace(candidates(kind, 128)[0], registers=128, shared_bytes=2**16)
        shallow, deep = (msgspec.structs.replace(like, num_stages=stages) for stages in (5, 7))
        assert model_seconds(shallow) >= model_seconds(deep)
