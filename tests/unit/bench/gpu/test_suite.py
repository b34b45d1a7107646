"""The GPU suite at toy size: every stage end to end, failures on their own, the budget kept."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.bench.engine.replica import num_head_parameters, num_layer_parameters
from baton.bench.gpu import kernels, model
from baton.bench.gpu.model import prefill_flops, step_arrays
from baton.bench.gpu.session import FULL, LLAMA_8B, TOY, Session, WrongResult, require_close, require_equal
from baton.bench.gpu.suite import STAGES, SUITE, Stage, run_stages
from baton.bench.report import Report, Row
from tests.unit.bench.gpu.toy import CPU, run_toy


def good(session: Session) -> Iterator[Row]:
    yield Row("figure", 1.0, "s")


def bad(session: Session) -> Iterator[Row]:
    yield Row("before", 1.0, "s")
    raise WrongResult("kernel: off by one\nsecond line")


def test_whole_command_runs_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = SUITE.main(None, ["--toy", "--output", str(tmp_path)])
    assert status == 0, capsys.readouterr()
    content = json.loads((tmp_path / "gpu-toy.json").read_text())
    assert set(content["seconds"]) == {stage.name for stage in STAGES}
    assert all(row["value"] is not None for row in content["rows"])
    names = "\n".join(row["name"] for row in content["rows"])
    for part in ("read bandwidth", "pages of 64", "prefill kernel", "kv gather", "cuda_ipc", "nccl"):
        assert part in names
    assert "decode step, 4" in names and "ragged" in names
    for part in ("gather, whole pages", "scatter, whole pages", "gather, one layer", "scatter, one layer"):
        assert part in names


def test_failed_stage_is_named_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_toy([Stage("bad", bad, 0), Stage("good", good, 0)], tmp_path)
    values = [(row.name, row.value) for row in report.rows]
    assert values == [("before", 1.0), ("bad", None), ("figure", 1.0)]
    assert report.rows[1].note == "WrongResult: kernel: off by one" and report.rows[1].has_failed
    assert "second line" in capsys.readouterr().err
    assert "second line" in json.loads((tmp_path / "toy.json").read_text())["failures"]["bad"]


def test_stage_that_may_not_end_in_time_is_not_started(tmp_path: Path) -> None:
    report = Report("full", "full", tmp_path)
    run_stages([Stage("long", bad, 100), Stage("short", good, 1)], Session(CPU, FULL), 50, report)
    assert [(row.name, row.value) for row in report.rows] == [("long", None), ("figure", 1.0)]
    assert report.rows[0].note.startswith("not started") and not report.extra["failures"]


def test_missing_transformers_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model, "find_spec", lambda name: None)
    (row,) = run_toy([Stage("rival", model.against_transformers, 0)], tmp_path).rows
    assert (row.value, row.met, row.note) == (None, None, "not installed")


def test_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def zeros(query_BHD: torch.Tensor, *arguments: object, **settings: object) -> torch.Tensor:
        return torch.zeros_like(query_BHD)

    monkeypatch.setattr(kernels, "paged_attention_decode", zeros)
    (row,) = run_toy([Stage("decode", kernels.decode_kernel, 0)], tmp_path).rows
    assert (row.name, row.value, row.met) == ("decode", None, False)
    assert "decode kernel: relative error" in row.note


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
