"""Reports of suites: figures beside their limits, failures named, files written."""

import argparse
import json
import re
import shutil
import subprocess
from functools import partial
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
from baton.bench.report import Plot, Report, Row, at_least, at_most, format_number, suite

CPU = torch.device("cpu")


def run(rows: list[Row], folder: Path, *, fails_on_miss: bool = False) -> int:
    """Run a suite that has these rows as a command; return its exit status."""

    def measure(options: argparse.Namespace, report: Report) -> None:
        report.tell("speed")
        report.rows += rows
        report.extra = {"samples": [1, 2]}

    try:
        suite("speed", "speed", fails_on_miss=fails_on_miss)(measure).main(
            "A suite.", ["--output", str(folder)]
        )
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


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


def test_what_did_not_happen_in_time_has_failed_and_has_no_made_up_figure(tmp_path: Path) -> None:
    row = at_most("whole again after", None, "s", 90)
    assert (row.value, row.limit, row.has_failed) == (None, "<= 90", True) and row.note == "timed out"
    assert run([row], tmp_path) == 1


def test_turns_favour_none_and_the_first_round_warms_up(tmp_path: Path) -> None:
    report, made = Report("speed", "speed", tmp_path), list[str]()
    subjects = {name: partial(made.append, name) for name in "ab"}
    assert report.in_rounds(subjects, 2) == {"a": [None] * 2, "b": [None] * 2}
    assert made == ["a", "b", "b", "a", "a", "b"]
    assert list(report.turns("ab", 2)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]


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


HOSTILE = "</script><img src=x onerror=alert(1)> & \u2028 DATA"
FAILED = 'data-error="'  # the mark of a script that failed
CURVES = {"ours": [(1.0, 0.1), (30.0, 0.6), (2000.0, 1.0)], HOSTILE: [(3.0, 0.2), (900.0, 1.0)], "none": []}


def page_with(plot: Plot | None, folder: Path) -> Path:
    """The page of a report with hostile text everywhere."""
    report = Report("speed", HOSTILE, folder)
    report.rows += [at_least(HOSTILE, 1.0, "x", 2.0, HOSTILE), Row("kernel", None, "", met=False, note="no")]
    report.plot = plot
    return report.save().with_suffix(".html")


def dom_of(page: Path, script: str = "") -> str:
    """The document as Chromium has it once its scripts, and `script` after them, have run."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    watched = page.with_name("watched.html")
    text = page.read_text()
    note = "document.documentElement.setAttribute('data-error', why)"
    watch = f"<script>window.onerror = (why) => {note}</script>"
    watched.write_text(text.replace("<style>", f"{watch}<style>", 1) + f"<script>{script}</script>")
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}")
    command = [chromium, *options, "--dump-dom", watched.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_page_draws_its_plots_and_escapes_its_text(tmp_path: Path) -> None:
    plot = Plot({"TTFT": CURVES, "TPOT": CURVES}, x_label="ms", y_label="share", is_log=True, is_stepped=True)
    dom = dom_of(page_with(plot, tmp_path))
    assert FAILED not in dom and "<img" not in dom.partition("<h1>")[2].partition("<script")[0]
    assert dom.count('<figure class="plot">') == 2 and dom.count("<polyline") == 4
    assert dom.count("<button") == 4, "a curve without points has no button"
    body = dom.partition("<tbody>")[2].partition("</tbody>")[0]
    assert body.count("<tr>") == 2 and "&lt;/script&gt;" in body and ">MISSED<" in body and ">FAILED<" in body


def test_click_hides_a_curve_and_the_pointer_reads_values(tmp_path: Path) -> None:
    plot = Plot({"rate": {"ours": CURVES["ours"], "theirs": CURVES[HOSTILE]}}, is_log=True)
    click = "document.querySelectorAll('button')[1].click();"
    move = "const box = document.querySelector('svg').getBoundingClientRect();"
    move += (
        "document.querySelector('svg').dispatchEvent(new PointerEvent('pointermove', {clientX: box.right}))"
    )
    dom = dom_of(page_with(plot, tmp_path), click + move)
    assert FAILED not in dom
    assert dom.count("<polyline") == 1 and dom.count('aria-pressed="false"') == 1
    assert "<output>ours: 2000 \u2192 1</output>" in dom


def test_page_without_a_plot_has_its_table_and_names_no_other_place(tmp_path: Path) -> None:
    page = page_with(None, tmp_path)
    text = page.read_text()
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|fetch\(|import\(", text.replace("src=x", ""))
    assert "default-src 'none'" in text and len(text) < 40_000
    dom = dom_of(page)
    assert FAILED not in dom and "<figure" not in dom and dom.count("<tr>") == 3
