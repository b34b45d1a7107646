"""One stage in a process of its own: its rows go into a file as they come.

A CUDA error that no later call survives ends this process alone, and what was measured before it is kept.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Final, Literal, TypeAlias

import msgspec
import torch

from baton.bench.gpu.session import FULL, TOY, Figures, Session
from baton.bench.machine import gpu_state
from baton.bench.report import Row
from baton.errors import ConfigError

SizeName: TypeAlias = Literal["full", "half", "toy"]
SIZES: Final = {"full": FULL, "half": FULL.halved(), "toy": TOY}


class StageBegan(msgspec.Struct, frozen=True, tag="began"):
    """The start of an attempt. An earlier attempt with equal fields is void."""

    stage: str
    size: SizeName
    tool: str = ""  # that the process runs under


class StageRow(msgspec.Struct, frozen=True, tag="row"):
    """One row, and the clocks, power and memory of the GPU just after it was measured."""

    row: Row
    gpu: dict[str, str | float]


class StageFigures(msgspec.Struct, frozen=True, tag="figures"):
    """The figures that later stages read."""

    figures: Figures


class StageEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The end of an attempt."""

    seconds: float
    outcome: Literal["done", "failed", "left out"]
    note: str = ""  # why it failed, or what it lacks


Record: TypeAlias = StageBegan | StageRow | StageFigures | StageEnded
_DECODER: Final = msgspec.json.Decoder(Record)


def append(path: Path, record: Record) -> None:
    """Append a record. The leading newline ends a torn record."""
    with path.open("ab") as file:
        file.write(b"\n" + msgspec.json.encode(record))


def read(path: Path) -> Iterator[Record]:
    """Yield the complete records; skip torn lines. ConfigError: the file is another version's."""
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            yield _DECODER.decode(line)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path}: {error}: remove the file, or leave out --resume") from None
        except msgspec.DecodeError:
            continue


def run_stage(name: str, session: Session, path: Path) -> None:
    """Run the function MODULE:FUNCTION and append its records; the caller has appended `StageBegan`."""
    began_s = perf_counter()

    def ended(outcome: Literal["done", "failed", "left out"], note: str = "") -> None:
        append(path, StageEnded(perf_counter() - began_s, outcome, note))

    try:
        with torch.no_grad():
            for row in function_named(name)(session):
                append(path, StageRow(row, gpu_state(session.device)))
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
        append(path, StageFigures(session.figures))
        ended("done")


def figures_in(path: Path) -> Figures:
    """Return the latest figures. Those of an attempt under a tool, which slows everything, do not count."""
    figures, tool = Figures(), ""
    for record in read(path):
        match record:
            case StageBegan():
                tool = record.tool
            case StageFigures() if not tool:
                figures = record.figures
    return figures


def function_named(name: str) -> Callable[[Session], Iterable[Row]]:
    """Return the function MODULE:FUNCTION of a stage."""
    module, _, function = name.partition(":")
    run: Callable[[Session], Iterable[Row]] = getattr(importlib.import_module(module), function)
    return run


def main() -> None:
    """Run one stage as a command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("function", help="MODULE:FUNCTION")
    parser.add_argument("file", type=Path, help="that the records go to")
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--rival-python", default=sys.executable, help="the interpreter that has vLLM")
    options = parser.parse_args()
    session = Session(torch.device(options.device), SIZES[options.size], figures_in(options.file))
    session.rival_python = options.rival_python
    run_stage(options.function, session, options.file)


if __name__ == "__main__":
    main()
