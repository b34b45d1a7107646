"""Kernels and engine on one GPU, beside the rates of the device: all of it in one command.

    baton bench gpu [--minutes 9] [--only STAGE ...] [--output FOLDER] [--rival-python PATH] [--toy]

`python -m baton.bench.gpu` is the same command for a machine that lacks the packages of the command line.

Each stage runs in a process of its own, as no later call survives some errors of CUDA. The process appends
every row to gpu-STAGE.jsonl as soon as it is measured; gpu-STAGE.log has what it prints. The exit code is 1
when a stage failed. Without CUDA, or with --toy, the same code runs at toy size on the CPU.
docs/benchmarks.md explains the figures.
"""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Final, Literal, TypeAlias

import msgspec
import torch

from baton.bench.gpu.session import FULL, TOY, Figures, Session
from baton.bench.machine import gpu_state
from baton.bench.report import Report, Row, option, suite
from baton.cluster.end_with_parent import ending_with_this_process

SLOWEST: Final = 4.0  # times its usual time, after which a stage has hung
START_S: Final = 60.0  # time for a process to import torch and compile kernels
TOY_LIMIT_S: Final = 300.0
LOG_LINES: Final = 40  # of a failed stage's log, in the JSON
SizeName: TypeAlias = Literal["full", "toy"]
SIZES: Final = {"full": FULL, "toy": TOY}


@dataclass(frozen=True)
class Stage:
    """A part of the suite; `needs_s` is its rough time at full size."""

    name: str
    function: str  # MODULE:FUNCTION, called with a Session; returns rows
    needs_s: float

    def limit_s(self, size: SizeName) -> float:
        """Return the time after which the stage is taken for hung."""
        return TOY_LIMIT_S if size == "toy" else START_S + SLOWEST * self.needs_s


RATES: Final = "rates of the device"  # all percentages are of these
_GPU: Final = "baton.bench.gpu"
STAGES: Final = (
    Stage("engine against the CPU", f"{_GPU}.model:check", 20),
    Stage(RATES, f"{_GPU}.kernels:rates", 15),
    Stage("decode kernel", f"{_GPU}.kernels:decode_kernel", 30),
    Stage("decode kernel, every batch", f"{_GPU}.kernels:decode_kernel_batches", 75),
    Stage("prefill kernel", f"{_GPU}.kernels:prefill_kernel", 30),
    Stage("matrix products", f"{_GPU}.kernels:products", 20),
    Stage("decode step", f"{_GPU}.model:decode_steps", 90),
    Stage("prefill", f"{_GPU}.model:prefill", 40),
    Stage("batch invariance", f"{_GPU}.model:batch_invariance", 90),
    Stage("kv gather", f"{_GPU}.kv:gather", 15),
    Stage("kv scatter", f"{_GPU}.kv:scatter", 15),
    Stage("cuda_ipc", f"{_GPU}.kv:cuda_ipc", 45),
    Stage("attention rivals", f"{_GPU}.kernels:rivals", 45),
    Stage("vllm", f"{_GPU}.model:against_vllm", 240),
)
NAMES: Final = tuple(stage.name for stage in STAGES)


class Order(msgspec.Struct, frozen=True):
    """The order to the process of a stage: the function to run, and where its records go."""

    function: str
    file: str  # that its records go to
    device: str
    size: SizeName
    figures: Figures  # of earlier stages
    rival_python: str  # the interpreter that has vLLM


class End(msgspec.Struct, frozen=True):
    """The end of a stage. `figures` are None unless the stage is done."""

    outcome: Literal["done", "failed", "left out"]
    note: str = ""  # why the stage failed, or what it lacks
    figures: Figures | None = None


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of gpu-STAGE.jsonl: a row, or the end."""

    row: Row | None = None
    gpu: dict[str, str | float] = {}  # clocks, power and memory of the GPU just after the row was measured
    end: End | None = None


def run_stage(order: Order) -> None:
    """Run the function of a stage, and append its records. The process of the stage calls this."""
    session = Session(torch.device(order.device), SIZES[order.size], order.figures)
    session.rival_python = order.rival_python

    def append(record: Record) -> None:
        with Path(order.file).open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")

    try:
        with torch.no_grad():
            for row in function_named(order.function)(session):
                append(Record(row, gpu_state(session.device)))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("baton"):
            append(Record(end=End("failed", str(error))))
            raise
        note = f"needs {error.name}, which is not installed: see docs/benchmarks.md"
        append(Record(end=End("left out", note)))
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        append(Record(end=End("failed", f"{type(error).__name__}: {first_line}")))
        raise
    else:
        append(Record(end=End("done", figures=session.figures)))


def function_named(name: str) -> Callable[[Session], Iterable[Row]]:
    """Return the function MODULE:FUNCTION of a stage."""
    module, _, function = name.partition(":")
    run: Callable[[Session], Iterable[Row]] = getattr(importlib.import_module(module), function)
    return run


@dataclass
class StageRunner:
    """Runs stages in processes of their own, one after the other, and adds their rows to the report."""

    report: Report
    device: str
    size: SizeName
    rival_python: str = sys.executable
    figures: Figures = field(default_factory=Figures)  # that stages record for later ones
    seconds: dict[str, float] = field(default_factory=dict)  # of each stage
    states: list[dict[str, str | float]] = field(default_factory=list)  # of the GPU at each row
    failures: dict[str, str] = field(default_factory=dict)  # stage -> the end of its log

    def run(self, stages: Sequence[Stage], minutes: float) -> None:
        """Run the stages that fit. The report is saved after each."""
        self.report.folder.mkdir(parents=True, exist_ok=True)
        self.report.extra = {"seconds": self.seconds, "gpu": self.states, "failures": self.failures}
        until_s = monotonic() + 60 * minutes
        for number, stage in enumerate(stages):
            self.report.tell(stage.name, number / len(stages))
            left_s = until_s - monotonic()
            if left_s < (stage.needs_s if self.size == "full" else 1.0):
                note = f"not started: {max(0.0, left_s):.0f} s are left, it needs {stage.needs_s:.0f}"
                self._add(stage, [], End("left out", note))
            else:
                self._add(stage, *self._run(stage, left_s))
            self.report.save()

    def _run(self, stage: Stage, left_s: float) -> tuple[list[Record], End]:
        """Return the records and the end of a stage, which has this much time."""
        name = f"gpu-{stage.name.replace(',', '').replace(' ', '-')}"
        path, log_path = (self.report.folder / f"{name}.{suffix}" for suffix in ("jsonl", "log"))
        order = Order(stage.function, str(path), self.device, self.size, self.figures, self.rival_python)
        program = [sys.executable, "-m", "baton.bench.gpu.suite", msgspec.json.encode(order).decode()]
        path.write_bytes(b"")
        began_s, limit_s = monotonic(), stage.limit_s(self.size)
        with log_path.open("w") as log:
            process = subprocess.Popen(
                ending_with_this_process(program), stdout=log, stderr=log, start_new_session=True
            )
            try:
                process.wait(min(left_s, limit_s))
                end = End("failed", f"its process ended with exit code {process.returncode}")
            except subprocess.TimeoutExpired:
                is_hung = left_s >= limit_s
                stopped = End("left out", f"stopped after the {left_s:.0f} s that were left")
                end = End("failed", f"killed after {limit_s:.0f} s") if is_hung else stopped
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
                process.wait()
        self.seconds[stage.name] = monotonic() - began_s
        records = [msgspec.json.decode(line, type=Record) for line in path.read_bytes().splitlines()]
        end = next((each.end for each in records if each.end is not None), end)
        if end.outcome == "failed":
            self.failures[stage.name] = "\n".join(log_path.read_text().splitlines()[-LOG_LINES:])
        return records, end

    def _add(self, stage: Stage, records: Sequence[Record], end: End) -> None:
        found = [(each.row, each.gpu) for each in records if each.row is not None]
        if end.outcome != "done":
            met = False if end.outcome == "failed" else None
            found.append((Row(stage.name, None, "", met=met, note=end.note), {}))
        self.report.rows += [row for row, _ in found]
        self.states += [state for _, state in found]
        self.figures = end.figures or self.figures


@suite(
    "gpu",
    "gpu",
    option("--minutes", 9.0, "for all stages"),
    option("--only", NAMES, "stages, after the rates of the device", choices=NAMES, metavar="STAGE"),
    option("--rival-python", sys.executable, "the interpreter that has vLLM", metavar="PATH"),
    option("--toy", False, "toy size on the CPU, GPU or not"),
)
def measure(options: Namespace, report: Report) -> None:
    """Run the stages; the results are in gpu-DEVICE.json."""
    is_toy = options.toy or not torch.cuda.is_available()
    device = "toy" if is_toy else torch.cuda.get_device_name().lower().replace(" ", "-")
    report.name, report.title = f"gpu-{device}", f"gpu: {device}"
    runner = StageRunner(report, *(("cpu", "toy") if is_toy else ("cuda", "full")), options.rival_python)
    chosen = {RATES, *options.only}
    runner.run([stage for stage in STAGES if stage.name in chosen], options.minutes)


if __name__ == "__main__":
    run_stage(msgspec.json.decode(sys.argv[1], type=Order))
