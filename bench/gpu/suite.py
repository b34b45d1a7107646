"""The stages of the GPU suite and their order; bench/gpu/__main__.py is the command."""

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Final, Literal, TypeAlias

import msgspec
import torch

from baton.bench.gpu.kernels import (
    candidates,
    compile_tile,
    heuristic,
    live_program_curves,
    model_seconds,
    num_programs,
    timed_seconds,
)
from baton.bench.gpu.session import FULL, TOY, Figures, Session
from baton.bench.machine import gpu_state
from baton.bench.report import Plot, Report, Row, option, suite
from baton.cluster.end_with_parent import ending_with_this_process
from baton.errors import ConfigError
from baton.kernels.triton.kernel import TileKind, TunedDtype, TunedTile, write_tuned

SLOWEST: Final = 4.0  # times its usual time, after which a stage has hung
START_S: Final = 60.0  # time for a process to import torch and compile kernels
TOY_LIMIT_S: Final = 300.0
LOG_LINES: Final = 40  # of a failed stage's log, in the JSON
SANITIZER: Final = "compute-sanitizer"


SizeName: TypeAlias = Literal["full", "half", "toy"]
SIZES: Final = {"full": FULL, "half": FULL.halved(), "toy": TOY}


class Attempt(msgspec.Struct, frozen=True):
    """A stage at a size. A later attempt that is equal voids the earlier one."""

    stage: str
    size: SizeName
    tool: str = ""  # that the process runs under


class End(msgspec.Struct, frozen=True):
    """The end of an attempt."""

    seconds: float
    outcome: Literal["done", "failed", "left out"]  # failed: it raised, or its process crashed or was killed
    note: str = ""  # why it failed, or what it lacks
    figures: Figures | None = None  # that later stages read

    @property
    def has_failed(self) -> bool:
        return self.outcome == "failed"


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of gpu.jsonl: one row of an attempt, or its end; the first line has neither."""

    attempt: Attempt
    row: Row | None = None
    gpu: dict[str, str | float] = {}  # clocks, power and memory of the GPU just after the row was measured
    end: End | None = None


_DECODER: Final = msgspec.json.Decoder(Record)


def append(path: Path, record: Record) -> None:
    """Append a record. The leading newline ends a torn record."""
    with path.open("ab") as file:
        file.write(b"\n" + msgspec.json.encode(record))


def read(path: Path) -> dict[Attempt, list[Record]]:
    """Return the whole records of the attempts, in order. ConfigError: the file is another version's."""
    found: dict[Attempt, list[Record]] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = _DECODER.decode(line)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path}: {error}: remove the file, or leave out --resume") from None
        except msgspec.DecodeError:
            continue
        if record == Record(record.attempt):
            found.pop(record.attempt, None)
        found.setdefault(record.attempt, []).append(record)
    return found


@dataclass(frozen=True)
class Stage:
    """A part of the suite; `needs_s` is its rough time at full size."""

    name: str
    function: str  # MODULE:FUNCTION, called with a Session; returns rows
    needs_s: float

    def limit_s(self, size: SizeName) -> float:
        """Return the time after which the stage is taken for hung."""
        return TOY_LIMIT_S if size == "toy" else START_S + SLOWEST * self.needs_s


_GPU: Final = "baton.bench.gpu"
# Correctness first, then the rates that all percentages are of.
STAGES: Final = (
    Stage("environment", f"{_GPU}.kernels:environment", 5),
    Stage("live programs", f"{_GPU}.kernels:heuristic", 5),
    Stage("engine against the CPU", f"{_GPU}.model:check", 20),
    Stage("rates of the device", f"{_GPU}.kernels:rates", 15),
    Stage("decode kernel", f"{_GPU}.kernels:decode_kernel", 30),
    Stage("decode kernel, every batch", f"{_GPU}.kernels:decode_kernel_batches", 75),
    Stage("prefill kernel", f"{_GPU}.kernels:prefill_kernel", 30),
    Stage("pages", f"{_GPU}.kv:pages", 10),
    Stage("matrix products", f"{_GPU}.kernels:products", 20),
    Stage("decode step", f"{_GPU}.model:decode_steps", 90),
    Stage("prefill", f"{_GPU}.model:prefill", 40),
    Stage("batch invariance", f"{_GPU}.model:batch_invariance", 90),
    Stage("kv gather", f"{_GPU}.kv:gather", 15),
    Stage("kv scatter", f"{_GPU}.kv:scatter", 15),
    Stage("cuda_ipc", f"{_GPU}.kv:cuda_ipc", 45),
    Stage("nccl", f"{_GPU}.kv:nccl", 60),
    Stage("attention rivals", f"{_GPU}.kernels:rivals", 45),
    Stage("transformers", f"{_GPU}.model:against_transformers", 180),
    Stage("vllm", f"{_GPU}.model:against_vllm", 240),
    Stage("two roles", f"{_GPU}.model:two_roles", 480),
)


class StageRunner:
    """Runs stages in processes of their own. `path` has the records of a run; logs lie beside it."""

    def __init__(self, folder: Path, device: str, size: SizeName, rival_python: str = sys.executable) -> None:
        self.path = folder / "gpu.jsonl"
        self.size = size
        self._device = device
        self._rival_python = rival_python

    def attempts(self, stage: Stage) -> list[tuple[Attempt, list[Record], End]]:
        """Return the attempts at the stage that have ended, at this run's size or half of it, in order."""
        sizes = ("toy",) if self.size == "toy" else ("full", "half")
        return [
            (attempt, records, end)
            for attempt, records in read(self.path).items()
            if attempt.stage == stage.name and attempt.size in sizes
            if (end := records[-1].end) is not None
        ]

    def run(self, stage: Stage, left_s: float) -> bool:
        """Run a stage. Returns False when there was no time to finish it; `attempts` leaves that one out."""
        return self._run(stage, Attempt(stage.name, self.size), left_s)

    def run_again(self, stage: Stage, left_s: float) -> None:
        """Run a failed stage at half size, then under compute-sanitizer where that is installed."""
        until_s = monotonic() + left_s
        for tool in ["", SANITIZER] if self._device == "cuda" and shutil.which(SANITIZER) else [""]:
            if (left_s := until_s - monotonic()) > 0:
                self._run(stage, Attempt(stage.name, "half", tool), left_s)

    def log(self, stage: Stage) -> Path:
        """The file with what the processes of the stage print."""
        return self.path.parent / f"gpu-{stage.name.replace(',', '').replace(' ', '-')}.log"

    def _run(self, stage: Stage, attempt: Attempt, left_s: float) -> bool:
        append(self.path, Record(attempt))
        tool = [shutil.which(attempt.tool) or attempt.tool] if attempt.tool else []
        order = StageOrder(attempt, stage.function, str(self.path), self._device, self._rival_python)
        program = [sys.executable, "-m", "baton.bench.gpu.suite", msgspec.json.encode(order).decode()]
        command = ending_with_this_process([*tool, *program])
        began_s, limit_s = monotonic(), stage.limit_s(attempt.size)
        with self.log(stage).open("a") as log:
            print(f"$ {' '.join(command)}", file=log, flush=True)
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            try:
                process.wait(min(left_s, limit_s))
                note = f"its process ended with exit code {process.returncode}"
            except subprocess.TimeoutExpired:
                if left_s < limit_s:
                    return False
                note = f"killed after {limit_s:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
                process.wait()
        if read(self.path)[attempt][-1].end is None:
            append(self.path, Record(attempt, end=End(monotonic() - began_s, "failed", note)))
        return True


def run_stages(
    stages: Sequence[Stage], runner: StageRunner, minutes: float, report: Report, *, resumes: bool = False
) -> None:
    """Run the stages that fit, then the failed ones again.

    resumes: stages that have ended in the runner's records are not run again.
    """
    until_s = monotonic() + 60 * minutes
    left_out: dict[str, str] = {}  # stage -> why it has no attempt
    for number, stage in enumerate(stages):
        report.tell(stage.name, number / len(stages))
        left_s = until_s - monotonic()
        if resumes and runner.attempts(stage):
            continue
        if left_s < (stage.needs_s if runner.size == "full" else 1.0):
            left_out[stage.name] = (
                f"not started: {max(0.0, left_s):.0f} s are left, it needs {stage.needs_s:.0f}"
            )
        elif not runner.run(stage, left_s):
            left_out[stage.name] = f"stopped after the {left_s:.0f} s that were left"
        _fill(report, stages, runner, left_out)
    for stage in stages if runner.size == "full" else ():
        attempts = runner.attempts(stage)
        if len(attempts) == 1 and attempts[0][-1].has_failed:
            report.tell(f"{stage.name}, again")
            runner.run_again(stage, until_s - monotonic())
    _fill(report, stages, runner, left_out)


def _fill(report: Report, stages: Sequence[Stage], runner: StageRunner, left_out: Mapping[str, str]) -> None:
    """Make the report anew and save it.

    Beside the rows the JSON has the seconds of each stage, the state of the GPU at each row, and the end of
    the logs of failed stages.
    """
    report.rows.clear()
    seconds: dict[str, float] = {}
    failures: dict[str, str] = {}
    states: list[dict[str, str | float]] = []  # one a row
    report.extra = {"seconds": seconds, "gpu": states, "failures": failures}
    for stage in stages:
        for attempt, records, end in runner.attempts(stage):
            rows = [(each.row, each.gpu) for each in records if each.row is not None]
            if end.outcome != "done":
                met = False if end.has_failed else None
                rows.append((Row(stage.name, None, "", met=met, note=end.note), {}))
            how = " at half size" if attempt.size == "half" else ""
            how += f" under {attempt.tool}" if attempt.tool else ""
            report.rows += [replace(row, name=row.name + how) for row, _ in rows]
            states += [state for _, state in rows]
            seconds[stage.name] = seconds.get(stage.name, 0.0) + end.seconds
            if end.has_failed:
                failures[stage.name] = "\n".join(runner.log(stage).read_text().splitlines()[-LOG_LINES:])
        if stage.name in left_out:
            report.rows.append(Row(stage.name, None, "", note=left_out[stage.name]))
            states.append({})
    report.save()


# The process of a stage. A CUDA error that no later call survives ends this process alone.


class StageOrder(msgspec.Struct, frozen=True):
    """A stage to run, and the file that its records go to."""

    attempt: Attempt
    function: str
    file: str
    device: str
    rival_python: str  # the interpreter that has vLLM


def run_stage(order: StageOrder) -> None:
    """Run the function of a stage and append its records after the first one."""
    began_s, path = monotonic(), Path(order.file)
    session = Session(torch.device(order.device), SIZES[order.attempt.size], figures_in(path))
    session.rival_python = order.rival_python

    def ended(outcome: Literal["done", "failed", "left out"], note: str = "") -> None:
        figures = session.figures if outcome == "done" else None
        append(path, Record(order.attempt, end=End(monotonic() - began_s, outcome, note, figures)))

    try:
        with torch.no_grad():
            for row in function_named(order.function)(session):
                append(path, Record(order.attempt, row, gpu_state(session.device)))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("baton"):
            ended("failed", str(error))
            raise
        ended("left out", f"needs {error.name}, which is not installed: see docs/benchmarks.md")
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        ended("failed", f"{type(error).__name__}: {first_line}")
        raise
    else:
        ended("done")


def figures_in(path: Path) -> Figures:
    """Return the latest figures. Those of an attempt under a tool, which slows everything, do not count."""
    figures = Figures()
    for attempt, records in read(path).items():
        end = records[-1].end
        if end is not None and end.figures is not None and not attempt.tool:
            figures = end.figures
    return figures


def function_named(name: str) -> Callable[[Session], Iterable[Row]]:
    """Return the function MODULE:FUNCTION of a stage."""
    module, _, function = name.partition(":")
    run: Callable[[Session], Iterable[Row]] = getattr(importlib.import_module(module), function)
    return run


# The table of tuned tiles.

# Inputs of one rank's split, of the Llama 3, Mistral, Qwen2.5 and Qwen3 families on one to four ranks.
LINEAR_WIDTHS: Final = (
    *(896, 1024, 1536, 2048, 2432, 2560, 3072, 3584, 4096, 4480, 4864, 5120, 6144, 6912, 7168, 8192, 8704),
    *(9472, 12800, 13824, 14336),
)
HEAD_DIMS: Final = (64, 128)
# Kinds whose tiles agree in the blocks that order sums, and their widths.
TUNED: Final[Mapping[tuple[TileKind, ...], tuple[int, ...]]] = {
    ("linear",): LINEAR_WIDTHS,
    ("decode", "prefill"): HEAD_DIMS,
}
TUNED_DTYPES: Final[tuple[TunedDtype, ...]] = ("bfloat16", "float16")


def blocks(tile: TunedTile) -> tuple[int, int, int]:
    """Return what all rows of a width agree in: outputs, inputs, and warps of 64 rows."""
    return tile.block_n, tile.block_k, tile.num_warps * 64 // tile.block_m


def choose_tiles(
    compiled: Sequence[TunedTile], judge: Callable[[TunedTile], float]
) -> dict[tuple[TileKind, int], TunedTile]:
    """Return the best tile of each kind and height; all have the same `blocks`. Empty when none do.

    compiled: of one width. judge: gives seconds. They count relative to the best of their kind and height. Of
    equals the one with more programs on a multiprocessor is better, then the one with more stages.
    """
    places = {(tile.kind, tile.block_m) for tile in compiled}
    by_blocks: dict[tuple[int, int, int], dict[tuple[TileKind, int], tuple[float, int, TunedTile]]] = {}
    for order, tile in enumerate(sorted(compiled, key=lambda tile: (-num_programs(tile), -tile.num_stages))):
        if tile.block_k and tile.width % tile.block_k:
            continue  # masks of inputs take registers
        found, place = by_blocks.setdefault(blocks(tile), {}), (tile.kind, tile.block_m)
        judged = judge(tile), order, tile
        found[place] = min(found.get(place, judged), judged, key=lambda each: each[:2])
    whole = [found for found in by_blocks.values() if found.keys() == places]
    if not whole:
        return {}
    least = {place: min(found[place][0] for found in whole) for place in places}
    best = min(whole, key=lambda found: sum(found[place][0] / least[place] for place in places))
    return {place: best[place][-1] for place in sorted(places)}


def tune(device: torch.device, tell: Callable[[str], None]) -> list[TunedTile]:
    """Return the rows of the table of tuned tiles, judged by time on a GPU. tell: hears of the progress.

    A width has no rows in a dtype in which one of the chosen tiles does not fit.
    """
    by: Literal["model", "time"] = "time" if device.type == "cuda" else "model"
    judge, rows = timed_seconds if by == "time" else model_seconds, list[TunedTile]()
    for kinds, widths in TUNED.items():
        for width in widths:
            tell(f"compiling {' and '.join(kinds)}, width {width}")
            tried = [compile_tile(tile) for kind in kinds for tile in candidates(kind, width)]
            for dtype in TUNED_DTYPES:
                tell(f"choosing for width {width}, {dtype}")
                fitting = [msgspec.structs.replace(each, dtype=dtype, chosen_by=by) for each in tried if each]
                made = [compile_tile(tile) for tile in choose_tiles(fitting, judge).values()]
                rows += [tile for tile in made if tile is not None and None not in made]
    return rows


@suite(
    "gpu",
    "gpu",
    option("--minutes", 9.0, "for all stages"),
    option("--resume", False, "go on after the stages that have ended"),
    option("--rival-python", sys.executable, "the interpreter that has vLLM", metavar="PATH"),
    option("--live-programs", False, "only the decode kernel's split, no GPU"),
    option("--tune", False, "only write the table of tuned tiles, kernels/triton/tuned.json"),
    option("--toy", False, "toy size on the CPU, GPU or not"),
)
def measure(options: Namespace, report: Report) -> None:
    """Run all stages; the results are in gpu-DEVICE.json, or gpu-live-programs.json and a plot."""
    if options.live_programs:
        report.name, report.title = "gpu-live-programs", "Live programs of the decode kernel, planned"
        report.rows += heuristic(Session(torch.device("cpu"), TOY))
        report.extra = {"curves": live_program_curves()}
        panels, labels = {report.title: live_program_curves()}, ("sequences", "programs with a split")
        report.plot = Plot(panels, x_label=labels[0], y_label=labels[1], is_log=True)
        return
    if options.tune:
        report.name, report.title = "gpu-tiles", "Tuned tiles of the kernels"
        tiles = tune(torch.device("cuda" if torch.cuda.is_available() else "cpu"), report.tell)
        write_tuned(tiles)
        report.rows += [
            Row(
                f"{tile.kind}, {tile.dtype}, {tile.width}, {tile.block_m} rows",
                tile.shared_bytes / 1024,
                "KiB",
            )
            for tile in tiles
        ]
        return
    is_toy = options.toy or not torch.cuda.is_available()
    device = "toy" if is_toy else torch.cuda.get_device_name().lower().replace(" ", "-")
    report.name, report.title = f"gpu-{device}", f"gpu: {device}"
    report.folder.mkdir(parents=True, exist_ok=True)
    place: tuple[str, SizeName] = ("cpu", "toy") if is_toy else ("cuda", "full")
    runner = StageRunner(report.folder, *place, options.rival_python)
    if not options.resume:
        runner.path.unlink(missing_ok=True)
    run_stages(STAGES, runner, options.minutes, report, resumes=options.resume)


if __name__ == "__main__":
    run_stage(msgspec.json.decode(sys.argv[1], type=StageOrder))
