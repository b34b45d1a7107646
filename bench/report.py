"""What every bench prints and keeps: figures with their bars beside them, and the machine they are from."""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from baton.bench.machine import machine_description

_TREE: Final = Path(__file__).resolve().parents[1]
# Of a checkout; an installed Baton keeps them where it is started, not among the libraries.
RESULTS: Final = _TREE / "bench" / "results" if (_TREE / "pyproject.toml").exists() else Path()
_HEADINGS: Final = ("figure", "value", "unit", "bar", "", "note")


@dataclass(frozen=True)
class Row:
    """One figure. `value` None: there is none, and `note` says why; a failure if `met` is False."""

    name: str
    value: float | None
    unit: str
    limit: str | None = None  # the bar as printed: ">= 1.9"
    met: bool | None = None  # None: there is no bar, or it does not apply here
    note: str = ""


def at_least(name: str, value: float, unit: str, bar: float, note: str = "") -> Row:
    return Row(name, value, unit, f">= {bar:g}", value >= bar, note)


def at_most(name: str, value: float, unit: str, bar: float, note: str = "") -> Row:
    return Row(name, value, unit, f"<= {bar:g}", value <= bar, note)


def format_table(title: str, rows: list[Row]) -> str:
    cells = [_HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADINGS))]
    lines = [_line(line, widths) for line in cells]
    return "\n".join((title, *(f"  {line}".rstrip() for line in lines)))


def print_table(title: str, rows: list[Row]) -> None:
    print(format_table(title, rows), flush=True)


def can_plot() -> bool:
    """Plots need matplotlib, figures do without."""
    return importlib.util.find_spec("matplotlib") is not None


def write_json(path: Path, title: str, rows: list[Row], extra: Mapping[str, object]) -> None:
    """Write the rows, the machine and whatever else the bench measured; folders are made as needed."""
    content = {"title": title, "machine": machine_description(), "rows": [asdict(row) for row in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**content, **extra}, indent=1) + "\n")


def format_number(value: float) -> str:
    """Three significant digits at least, and no exponent where a person would write none."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 or size == 0 else f"{value:.3g}"


def _cells(row: Row) -> tuple[str, ...]:
    missing = "-" if row.met is None else "FAILED"
    value = missing if row.value is None else format_number(row.value)
    verdict = "" if row.value is None or row.met is None else "ok" if row.met else "MISSED"
    return row.name, value, row.unit, row.limit or "", verdict, row.note


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    name, value, *rest = (
        cell.rjust(width) if column == 1 else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join((name, value, *rest))
