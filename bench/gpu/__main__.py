"""Kernels and engine on one GPU, beside the rates of the device: all of it in one command.

python -m baton.bench.gpu [--minutes 9] [--output FOLDER] [--resume] [--rival-python PATH] [--toy]

Stages run in order, each in a process of its own. A stage whose usual time exceeds the time left is not
started. Failed stages run again at the end: at half size, then under compute-sanitizer if it is installed.
Every row is kept in gpu.jsonl as it comes; `--resume` skips the stages that have ended there.
--tune runs no stage: it writes kernels/triton/tuned.json, the tiles of the kernels by shape, chosen among
what compiles for sm_90 without spills, by time on a GPU and by a model elsewhere.
--live-programs measures nothing: how the decode kernel splits its work, with a plot.
Exit code 1 when a stage failed. Without CUDA, or with --toy, the same code runs at toy size on the CPU.
"""

import sys

try:
    from baton.bench.gpu.suite import measure
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("baton"):
        raise
    sys.exit(f"{error.name} is not installed: docs/benchmarks.md says how to carry it to this machine")

measure.main(__doc__)
