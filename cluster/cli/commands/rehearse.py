"""Plan a cluster without running it: `baton calibrate`, `baton rehearse`, `baton advise`.

    baton calibrate MODEL --out times.json              measure real workers of this machine, two minutes
    baton rehearse --times times.json --workers 2P6D --trace FILE
    baton rehearse --times times.json --workers 4M --rate 4 --lengths 400-1600,64-256,0.3
    baton advise MODEL --times times.json --trace FILE --slo ttft=0.5,tpot=0.05

A rehearsal runs the production router, and in the full mode every production process, on a virtual clock.
Where the load leaves the calibrated ranges it prints no figure, says why, and ends with status 1.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import yaml

from baton.cluster.cli import output
from baton.cluster.cli.options import CliCommand, Parser
from baton.cluster.cli.settings import add_serve_options, serve_settings
from baton.cluster.files import make_folder
from baton.cluster.model_directory import served_name
from baton.config.engine import EngineSettings
from baton.config.loader import build, flatten, leaves, nest
from baton.errors import FAILED, ConfigError
from baton.sim.advice import Advice, Option, RunAll, Search, layouts
from baton.sim.advice import advise as run_search
from baton.sim.rehearsal import Layout, Rehearsal, RehearsalSettings
from baton.sim.rehearsal import rehearse as run_rehearsal
from baton.sim.timed.times import TimeModel
from baton.sim.timed.workload import Lengths, TraceRequest, read_trace, synthetic
from baton.tenants import Sla

if TYPE_CHECKING:
    from baton.bench.report import Row

MAX_DRIFT: Final = 0.2  # of a machine that does nothing else


def _add_calibrate(parser: Parser) -> None:
    add_serve_options(parser)
    parser.add_argument("--out", type=Path, default=Path("times.json"), metavar="FILE", help="(times.json)")
    parser.add_argument("--seconds", type=float, default=110.0, help="that measuring takes (110)")
    parser.add_argument(
        "--neighbours",
        type=int,
        default=3,
        metavar="N",
        help="workers that compute beside one on this machine; 0: workers have devices of their own (3)",
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each worker on a CPU (1)")


def _calibrate(arguments: argparse.Namespace) -> None:
    from baton.bench.report import Progress
    from baton.bench.sim.calibration import calibrate

    given = serve_settings(arguments)
    if arguments.seconds < 10 or arguments.neighbours < 0 or arguments.threads < 1:
        raise ConfigError("expected --seconds of 10 or more, --neighbours of 0, --threads of 1 or more")
    make_folder(arguments.out.parent)  # before minutes of measuring
    with Progress() as tell:
        model = calibrate(given.build(), arguments.seconds, arguments.neighbours, tell, arguments.threads)
    model.save(arguments.out)
    output.show(*_model_lines(model), f"written to {arguments.out}")


def _model_lines(model: TimeModel) -> list[str]:
    lines = []
    for size, replica in model.replicas.items():
        steps = replica.steps
        name = f"TP {size}" + (f", PP {replica.num_stages}" if replica.num_stages > 1 else "")
        low, high = 100 * (steps.errors[1] - 1), 100 * (steps.errors[-2] - 1)
        ranges = ", ".join(f"{name[4:]} <= {most:,.0f}" for name, most in steps.most.items())
        lines.append(f"{name}: steps {low:+.1f} to {high:+.1f} % off where held out; calibrated for {ranges}")
        lines.append(f"{name}: starts in {min(replica.start_s):.1f} to {max(replica.start_s):.1f} s")
    slower = ", ".join(f"{each:.2f}" for each in model.neighbours[1:])
    lines += [f"beside 1, 2, ... busy workers steps take {slower} times as long"] if slower else []
    if len(model.neighbours) == 1:
        lines.append("workers beside others were not measured: for devices of their own, give --neighbours 0")
    lines.append(f"the machine drifted by {100 * model.drift:.1f} %")
    if model.drift > MAX_DRIFT:
        lines.append(
            "something else ran meanwhile: calibrate again on an idle machine, or expect wide intervals"
        )
    return lines


def _add_load(parser: Parser) -> None:
    parser.add_argument("--times", type=Path, required=True, metavar="FILE", help="of `baton calibrate`")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Mooncake's JSON lines, Azure's CSV, a router's decision log, or a bundle of `baton bundle`",
    )
    load.add_argument("--scale", type=float, default=1.0, help="divides the trace's lengths (1)")
    load.add_argument("--speed", type=float, default=1.0, help="2: the trace in half its time (1)")
    load.add_argument("--limit", type=int, metavar="N", help="the trace's first N requests (all)")
    load.add_argument("--rate", type=float, help="instead: requests a second, Poisson")
    load.add_argument("--duration", type=float, default=60.0, metavar="S", help="of --rate (60)")
    load.add_argument(
        "--lengths",
        default="256-512,64-128",
        metavar="SPEC",
        help="of --rate: P50-P90 of prompts, P50-P90 of answers[,their correlation[,shared part]]",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--slo", default="", metavar="SPEC", help="objectives in seconds, as ttft=0.5,tpot=0.05"
    )
    parser.add_argument(
        "--apart", action="store_true", help="workers have machines of their own and share no processor"
    )


def _add_rehearse(parser: Parser) -> None:
    _add_load(parser)
    parser.add_argument("--workers", required=True, metavar="SPEC", help="2P6D, or 4M without roles")
    parser.add_argument("--prefill-tp", type=int, default=1, metavar="N", help="ranks of each (1)")
    parser.add_argument("--decode-tp", type=int, default=1, metavar="N", help="ranks of each (1)")
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="tokens of a step")
    parser.add_argument(
        "--block-size", "--page-size", dest="page_size", type=int, metavar="N", help="tokens of a page"
    )
    parser.add_argument(
        "--policy", default=RehearsalSettings().policy, metavar="NAME", help="of routing (cost)"
    )
    parser.add_argument("--fast", action="store_true", help="sum steps in closed form")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def sla_of(text: str) -> Sla:
    """Read ttft=SECONDS,tpot=SECONDS. ConfigError for others."""
    try:
        given = {
            name.strip(): float(value)
            for name, value in (part.split("=") for part in text.split(",") if part)
        }
        if not set(given) <= {"ttft", "tpot"} or any(not value > 0 for value in given.values()):
            raise ValueError
    except ValueError:
        raise ConfigError(f"--slo: expected such as ttft=0.5,tpot=0.05, got {text!r}") from None
    return Sla(**{f"{name}_ms": 1e3 * value for name, value in given.items()})


def load_of(arguments: argparse.Namespace) -> list[TraceRequest]:
    """Return the requests of the options. ConfigError for options that contradict each other."""
    if (arguments.trace is None) == (arguments.rate is None):
        raise ConfigError("give --trace FILE, or --rate with --lengths")
    if arguments.trace is None:
        return synthetic(arguments.rate, arguments.duration, Lengths.parse(arguments.lengths), arguments.seed)
    if not arguments.speed > 0:
        raise ConfigError(f"--speed: expected more than 0, got {arguments.speed}")
    trace = read_trace(arguments.trace, scale=arguments.scale, limit=arguments.limit)
    return [
        msgspec.structs.replace(each, arrival_s=(each.arrival_s - trace[0].arrival_s) / arguments.speed)
        for each in trace
    ]


def _rehearse(arguments: argparse.Namespace) -> int:
    layout = msgspec.structs.replace(
        Layout.parse(arguments.workers),
        prefill_tp=arguments.prefill_tp,
        decode_tp=arguments.decode_tp,
        step_tokens=arguments.max_num_batched_tokens,
        page_size=arguments.page_size,
    )
    build(EngineSettings, nest(_engine_of(layout)))  # raises ConfigError for settings that no worker takes
    settings = RehearsalSettings(
        mode="fast" if arguments.fast else "full",
        policy=arguments.policy,
        sla=sla_of(arguments.slo),
        shares_machine=not arguments.apart,
        seed=arguments.seed,
    )
    times = TimeModel.read(arguments.times)
    result = run_rehearsal(load_of(arguments), layout, times, settings)
    if arguments.json:
        output.write(msgspec.json.encode(result).decode() + "\n")
    else:
        output.show(*_lines(result, times))
    return 0 if result.is_valid else FAILED


def _lines(result: Rehearsal, times: TimeModel) -> list[output.Part]:
    head = f"{result.layout.name} of {times.model}, {result.num_requests} requests, {result.mode} mode"
    if not result.is_valid:
        return [
            f"{head}: no figures, for the load leaves what was calibrated",
            *(f"  {each}" for each in result.complaints),
        ]
    columns = ("figure", "predicted", "from", "to")
    rows = [(name, *map(_shown, figure)) for name, figure in result.figures.items()]
    total_s = sum(result.parts.values())
    parts = [
        f"{name} {100 * seconds / total_s:.1f} %"
        for name, seconds in sorted(result.parts.items(), key=lambda part: -part[1])
        if seconds > 0.001 * total_s
    ]
    busy = ", ".join(f"{role} {100 * share:.0f} %" for role, share in result.busy.items())
    off = f"within the calibrated ranges; the time model is {100 * times.error:.1f} % off"
    if times.error > MAX_DRIFT:
        off += ": for narrower figures run `baton calibrate` again, on a machine that does nothing else"
    return [
        f"{head}, {result.duration_s:.1f} s",
        output.table(columns, rows),
        f"time of a request: {', '.join(parts)}",
        f"busy: {busy}; refused: {result.num_refused}",
        off,
    ]


def _shown(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _add_advise(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="that the settings serve, as for `baton serve`")
    _add_load(parser)
    parser.add_argument(
        "--devices", type=int, metavar="N", help="at most (as many workers as were calibrated, or 8)"
    )
    parser.add_argument(
        "--attainment", type=float, default=0.95, help="share of requests that must meet the objectives"
    )
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="that search (2)")
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="FOLDER", help="of serve.yaml, advise.html, advise.json"
    )


def _advise(arguments: argparse.Namespace) -> int:
    from baton.bench.report import Plot, Report

    times = TimeModel.read(arguments.times)
    if times.model != served_name(arguments.model).rpartition("/")[2]:
        raise ConfigError(f"--times: {arguments.times} is of {times.model}, not of {arguments.model}")
    ranks = min(size * each.num_stages for size, each in times.replicas.items())
    devices = arguments.devices or (0 if arguments.apart else ranks * len(times.neighbours)) or 8
    if devices < 1 or not 0 < arguments.attainment <= 1 or arguments.processes < 1:
        raise ConfigError("expected --devices and --processes of 1 or more, --attainment of 0 to 1")
    settings = RehearsalSettings(
        sla=sla_of(arguments.slo), shares_machine=not arguments.apart, seed=arguments.seed
    )
    make_folder(arguments.out)  # before minutes of searching
    search = Search(load_of(arguments), times, settings, arguments.attainment)
    report = Report("advise", f"Layouts for {arguments.model}", arguments.out)
    with ExitStack() as stack:
        stack.callback(report.tell.clear)
        run_all: RunAll = map
        if arguments.processes > 1:
            pool = ProcessPoolExecutor(arguments.processes, get_context("spawn"))
            run_all = stack.enter_context(pool).map
        advice = run_search(search, layouts(times, devices), run_all, report.tell)
    report.rows = [_option_row(option, arguments.attainment) for option in advice.options]
    report.plot = Plot(_panels(advice), x_label="ms", y_label="output tokens/s a device")
    report.extra = {"advice": msgspec.to_builtins(advice)}
    report.save()
    written = [report.folder / "advise.html", report.folder / "advise.json"]
    if advice.chosen is not None:
        written.append(report.folder / "serve.yaml")
        written[-1].write_text(serve_yaml(arguments.model, advice.chosen.layout, times.engine))
    output.show(_options_table(advice), *advice.reasons, f"written: {', '.join(map(str, written))}")
    return 0 if advice.chosen is not None else FAILED


OPTION_COLUMNS: Final = (
    "layout",
    "devices",
    "attained",
    "TTFT p90 ms",
    "TPOT p90 ms",
    "tokens/s a device",
    "headroom",
    "",
)


def _options_table(advice: Advice) -> output.Part:
    rows: list[tuple[str, ...]] = []
    for option in advice.options:
        known, figures = option.best_known, option.best_known.figures
        mark = {id(advice.chosen): "chosen", id(advice.runner_up): "runner-up"}.get(id(option), known.mode)
        if not known.is_valid:
            why = "; ".join(known.complaints)
            rows.append((option.layout.name, str(option.layout.num_ranks), *("-",) * 5, why))
            continue
        values = (figures["ttft_p90_ms"].value, figures["tpot_p90_ms"].value, _per_device(known))
        headroom = f"{option.headroom:g}x" if option.headroom else "-"
        attained = f"{figures['attainment'].value:.1%}"
        rows.append(
            (option.layout.name, str(option.layout.num_ranks), attained, *map(_shown, values), headroom, mark)
        )
    return output.table(OPTION_COLUMNS, rows)


def _per_device(result: Rehearsal) -> float:
    return result.figures["output_tokens_per_s"].value / result.layout.num_ranks


def _option_row(option: Option, attainment: float) -> "Row":
    from baton.bench.report import Row, at_least

    known, name = option.best_known, f"{option.layout.name}: attained"
    if not known.is_valid:
        return Row(name, None, "%", note="; ".join(known.complaints))
    figures = known.figures
    note = ", ".join(
        f"{figure} {figures[figure].value:,.1f} ({figures[figure].low:,.1f} to {figures[figure].high:,.1f})"
        for figure in ("ttft_p90_ms", "tpot_p90_ms", "output_tokens_per_s")
    )
    return at_least(name, 100 * figures["attainment"].value, "%", 100 * attainment, f"{known.mode}: {note}")


def _panels(advice: Advice) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return throughput a device over latency, by kind, and the Pareto border."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for title, figure in (("TTFT p90", "ttft_p90_ms"), ("TPOT p90", "tpot_p90_ms")):
        curves: dict[str, list[tuple[float, float]]] = {"without roles": [], "prefill and decode": []}
        for option in advice.options:
            if option.best_known.is_valid:
                kind = "prefill and decode" if option.layout.num_prefill else "without roles"
                point = option.best_known.figures[figure].value, _per_device(option.best_known)
                curves[kind].append(point)
        every = sorted(point for curve in curves.values() for point in curve)
        border, most = [], 0.0
        for latency, tokens in every:
            if tokens > most:
                border.append((latency, tokens))
                most = tokens
        panels[title] = {name: sorted(curve) for name, curve in curves.items()} | {"Pareto": border}
    return panels


def serve_yaml(model: str, layout: Layout, engine: EngineSettings) -> str:
    """Return the settings of `baton serve --config` for a layout. engine: of the calibrated workers."""
    ranks = {
        "prefill.tensor_parallel_size": layout.prefill_tp,
        "prefill.pipeline_parallel_size": layout.prefill_pp,
        "decode.tensor_parallel_size": layout.decode_tp,
        "decode.pipeline_parallel_size": layout.decode_pp,
    }
    changed = _changed(engine) | _engine_of(layout)
    settings = nest(
        {"model": model, "prefill.num_workers": layout.num_prefill, "decode.num_workers": layout.num_decode}
        | {key: number for key, number in ranks.items() if number > 1}
        | {f"engine.{key}": value for key, value in changed.items()}
    )
    return str(yaml.safe_dump(settings, sort_keys=False))


def _engine_of(layout: Layout) -> dict[str, object]:
    """Return the engine's settings that a layout names, by dotted key."""
    named = {"scheduler.max_num_batched_tokens": layout.step_tokens, "cache.page_size": layout.page_size}
    return {key: value for key, value in named.items() if value is not None}


def _changed(engine: EngineSettings) -> dict[str, object]:
    """Return the settings that are not the usual ones, by dotted key; a layout has the ranks."""
    known = leaves(EngineSettings)
    given, usual = (flatten(msgspec.to_builtins(each), known) for each in (engine, EngineSettings()))
    ranks = "tensor_parallel_size", "pipeline_parallel_size"
    return {key: value for key, value in given.items() if value != usual[key] and key not in ranks}


calibrate = CliCommand(__doc__, _add_calibrate, _calibrate)
rehearse = CliCommand(__doc__, _add_rehearse, _rehearse)
advise = CliCommand(__doc__, _add_advise, _advise)
