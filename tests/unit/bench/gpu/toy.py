"""Stages of the GPU suite at toy size."""

from collections.abc import Sequence
from pathlib import Path

import torch

from baton.bench.gpu.session import TOY, Session
from baton.bench.gpu.suite import Stage, run_stages
from baton.bench.report import Report

CPU = torch.device("cpu")


def run_toy(stages: Sequence[Stage], folder: Path) -> Report:
    """Run the stages on the CPU; toy.json in the folder has the figures."""
    report = Report("toy", "toy", folder)
    run_stages(stages, Session(CPU, TOY), 600, report)
    return report
