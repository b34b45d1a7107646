"""`baton bench`: every suite by the name of its files, and its exit status."""

import argparse
import re
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.bench.report import Report, Row, suite
from baton.cluster.cli.commands.bench import SUITES
from tests.unit.cluster.conftest import Baton


@pytest.mark.parametrize("name", SUITES)
def test_suite_is_called_as_its_files_are(name: str) -> None:
    assert import_module(f"baton.bench.{SUITES[name]}").measure.name == name


def test_every_suite_is_a_command() -> None:
    folder = Path(__file__).resolve().parents[5] / "bench"
    modules = [
        path for path in folder.rglob("*.py") if re.search("^@suite\\(", path.read_text(), re.MULTILINE)
    ]
    names = [".".join(path.relative_to(folder).with_suffix("").parts) for path in modules]
    assert sorted(names) == sorted(SUITES.values())


def test_failed_figure_is_an_exit_status(
    baton: Baton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(options: argparse.Namespace, report: Report) -> None:
        report.rows.append(Row("rival", None, "GB/s", met=False, note="it has ended"))

    module = SimpleNamespace(__doc__="A suite.", measure=suite("broken", "broken")(measure))
    monkeypatch.setitem(SUITES, "broken", "broken")
    monkeypatch.setitem(sys.modules, "baton.bench.broken", module)
    status, out, _ = baton("bench", "broken", "--output", str(tmp_path))
    assert status == 1 and "FAILED" in out
