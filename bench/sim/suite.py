"""Rehearsals: predicted against measured clusters of this machine, and their speed.

    baton bench sim --only speed                    requests a second, and fast against full
    baton bench sim --only accuracy                 calibrates, then serves 12 loads
    baton bench sim --only advice --trace FILE      calibrates, then serves every candidate
    baton bench sim --only accuracy --times FILE    with a model of `baton calibrate`

docs/benchmarks.md explains the figures. Nothing else should run on the machine.
"""

import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import uvloop

from baton.bench.engine.replica import LLAMA_8M
from baton.bench.report import (
    Progress,
    Report,
    Row,
    at_least,
    at_most,
    format_number,
    option,
    percentile,
    suite,
)
from baton.bench.serve.figures import Run, Slo
from baton.bench.sim.calibration import calibrate
from baton.bench.sim.served import (
    LENGTHS,
    WORKLOADS,
    advice_rows,
    all_at_once,
    at_rate,
    capacity,
    serving,
    workload_of,
    workloads_of,
)
from baton.config.cluster import ServeConfig
from baton.config.engine import EngineSettings
from baton.sim.rehearsal import Figure, Layout, Mode, Rehearsal, RehearsalSettings, rehearse
from baton.sim.timed.times import (
    Curve,
    ReplicaTimes,
    StepModel,
    TimeModel,
    TransferModel,
)
from baton.sim.timed.workload import Lengths, TraceRequest, synthetic

LAYOUTS: Final = ("1P1D", "2P1D", "1P2D", "2M")
LOADS: Final = (0.3, 0.6, 0.9)
NUM_AT_ONCE: Final = 100  # requests that show a capacity
CAPACITY_SEED: Final = 99
ADVICE_LAYOUTS: Final = ("1M", "2M", "1P1D", "2P1D", "1P2D")
FIGURES: Final = {
    "output_tokens_per_s": ("throughput", "tokens/s", 5.0),
    "tpot_p50_ms": ("TPOT p50", "ms", 7.0),
    "ttft_p50_ms": ("TTFT p50", "ms", 10.0),
    "ttft_p90_ms": ("TTFT p90", "ms", 15.0),
}
PARTS: Final = ("speed", "accuracy", "advice")
ADVICE_S: Final = 15.0  # of each load that a candidate serves
ADVICE_REQUESTS_PER_S: Final = 400  # more than workers of this machine answer
LEAST_WITHIN: Final = 80.0  # percent of the truths within their intervals
MODES: Final[tuple[Mode, ...]] = ("full", "fast")
AGREEMENT_LAYOUTS: Final = ("1P1D", "2P2D", "3P1D", "1P3D", "4M")
LEAST_PER_S: Final = {"full": 300.0, "fast": 5000.0}
MOST_APART: Final = 3.0  # percent, fast against full
NUM_RESULTS: Final = 3  # timings of which the best counts: other work on the machine only adds


class Case(NamedTuple):
    """One run: a layout under a share of its capacity."""

    layout: Layout
    load: float
    lengths: str

    @property
    def name(self) -> str:
        """The run in words."""
        return f"{self.layout.name}, {self.lengths}, load {self.load:g}"


def cases() -> list[Case]:
    """Return a run for each layout and load; the lengths alternate."""
    kinds = list(LENGTHS)
    return [
        Case(Layout.parse(name), load, kinds[(place + number) % len(kinds)])
        for place, name in enumerate(LAYOUTS)
        for number, load in enumerate(LOADS)
    ]


class Served(NamedTuple):
    """Requests, and how they were answered."""

    trace: Sequence[TraceRequest]
    run: Run


def measured(run: Run) -> dict[str, float]:
    """Return the figures of a served load by the names of a rehearsal."""
    values_ms = {name: [1e3 * each for each in run.values_s(name)] for name in ("ttft", "tpot")}
    return {
        "output_tokens_per_s": run.tokens_per_s,
        "tpot_p50_ms": percentile(values_ms["tpot"], 50),
        "ttft_p50_ms": percentile(values_ms["ttft"], 50),
        "ttft_p90_ms": percentile(values_ms["ttft"], 90),
    }


async def serve_cases(
    cases: Sequence[Case], config: ServeConfig, seconds: float, tell: Progress
) -> tuple[dict[str, Served], dict[Case, Served]]:
    """Serve the cases of one layout. Returns requests at once by the name of their lengths, and the cases."""
    at_once: dict[str, Served] = {}
    served: dict[Case, Served] = {}
    async with serving(cases[0].layout, config) as serve:
        for seed, case in enumerate(cases, 1):
            if case.lengths not in at_once:
                tell(f"{case.layout.name}, {case.lengths}: capacity")
                requests = all_at_once(synthetic(NUM_AT_ONCE, 1.0, LENGTHS[case.lengths], CAPACITY_SEED))
                at_once[case.lengths] = Served(requests, await serve(requests, Slo()))
            tell(f"{case.name}: serving")
            rate = case.load * at_once[case.lengths].run.requests_per_s
            trace = synthetic(rate, seconds, LENGTHS[case.lengths], seed)
            served[case] = Served(trace, await serve(trace, Slo()))
    return at_once, served


def compare(case: Case, predicted: Rehearsal, run: Run) -> Iterator[tuple[str, float, bool, Row]]:
    """Yield each figure's name, its error in percent, whether the truth is in the interval, and its row."""
    truth = measured(run)
    for name, (title, unit, _) in FIGURES.items():
        figure = predicted.figures[name]
        error = 100 * (figure.value / truth[name] - 1)
        is_within = figure.low <= truth[name] <= figure.high
        note = f"predicted {_interval(figure)}, {error:+.1f} %"
        yield name, abs(error), is_within, Row(f"{case.name}: {title}", truth[name], unit, note=note)


def _interval(figure: Figure) -> str:
    value, low, high = map(format_number, figure)
    return f"{value} ({low} to {high})"


def accuracy_rows(options: Namespace, config: ServeConfig, times: TimeModel, report: Report) -> list[Row]:
    """Serve and rehearse every run; return a row for each figure, then the bars."""
    errors: dict[str, list[float]] = {name: [] for name in FIGURES}
    within: list[bool] = []
    rows: list[Row] = []
    for layout, own in groupby(cases(), key=lambda case: case.layout):
        at_once, served = uvloop.run(serve_cases(list(own), config, options.seconds, report.tell))
        for name, (trace, run) in at_once.items():
            note = f"predicted {format_number(capacity(layout, times, trace))}"
            rows.append(Row(f"{layout.name}, {name}: capacity", run.requests_per_s, "requests/s", note=note))
        for case, (trace, run) in served.items():
            report.tell(f"{case.name}: rehearsing")
            predicted = rehearse(trace, case.layout, times, RehearsalSettings(mode="full"))
            failed = len(run.failures)
            if not predicted.is_valid or failed:
                why = "; ".join(predicted.complaints) or f"{failed} answers failed: {run.failures[0]}"
                rows.append(Row(f"{case.name}", None, "", note=why, met=False))
                continue
            for figure, error, is_within, row in compare(case, predicted, run):
                errors[figure].append(error)
                within.append(is_within)
                rows.append(row)
    for figure, (title, _, bar) in FIGURES.items():
        if errors[figure]:
            rows.append(at_most(f"median error: {title}", median(errors[figure]), "%", bar))
    if within:
        rows.append(at_least("within the interval", 100 * sum(within) / len(within), "%", LEAST_WITHIN))
    return rows


def usual_times() -> TimeModel:
    """Return a time model for speed and agreement: a small model, whose steps take a millisecond or two."""
    curves = {
        name: Curve((slope,))
        for name, slope in {"rows": 5e-5, "sequences": 3e-5, "context": 3e-8, "pairs": 2e-9}.items()
    }
    most = {"num_sequences": 256.0, "num_context": 1e7, "num_new": 8192.0, "num_pairs": 1e9}
    alike = (1.0,) * 7
    steps = StepModel(fixed_s=1.2e-3, curves=curves, most=most, errors=alike)
    return TimeModel(
        model="usual",
        fingerprint="usual",
        machine={},
        replicas={1: ReplicaTimes(steps=steps, num_pages=8192, start_s=(2.0,))},
        transfer=TransferModel(
            fixed_s=1e-3, curve=Curve((5e-10,)), streams=(1.0,) * 64, most_bytes=2**30, errors=alike
        ),
        kv_token_bytes=2048,
        page_size=16,
        max_model_len=16_384,
    )


def agreement_rows(times: TimeModel, num_requests: int, report: Report) -> list[Row]:
    """Rehearse loads on layouts in both modes; return a row for each figure, with the worst of them."""
    apart: dict[str, dict[str, float]] = {}
    for number, (layout, load) in enumerate(product(AGREEMENT_LAYOUTS, LOADS)):
        name = list(WORKLOADS)[number % len(WORKLOADS)]
        report.tell(f"both modes: {layout}, {name}, load {load:g}")
        own = Layout.parse(layout)
        requests = synthetic(1.0, 1.2 * num_requests, WORKLOADS[name], number)[:num_requests]
        rate = load * capacity(own, times, requests)
        trace = at_rate(requests, rate, num_requests / rate)
        full, fast = (
            rehearse(trace, own, times, RehearsalSettings(mode=mode, has_intervals=False)).figures
            for mode in MODES
        )
        for figure, value in full.items():
            error = 100 * abs(fast[figure].value / value.value - 1)
            apart.setdefault(figure, {})[f"{layout}, {name}, load {load:g}"] = error
    return [_agreement_row(figure, errors) for figure, errors in apart.items()]


def _agreement_row(figure: str, errors: Mapping[str, float]) -> Row:
    worst = max(errors, key=lambda case: errors[case])
    note = f"median of {len(errors)} loads, worst {errors[worst]:.1f} %: {worst}"
    return at_most(f"fast against full: {figure}", median(errors.values()), "%", MOST_APART, note)


def speed_rows(report: Report, num_requests: int) -> list[Row]:
    """Time rehearsals in processor seconds, and compare the modes."""
    times, rows = usual_times(), []
    lengths = Lengths(100, 300, 20, 60, 0.2)
    for mode in MODES:
        report.tell(f"{mode} mode")
        trace = synthetic(40.0, num_requests / 40.0, lengths)
        settings = RehearsalSettings(mode=mode, has_intervals=False)
        taken_s = []
        for _ in range(NUM_RESULTS):
            begin_s = time.process_time()
            rehearse(trace, Layout.parse("2P2D"), times, settings)
            taken_s.append(time.process_time() - begin_s)
        per_s = len(trace) / min(taken_s)
        note = f"{len(trace)} requests on 2P2D, processor time, best of {NUM_RESULTS}"
        rows.append(at_least(f"{mode} mode", per_s, "requests/s", LEAST_PER_S[mode], note))
    rows += agreement_rows(times, num_requests // 2, report)
    report.tell("1,000 workers")
    begin_s = time.process_time()
    trace = synthetic(4000.0, 1.0, lengths)
    large = rehearse(trace, Layout.parse("400P600D"), times, RehearsalSettings(has_intervals=False))
    note = f"{large.num_requests} requests, fast mode, processor time"
    rows.append(Row("1,000 workers", time.process_time() - begin_s, "s", note=note))
    return rows


def config_of(model: str | None, folder: Path) -> ServeConfig:
    """Return the config of a model. None: a Llama with dummy weights, which is written to the folder."""
    if model is not None:
        return ServeConfig(model=model)
    LLAMA_8M.write(folder)
    return ServeConfig(model=str(folder), engine=EngineSettings(load_format="dummy"))


def times_of(options: Namespace, config: ServeConfig, report: Report) -> TimeModel:
    """Return the time model that the options name, or calibrate one."""
    if options.times is not None:
        return TimeModel.read(options.times)
    report.tell("calibrating")
    times = calibrate(config, options.calibrate_seconds, 3, report.tell)
    times.save(report.folder / "times.json")
    return times


def asked_advice(options: Namespace, config: ServeConfig, times: TimeModel, report: Report) -> list[Row]:
    """Serve the workloads with every layout, and ask for advice."""
    layouts = [Layout.parse(name) for name in ADVICE_LAYOUTS]
    number = round(ADVICE_REQUESTS_PER_S * ADVICE_S)
    workloads = [
        workload_of(name, requests, layouts, times, options.advice_load, ADVICE_S)
        for name, requests in workloads_of(options.trace, number, 1, times.max_model_len).items()
    ]
    return uvloop.run(advice_rows(workloads, layouts, times, config, report.tell))


@suite(
    "sim",
    "Rehearsals",
    option("--only", choices=PARTS, help="one part of the suite (all)"),
    option("--requests", 2000, "that speed rehearses"),
    option("--model", help="that is served (a Llama of 8 million parameters)"),
    option("--times", type=Path, metavar="FILE", help="of `baton calibrate`"),
    option("--seconds", 60.0, "of each served load"),
    option("--calibrate-seconds", 110.0, "without --times"),
    option("--trace", [], action="append", type=Path, metavar="FILE", help="that advice is asked for"),
    option("--advice-load", 0.4, "share of the capacity of the best candidate"),
)
def measure(options: Namespace, report: Report) -> None:
    """Measure speed, then accuracy, then advice."""
    parts = [options.only] if options.only else PARTS
    if "speed" in parts:
        report.rows += speed_rows(report, options.requests)
    if parts == ["speed"]:
        return
    with TemporaryDirectory() as folder:
        config = config_of(options.model, Path(folder))
        times = times_of(options, config, report)
        if "accuracy" in parts:
            report.rows += accuracy_rows(options, config, times, report)
        if "advice" in parts:
            report.rows += asked_advice(options, config, times, report)
