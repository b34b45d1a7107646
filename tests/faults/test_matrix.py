"""The fault matrix of docs/faults.md has every fault once, and each test that it names exists."""

import re
from pathlib import Path
from typing import Final

from baton.cluster.cli.commands.bench import SUITES

ROOT: Final = Path(__file__).resolve().parents[2]
NUM_FAULTS: Final = 40
ROWS: Final = re.findall(
    r"^\| (F\d+) \|(.*)\|$", (ROOT / "docs" / "faults.md").read_text(), flags=re.MULTILINE
)
TEST: Final = re.compile(r"`([\w/]+\.py)::(\w+)`")
SUITE: Final = re.compile(r"`baton bench ([\w-]+)")


def test_every_fault_has_one_row() -> None:
    assert [name for name, _ in ROWS] == [f"F{number}" for number in range(1, NUM_FAULTS + 1)]


def test_every_row_names_a_test_or_a_suite() -> None:
    bare = [name for name, cells in ROWS if not (TEST.search(cells) or SUITE.search(cells))]
    assert not bare


def test_every_named_test_exists() -> None:
    named = {found for _, cells in ROWS for found in TEST.findall(cells)}
    assert len(named) > NUM_FAULTS
    missing = [f"{path}::{name}" for path, name in sorted(named) if not _has_test(path, name)]
    assert not missing


def test_every_named_suite_exists() -> None:
    named = {found for _, cells in ROWS for found in SUITE.findall(cells)}
    assert named and named <= SUITES.keys()


def test_every_slow_test_has_a_target() -> None:
    targets = (ROOT / "Makefile").read_text()
    folders = set(re.findall(r"tests/[\w/]+(?:\.py)?", targets))
    slow = [
        path.relative_to(ROOT)
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.slow" in path.read_text()
    ]
    assert len(slow) > 20
    missing = [str(path) for path in slow if not folders & {str(path), *map(str, path.parents)}]
    assert not missing


def _has_test(path: str, name: str) -> bool:
    file = ROOT / "tests" / path
    return file.exists() and re.search(rf"^(async )?def {name}\(", file.read_text(), re.MULTILINE) is not None
