"""A command of `baton` in the test's process, which has torch imported already; a tiny model."""

from typing import NamedTuple, Protocol

import pytest

from baton.cluster.cli.main import main
from tests.forked_ranks import ranks_are_forked
from tests.tiny_models import tiny_model

__all__ = ["Baton", "Result", "baton", "ranks_are_forked", "tiny_model"]


class Result(NamedTuple):
    """A command's exit status, and what it printed."""

    status: int
    out: str
    err: str


class Baton(Protocol):
    def __call__(self, *arguments: str) -> Result: ...


@pytest.fixture
def baton(capsys: pytest.CaptureFixture[str]) -> Baton:
    """Run `baton` with these arguments."""

    def run(*arguments: str) -> Result:
        try:
            status = main(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return run
