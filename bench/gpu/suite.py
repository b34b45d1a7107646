"""What one GPU does under Baton, in one command and under ten minutes, beside what the device can do.

python -m baton.bench.gpu.suite [--budget-s 540] [--toy] [--out FOLDER]

Stages run in order, each on its own: one that fails is reported as FAILED and the rest goes on; one that
may not end within the budget is not started. The file is written after every stage. Exit code 1 when a
stage failed. Without CUDA, or with --toy, the same code runs at toy size on the CPU.
"""

import argparse
import gc
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Final

import torch

from baton.bench.gpu import kernels, kv, model
from baton.bench.gpu.session import FULL, TOY, Session
from baton.bench.machine import machine_description, one_line
from baton.bench.report import RESULTS, Row, print_table, write_json


@dataclass(frozen=True)
class Stage:
    name: str
    run: Callable[[Session], Iterable[Row]]
    needs_s: float  # at full size, roughly


STAGES: Final = (
    Stage("rates of the device", kernels.rates, 15),
    Stage("decode kernel", kernels.decode_kernel, 30),
    Stage("prefill kernel", kernels.prefill_kernel, 30),
    Stage("pages", kernels.pages, 10),
    Stage("kv gather", kv.gather, 15),
    Stage("kv scatter", kv.scatter, 15),
    Stage("cuda_ipc", kv.cuda_ipc, 45),
    Stage("nccl", kv.nccl, 60),
    Stage("engine against the CPU", model.check, 20),
    Stage("decode step", model.decode_steps, 90),
    Stage("prefill", model.prefill, 20),
    Stage("transformers", model.against_transformers, 180),
)


@dataclass
class Progress:
    rows: list[Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # stage -> how long it took
    failures: dict[str, str] = field(default_factory=dict)  # stage -> traceback


def run_stages(
    stages: Sequence[Stage], session: Session, budget_s: float, report: Callable[[str, Progress], None]
) -> Progress:
    """Run what fits the budget; `report` is called with a line after each stage."""
    progress, started_s = Progress(), perf_counter()
    for stage in stages:
        left_s = budget_s - (perf_counter() - started_s)
        if left_s < (stage.needs_s if session.sizes.has_bars else 0):
            note = f"not started: {max(0.0, left_s):.0f} s of {budget_s:.0f} are left"
            progress.rows.append(Row(stage.name, None, "", note=note))
            report(f"{stage.name}: {note}", progress)
            continue
        stage_started_s = perf_counter()
        _run_stage(stage, session, progress)
        _release_memory(session.device)
        progress.seconds[stage.name] = perf_counter() - stage_started_s
        verdict = "FAILED after" if stage.name in progress.failures else "took"
        report(f"{stage.name}: {verdict} {progress.seconds[stage.name]:.1f} s", progress)
    return progress


def _run_stage(stage: Stage, session: Session, progress: Progress) -> None:
    try:
        with torch.no_grad():
            for row in stage.run(session):
                progress.rows.append(row)
    except Exception as error:  # whatever it is, the other stages are worth their time
        progress.failures[stage.name] = traceback.format_exc()
        first_line = (str(error).splitlines() or [""])[0]
        failed = Row(stage.name, None, "", met=False, note=f"{type(error).__name__}: {first_line}")
        progress.rows.append(failed)


def _release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--toy", action="store_true", help="toy size on the CPU, GPU or not")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu-<device>.json")
    arguments = parser.parse_args()
    is_toy = arguments.toy or not torch.cuda.is_available()
    session = Session(torch.device("cpu" if is_toy else "cuda"), TOY if is_toy else FULL)
    name = "toy" if is_toy else torch.cuda.get_device_name().lower().replace(" ", "-")
    title = f"gpu: {one_line(machine_description())}"

    def report(line: str, progress: Progress) -> None:
        print(line, flush=True)
        extra = {"seconds": progress.seconds, "failures": progress.failures}
        write_json(arguments.out / f"gpu-{name}.json", title, progress.rows, extra)

    progress = run_stages(STAGES, session, arguments.budget_s, report)
    for stage, failure in progress.failures.items():
        print(f"{stage}:\n{failure}", file=sys.stderr)
    print_table(title, progress.rows)
    sys.exit(1 if progress.failures else 0)


if __name__ == "__main__":
    main()
