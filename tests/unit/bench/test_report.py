"""Tables and files of the benches: bars beside figures, failures named, the machine described."""

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
from baton.bench.report import Row, at_least, at_most, format_number, format_table, print_table, write_json

CPU = torch.device("cpu")


def test_table_shows_the_bar_and_whether_it_is_met() -> None:
    lines = format_table("speed", [at_least("ratio", 2.5, "x", 1.9), at_most("delay", 3.0, "ms", 2)]).split(
        "\n"
    )
    assert lines[0] == "speed"
    assert lines[2].split() == ["ratio", "2.50", "x", ">=", "1.9", "ok"]
    assert lines[3].split() == ["delay", "3.00", "ms", "<=", "2", "MISSED"]


def test_a_figure_that_could_not_be_measured_says_why() -> None:
    failed = Row("kernel", None, "", met=False, note="RuntimeError: no")
    table = format_table("speed", [failed, Row("rival", None, "", note="not installed")])
    assert table.splitlines()[-2].split() == ["kernel", "FAILED", "RuntimeError:", "no"]
    assert table.splitlines()[-1].split() == ["rival", "-", "not", "installed"]


def test_values_line_up_on_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("speed", [Row("a", 1.0, "s"), Row("b", 12345.0, "s")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].index(" s") == lines[-2].index(" s")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00"), (0.01234, "0.0123"), (1.5, "1.50"), (45.67, "45.7"), (-12345.6, "-12,346")],
)
def test_numbers_keep_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert format_number(value) == text


def test_file_holds_rows_machine_and_extra(tmp_path: Path) -> None:
    path = tmp_path / "results" / "speed.json"
    write_json(path, "speed", [at_least("ratio", 2.0, "x", 1.9)], {"samples": [1, 2]})
    content = json.loads(path.read_text())
    assert content["rows"][0] == {
        "name": "ratio", "value": 2.0, "unit": "x", "limit": ">= 1.9", "met": True, "note": "",
    }  # fmt: skip
    assert content["samples"] == [1, 2]
    assert content["machine"]["torch"] == torch.__version__


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
