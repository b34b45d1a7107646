"""What the README shows is what comes out, and what it says to type is taken."""

import re
import shlex
from pathlib import Path
from typing import Final

import pytest

from baton.cluster.cli.main import main
from baton.cluster.cli.options import parser_of
from baton.cluster.cli.serve_options import add_options, settings
from baton.cluster.cli.settings import Settings
from baton.config.cluster import ServeConfig
from baton.gateway.tenants.tenants import Tenants

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
    ((source, output),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(source, "README.md", "exec"), {})
    assert capsys.readouterr().out.rstrip() == output.rstrip()


def test_every_way_to_serve_is_one() -> None:
    commands = re.findall(r"^    baton serve (.*)$", README, flags=re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        parser = parser_of("serve", "")
        add_options(parser)
        settings(parser.parse(shlex.split(command, comments=True))).build()


def test_the_files_that_are_shown_are_read(tmp_path: Path) -> None:
    tenants, config = blocks("yaml")
    (tmp_path / "tenants.yaml").write_text(tenants)
    Tenants.from_file(tmp_path / "tenants.yaml", b"k" * 16)
    (tmp_path / "baton.yaml").write_text(config)
    Settings(ServeConfig, flags={}, file=tmp_path / "baton.yaml", environment={}).build()
