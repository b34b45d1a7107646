"""What the README shows is what comes out."""

import re
import shlex
from pathlib import Path
from typing import Final

import pytest

from baton.cluster.cli import main

README: Final = (Path(__file__).resolve().parents[3] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_commands_print_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    (session,) = blocks("console")
    shown = re.findall(r"^\$ baton (.*)\n((?:(?!\$ ).*\n)+)", session, flags=re.MULTILINE)
    assert len(shown) == session.count("$ ")
    for command, output in shown:
        assert main(shlex.split(command)) == 0
        assert capsys.readouterr().out == output


def test_the_python_example_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = blocks("python")
    exec(compile(source, "README.md", "exec"), {})
    assert capsys.readouterr().out.rstrip() == blocks("text")[0].rstrip()
