"""The README and the guides under docs/: shown output is what comes out, shown commands and files are accepted, and
links lead to files and headings that exist."""

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

ROOT: Final = Path(__file__).resolve().parents[3]
PAGES: Final = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "bench/README.md", *ROOT.glob("docs/**/*.md"))
}
SERVE: Final = PAGES["docs/serve.md"]
CONFIGURE: Final = PAGES["docs/configure.md"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_commands_print_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    (session,) = blocks(SERVE, "console")
    shown = re.findall(r"^\$ baton (.*)\n((?:(?!\$ ).*\n)+)", session, flags=re.MULTILINE)
    assert len(shown) == session.count("$ ")
    for command, output in shown:
        assert main(shlex.split(command)) == 0
        assert capsys.readouterr().out == output


def test_the_python_example_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    ((source, output),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", SERVE, flags=re.DOTALL)
    exec(compile(source, "docs/serve.md", "exec"), {})
    assert capsys.readouterr().out.rstrip() == output.rstrip()


def test_serve_accepts_every_command_that_is_shown() -> None:
    text = "\n".join(PAGES.values())
    commands = re.findall(r"^    baton serve (.*)$", text, flags=re.MULTILINE)
    commands += re.findall(r"SERVE_OPTIONS='(.*?)'", text)
    assert len(commands) >= 8
    for command in commands:
        parser = parser_of("serve", "")
        add_options(parser)
        words = shlex.split(command, comments=True)
        settings(parser.parse(words if words[0][0] != "-" else ["tiny", *words])).build()


def test_the_settings_file_that_is_shown_is_read(tmp_path: Path) -> None:
    (config,) = blocks(CONFIGURE, "yaml")
    (tmp_path / "baton.yaml").write_text(config)
    Settings(ServeConfig, flags={}, file=tmp_path / "baton.yaml", environment={}).build()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link
