"""Reports of suites: figures beside their limits, failures named, files written."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from baton.bench.machine import (
    copy_bandwidth_gbps,
    machine_description,
    matmul_peak_tflops,
    read_bandwidth_gbps,
    seconds_per_call,
)
from baton.bench.report import Report, Row, Suite, at_least, at_most, format_number

CPU = torch.device("cpu")


def run(rows: list[Row], folder: Path, *, fails_on_miss: bool = False) -> int:
    """Run a suite that has these rows as a command; return its exit status."""

    def measure(options: argparse.Namespace, report: Report) -> None:
        report.tell("speed")
        report.rows += rows
        report.extra = {"samples": [1, 2]}

    suite = Suite("speed", "speed", lambda parser: None, measure, fails_on_miss=fails_on_miss)
    return suite.main("A suite.", ["--output", str(folder)])


def test_table_shows_each_limit_and_whether_it_is_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = Row("kernel", None, "", met=False, note="RuntimeError: no")
    missing = Row("rival", None, "", note="not installed")
    run([at_least("ratio", 2.5, "x", 1.9), at_most("delay", 3.0, "ms", 2), failed, missing], tmp_path)
    title, _, *lines = capsys.readouterr().out.splitlines()[1:]
    assert title == "speed"
    assert [line.split() for line in lines[:4]] == [
        ["ratio", "2.50", "x", ">=", "1.9", "ok"],
        ["delay", "3.00", "ms", "<=", "2", "MISSED"],
        ["kernel", "FAILED", "RuntimeError:", "no"],
        ["rival", "-", "not", "installed"],
    ]


def test_values_line_up_on_the_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run([Row("a", 1.0, "s"), Row("b", 12345.0, "s")], tmp_path)
    one, other = capsys.readouterr().out.splitlines()[3:5]
    assert one.index(" s") == other.index(" s")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00"), (0.01234, "0.0123"), (1.5, "1.50"), (45.67, "45.7"), (-12345.6, "-12,346")],
)
def test_numbers_keep_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert format_number(value) == text


def test_exit_status_tells_a_failed_figure_and_where_asked_a_missed_limit(tmp_path: Path) -> None:
    missed, failed = at_least("ratio", 1.0, "x", 2.0), Row("kernel", None, "", met=False)
    assert run([missed], tmp_path) == 0
    assert run([missed], tmp_path, fails_on_miss=True) == 1
    assert run([failed], tmp_path) == 1


def test_file_holds_rows_machine_and_extra(tmp_path: Path) -> None:
    run([at_least("ratio", 2.0, "x", 1.9)], tmp_path / "results")
    content = json.loads((tmp_path / "results" / "speed.json").read_text())
    assert content["rows"][0] == {
        "name": "ratio", "value": 2.0, "unit": "x", "limit": ">= 1.9", "met": True, "note": "",
    }  # fmt: skip
    assert content["samples"] == [1, 2]
    assert content["machine"]["torch"] == torch.__version__


def test_progress_is_a_line_an_interval_where_stderr_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    report = Report("speed", "speed", tmp_path)
    for now_s in (1.0, 11.0, 12.0, 25.0):
        report.tell(f"at {now_s:g}", share=now_s / 100)
    assert capsys.readouterr().err.splitlines() == ["    11 s   11% at 11", "    25 s   25% at 25"]


def test_machine_is_described() -> None:
    description = machine_description()
    assert {"cpu", "cores", "memory_gib", "os", "python", "torch", "load", "date"} <= description.keys()
    assert int(description["cores"]) >= 1


def test_rates_of_the_machine_are_positive() -> None:
    assert read_bandwidth_gbps(CPU, 2**20) > 0
    assert copy_bandwidth_gbps(CPU, 2**20) > 0
    assert matmul_peak_tflops(CPU, torch.bfloat16, 64) > 0


def test_every_call_is_made_in_every_run() -> None:
    made: list[str] = []
    assert seconds_per_call([lambda: made.append("a"), lambda: made.append("b")], CPU, num_runs=3) > 0
    assert made == ["a", "b"] * 5
