"""Kernels and engine on one GPU, beside the rates of the device: all of it in one command.

    python -m baton.bench.gpu [--minutes 9] [--only STAGE ...] [--output FOLDER] [--rival-python PATH] [--toy]

Exit code 1 when a stage failed. Without CUDA, or with --toy, the same code runs at toy size on the CPU.
docs/benchmarks.md explains the figures.
"""

import sys

try:
    from baton.bench.gpu.suite import measure
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("baton"):
        raise
    sys.exit(f"{error.name} is not installed: docs/benchmarks.md says how to carry it to this machine")

measure.main(__doc__)
