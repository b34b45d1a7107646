"""Kernels and engine on one GPU, beside the rates of the device, in under ten minutes.

python -m baton.bench.gpu.suite [--budget-s 540] [--toy] [--output FOLDER]

Stages run in order, each on its own: a stage that fails is reported as FAILED and the others go on; a stage
that may not end within the budget is not started. The file is written after every stage. Exit code 1 when a
stage failed. Without CUDA, or with --toy, the same code runs at toy size on the CPU.
"""

import argparse
import gc
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import torch

from baton.bench.gpu import kernels, kv, model
from baton.bench.gpu.session import FULL, TOY, Session
from baton.bench.report import Report, Row, Suite


@dataclass(frozen=True)
class Stage:
    """A part of the suite; `needs_s` is its rough time at full size."""

    name: str
    run: Callable[[Session], Iterable[Row]]
    needs_s: float


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


def run_stages(stages: Sequence[Stage], session: Session, budget_s: float, report: Report) -> None:
    """Run the stages that fit the budget; the JSON has their seconds, and the traceback of each failure."""
    seconds: dict[str, float] = {}
    failures: dict[str, str] = {}
    report.extra = {"seconds": seconds, "failures": failures}
    started_s = perf_counter()
    for number, stage in enumerate(stages):
        report.tell(stage.name, number / len(stages))
        left_s = budget_s - (perf_counter() - started_s)
        if left_s < (stage.needs_s if session.sizes.has_bars else 0):
            note = f"not started: {max(0.0, left_s):.0f} s of {budget_s:.0f} are left"
            report.rows.append(Row(stage.name, None, "", note=note))
        else:
            stage_started_s = perf_counter()
            _run_stage(stage, session, report, failures)
            _release_memory(session.device)
            seconds[stage.name] = perf_counter() - stage_started_s
        report.save()


def _run_stage(stage: Stage, session: Session, report: Report, failures: dict[str, str]) -> None:
    try:
        with torch.no_grad():
            for row in stage.run(session):
                report.rows.append(row)
    except Exception as error:  # any failure leaves the other stages worth their time
        failures[stage.name] = traceback.format_exc()
        first_line = (str(error).splitlines() or [""])[0]
        failed = Row(stage.name, None, "", met=False, note=f"{type(error).__name__}: {first_line}")
        report.rows.append(failed)
        print(f"{stage.name}:\n{failures[stage.name]}", file=sys.stderr)


def _release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the suite's options."""
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds (540)")
    parser.add_argument("--toy", action="store_true", help="toy size on the CPU, GPU or not")


def measure(options: argparse.Namespace, report: Report) -> None:
    """Run all stages; the results are in gpu-DEVICE.json."""
    is_toy = options.toy or not torch.cuda.is_available()
    device = "toy" if is_toy else torch.cuda.get_device_name().lower().replace(" ", "-")
    report.name, report.title = f"gpu-{device}", f"gpu: {device}"
    session = Session(torch.device("cpu" if is_toy else "cuda"), TOY if is_toy else FULL)
    run_stages(STAGES, session, options.budget_s, report)


SUITE: Final = Suite("gpu", "gpu", add_options, measure)


if __name__ == "__main__":
    sys.exit(SUITE.main(__doc__))
