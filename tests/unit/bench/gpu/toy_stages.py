"""Stages that end in every way; their processes import this module."""

import os
import signal
import time
from collections.abc import Iterator

from baton.bench.gpu.session import Rates, Session, WrongResult
from baton.bench.gpu.suite import Stage
from baton.bench.report import Row


def good(session: Session) -> Iterator[Row]:
    yield Row("figure", 1.0, "s")


def bad(session: Session) -> Iterator[Row]:
    yield Row("before", 1.0, "s")
    raise WrongResult("kernel: off by one\nsecond line")


def crashes(session: Session) -> Iterator[Row]:
    yield Row("before", 1.0, "s")
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(session: Session) -> Iterator[Row]:
    yield Row("before", 1.0, "s")
    time.sleep(600)


def lacks(session: Session) -> Iterator[Row]:
    import no_such_package  # type: ignore[import-not-found]  # noqa: F401

    yield from ()


def mistaken(session: Session) -> Iterator[Row]:
    import baton.bench.no_such_module  # type: ignore[import-not-found]  # noqa: F401

    yield from ()


def measures(session: Session) -> Iterator[Row]:
    session.figures.rates = Rates(1.0, 2.0, 3.0)
    session.figures.step_seconds["64 x 10"] = 0.5
    yield from ()


def compares(session: Session) -> Iterator[Row]:
    yield Row("copy", session.rates.copy_gbps, "GB/s")
    yield Row("step", session.figures.step_seconds["64 x 10"], "s")


def toy_stage(name: str, needs_s: float = 0.0) -> Stage:
    """Return the stage that calls the function of this name."""
    return Stage(name, f"{__name__}:{name}", needs_s)
