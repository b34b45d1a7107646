"""The report of a suite: figures beside their limits, as a table, as JSON and as a plot.

A suite is a function `measure(options, report)`, which may be a coroutine function, under the decorator
`suite`. It adds rows to the report and tells what it measures. The suite prints the machine, the progress and
the table. Into the folder that `--output` names it writes NAME.json, and NAME.html with the table and
interactive plots, which loads nothing from anywhere.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, Final, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np

from baton.bench.machine import machine_description

NameT = TypeVar("NameT")
ResultT = TypeVar("ResultT")
_TREE: Final = Path(__file__).resolve().parents[1]
# In a checkout, bench/results; an installed Baton writes into the current folder, not among the libraries.
RESULTS: Final = _TREE / "bench" / "results" if (_TREE / "pyproject.toml").exists() else Path()
PAGE: Final = Path(__file__).with_name("report.html")
TELL_EVERY_S: Final = 10.0  # where stderr is no terminal
HEADINGS: Final = ("figure", "value", "unit", "bar", "", "note")


@dataclass(frozen=True)
class Row:
    """One figure. `value` None: there is no figure, `note` says why, and the row failed if `met` is False."""

    name: str
    value: float | None
    unit: str
    limit: str | None = None  # as printed: ">= 1.9"
    met: bool | None = None  # None: there is no limit, or it does not apply here
    note: str = ""

    @property
    def has_failed(self) -> bool:
        return self.value is None and self.met is False


def at_least(name: str, value: float, unit: str, limit: float | None, note: str = "") -> Row:
    """Return a row that meets its limit when `value` is at least `limit`; None is no limit."""
    if limit is None:
        return Row(name, value, unit, note=note)
    return Row(name, value, unit, f">= {limit:g}", value >= limit, note)


def at_most(name: str, value: float | None, unit: str, limit: float | None, note: str = "") -> Row:
    """Return a row that meets its limit when `value` is at most `limit`; None is no limit.

    value: seconds until an event, for instance; None: the wait for the event timed out. The row has then
    failed if it has a limit.
    """
    if limit is None:
        return Row(name, value, unit, note=note)
    if value is None:
        return Row(name, None, unit, f"<= {limit:g}", False, note or "timed out")
    return Row(name, value, unit, f"<= {limit:g}", value <= limit, note)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile, interpolated between the two nearest values; `values` must not be empty."""
    return float(np.percentile(values, percent))


def format_number(value: float) -> str:
    """Return at least three significant digits, without an exponent where a person would write none."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 or size == 0 else f"{value:.3g}"


def print_table(title: str, rows: Iterable[Row]) -> None:
    """Print one line a row: figure, value, unit, limit, verdict, note."""
    print(title)
    lines = [HEADINGS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        name, value, *others = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join((name, value.strip().rjust(len(value)), *others)).rstrip())


def _cells(row: Row) -> tuple[str, ...]:
    missing = "FAILED" if row.has_failed else "-"
    value = missing if row.value is None else format_number(row.value)
    verdict = "" if row.value is None or row.met is None else "ok" if row.met else "MISSED"
    return row.name, value, row.unit, row.limit or "", verdict, row.note


class Progress:
    """Shows on stderr what is measured: a live line on a terminal, else a line every TELL_EVERY_S.

    At the end of its context the live line is gone, also after an error.
    """

    def __init__(self) -> None:
        self._begin_s = self._told_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def __call__(self, text: str, share: float | None = None) -> None:
        """Tell what is measured now. share: how much is done, from 0 to 1, where that is known."""
        now_s, is_live = time.monotonic(), sys.stderr.isatty()
        if is_live or now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            done = "" if share is None else f"{share:4.0%} "
            self.clear()
            end = "" if is_live else "\n"
            print(f"{now_s - self._begin_s:6.0f} s  {done}{text}", end=end, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the live line off the terminal, until the next call."""
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


Curve: TypeAlias = Sequence[tuple[float, float]]


def ranked_shares(values: Iterable[float]) -> Curve:
    """Return the share of values that are no larger, over the values."""
    ranked = sorted(values)
    return [(value, (place + 1) / len(ranked)) for place, value in enumerate(ranked)]


def paired_ratio(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """Return the median over the rounds of one figure over the other figure of the same round."""
    return median(one / other for one, other in zip(ours, theirs, strict=True))


def spread(values: Sequence[float]) -> str:
    """Return the least and the greatest value as text, and their number."""
    return f"{format_number(min(values))} to {format_number(max(values))} in {len(values)} runs"


def mean_with_error(values: Sequence[float]) -> str:
    """Return the mean as text, with its standard error where there are several values."""
    error = f" +- {stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    return f"mean of the rounds {mean(values):.3f}{error}"


@dataclass(frozen=True)
class Plot:
    """Panels by their titles, each with curves by their labels."""

    panels: Mapping[str, Mapping[str, Curve]]
    x_label: str = ""
    y_label: str = ""
    is_log: bool = False  # the x axis
    is_stepped: bool = False  # a value holds until the next x


class Report:
    """The rows of one run. `name` names the files, `extra` is what the JSON keeps beside the rows."""

    def __init__(self, name: str, title: str, folder: Path) -> None:
        self.name, self.title, self.folder = name, title, folder
        self.rows: list[Row] = []
        self.extra: dict[str, object] = {}
        self.plot: Plot | None = None
        self.tell = Progress()
        self._num_shown = 0

    @property
    def has_missed(self) -> bool:
        return any(row.met is False for row in self.rows)

    def show(self, title: str, rows: Iterable[Row]) -> None:
        """Add rows and print them at once, as a table of their own."""
        assert self._num_shown == len(self.rows), "rows that were added before have not been shown"
        self.rows += rows
        self._show(title)

    def turns(
        self, subjects: Iterable[NameT], num_rounds: int, what: str = ""
    ) -> Iterator[tuple[int, NameT]]:
        """Yield the number of each round with each subject.

        Every other round has the subjects backwards: a machine that slows down or speeds up favours none.
        """
        ordered = list(subjects)
        for number in range(num_rounds):
            for subject in reversed(ordered) if number % 2 else ordered:
                name = f": {subject}" if isinstance(subject, str) else ""
                self.tell(f"{what}round {number + 1} of {num_rounds}{name}", number / num_rounds)
                yield number, subject

    def in_rounds(
        self, subjects: Mapping[NameT, Callable[[], ResultT]], num_rounds: int, what: str = ""
    ) -> dict[NameT, list[ResultT]]:
        """Run every subject once a round, in turns; return the results by subject.

        A round before the others warms up; its results do not count.
        """
        found: dict[NameT, list[ResultT]] = {name: [] for name in subjects}
        for _, name in self.turns(subjects, 1 + num_rounds, what):
            found[name].append(subjects[name]())
        return {name: results[1:] for name, results in found.items()}

    def save(self) -> Path:
        """Write what there is into NAME.json and NAME.html; return the former. Folders are made as needed."""
        path, rows = self.folder / f"{self.name}.json", [asdict(row) for row in self.rows]
        content = {"title": self.title, "machine": machine_description(), "rows": rows, **self.extra}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
        path.with_suffix(".html").write_text(self._page())
        return path

    def _page(self) -> str:
        """The report as one HTML page. No text of it can end the script that holds the data."""
        data = {
            "title": self.title,
            "machine": machine_description(),
            "rows": [_cells(row) for row in self.rows],
            "plots": None if self.plot is None else asdict(self.plot),
        }
        return PAGE.read_text().replace("DATA", json.dumps(data).replace("</", "<\\/"), 1)

    def finish(self) -> None:
        """Print the rows that have not been shown; write the files."""
        if self._num_shown < len(self.rows):
            self._show(self.title)
        print(f"kept in {self.save()}", flush=True)

    def _show(self, title: str) -> None:
        self.tell.clear()
        print_table(title, self.rows[self._num_shown :])
        self._num_shown = len(self.rows)


Measure: TypeAlias = Callable[[argparse.Namespace, "Report"], Coroutine[Any, Any, None] | None]


class Option(NamedTuple):
    """An option of a suite, as `ArgumentParser.add_argument` takes one."""

    name: str
    settings: Mapping[str, Any]


def option(name: str, default: object = None, help: str = "", **settings: Any) -> Option:
    """Return an option whose help ends with its default, if that is a number or a word.

    default: gives the type where `settings` has none; False makes a switch, a tuple an option of many values.
    """
    if default is False:
        return Option(name, {"action": "store_true", "help": help})
    if isinstance(default, tuple) and "type" not in settings:
        settings = {"nargs": "+", "type": type(default[0])} | settings
    elif isinstance(default, int | float):
        settings = {"type": type(default), "metavar": "N"} | settings
    if default and isinstance(default, int | float | str) and "(" not in help:
        help = f"{help} ({default})".strip()
    if name.startswith("-"):
        settings["default"] = list(default) if isinstance(default, list) else default
    return Option(name, {"help": help} | settings)


@dataclass(frozen=True)
class Suite:
    """A suite, and how to run it as a command. `name` names the files."""

    name: str
    title: str
    measure: Measure
    options: Sequence[Option] = ()  # its own; --output is added to them
    fails_on_miss: bool = False  # the exit status is 1 when a limit was missed, too
    output: Path = RESULTS

    def main(self, doc: str | None, words: Sequence[str] | None = None) -> None:
        """Run the suite as a command of its own. SystemExit: see `run`."""
        parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.add_options(parser)
        if status := self.run(parser.parse_args(words)):
            sys.exit(status)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that `run` needs."""
        output = option("--output", self.output, "of the report's files", type=Path, metavar="FOLDER")
        for name, settings in (*self.options, output):
            parser.add_argument(name, **settings)

    def run(self, options: argparse.Namespace) -> int:
        """Measure, print and keep; return the exit status, 1 when a figure failed.

        Raises what `measure` raises.
        """
        print(", ".join(f"{key} {value}" for key, value in machine_description().items()), flush=True)
        report = Report(self.name, self.title, options.output)
        with report.tell:
            measuring = self.measure(options, report)
            if measuring is not None:
                asyncio.run(measuring)
        report.finish()
        has_failed = any(row.has_failed for row in report.rows)
        return int(has_failed or (self.fails_on_miss and report.has_missed))


def suite(
    name: str, title: str, *options: Option, fails_on_miss: bool = False, output: Path = RESULTS
) -> Callable[[Measure], Suite]:
    """Return the decorator that makes a suite of its function `measure`."""
    return lambda measure: Suite(name, title, measure, options, fails_on_miss, output)
