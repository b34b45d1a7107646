"""The README and the guides under docs/ agree with the code: output, commands, files, modules and links."""

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Final

import pytest

from baton.cluster.cli.commands.bench import SUITES
from baton.cluster.cli.main import COMMANDS, main
from baton.cluster.cli.options import Parser
from baton.cluster.cli.settings import Settings, add_serve_options, settings_from, variable
from baton.config.cluster import ServeConfig
from baton.config.environment import VARIABLES
from baton.config.loader import known_keys
from tests.test_layers import CONTRACT, EVERYTHING, MAY_IMPORT
from tests.unit.cluster.deploy_files import exported_metrics

ROOT: Final = Path(__file__).resolve().parents[3]
PAGES: Final = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (*ROOT.glob("*.md"), ROOT / "bench/README.md", *ROOT.glob("docs/**/*.md"))
}
SERVE: Final = PAGES["docs/serve.md"]
CONFIGURE: Final = PAGES["docs/configure.md"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_commands_print_the_shown_output(capsys: pytest.CaptureFixture[str]) -> None:
    (session,) = blocks(SERVE, "console")
    shown = re.findall(r"^\$ baton (.*)\n((?:(?!\$ ).*\n)+)", session, flags=re.MULTILINE)
    assert len(shown) == session.count("$ ")
    for command, output in shown:
        assert main(shlex.split(command)) == 0
        assert capsys.readouterr().out == output


def test_python_example_prints_the_shown_output(capsys: pytest.CaptureFixture[str]) -> None:
    ((source, output),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", SERVE, flags=re.DOTALL)
    exec(compile(source, "docs/serve.md", "exec"), {})
    assert capsys.readouterr().out.rstrip() == output.rstrip()


def test_serve_accepts_every_command_that_is_shown() -> None:
    text = "\n".join(PAGES.values())
    commands = re.findall(r"^    baton serve (.*)$", text, flags=re.MULTILINE)
    commands += re.findall(r"SERVE_OPTIONS='(.*?)'", text)
    assert len(commands) >= 8
    for command in commands:
        parser = Parser("serve", None)
        add_serve_options(parser)
        words = shlex.split(command, comments=True)
        settings_from(ServeConfig, parser.parse(words if words[0][0] != "-" else ["tiny", *words])).build()


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


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    folders = "|".join({*EVERYTHING, "baton", "deploy", "docs", "tests"} - CONTRACT)
    named = set(re.findall(rf"[`(\s]((?:{folders})/[\w/.-]+\.\w+)", PAGES[page]))
    roots = (ROOT, (ROOT / page).parent)
    assert [path for path in sorted(named) if not any((root / path).exists() for root in roots)] == []


def test_every_module_and_every_suite_that_is_run_exists() -> None:
    modules = {name for page in PAGES.values() for name in re.findall(r"python -m (baton[\w.]*)", page)}
    assert modules and not [name for name in modules if importlib.util.find_spec(name) is None]
    suites = {name for page in PAGES.values() for name in re.findall(r"baton bench ([a-z][\w-]*)", page)}
    assert len(suites) >= 20 and suites <= SUITES.keys()


def test_architecture_page_shows_the_arrows_of_the_layer_test() -> None:
    section = PAGES["docs/architecture.md"].partition("## The arrows")[2]
    shown: dict[str, frozenset[str]] = {}
    for folders, cell in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.*) \|$", section, flags=re.MULTILINE):
        contract = CONTRACT if "contract" in cell else frozenset()
        allowed = EVERYTHING if cell == "everything" else contract | set(re.findall(r"`(\w+)`", cell))
        shown |= {name: allowed - {name} for name in re.findall(r"\w+", folders)}
    arrows = {name: may - {name} for name, may in MAY_IMPORT.items() if name not in ("baton", "tests")}
    assert {name: shown[name] for name in arrows} == arrows


@pytest.mark.parametrize("page", PAGES)
def test_commands_settings_variables_and_metrics_exist(page: str) -> None:
    text = PAGES[page]
    keys = set(known_keys(ServeConfig))
    assert set(re.findall(r"`((?:gateway|router|engine|prefill|decode)\.(?!json)[a-z_.]+)`", text)) <= keys
    assert set(re.findall(r"BATON_[A-Z_]+", text)) <= {*VARIABLES, *map(variable, keys)}
    assert set(re.findall(r"(?:^    |`)baton ([a-z][a-z-]*)(?=[ `\n])", text, re.MULTILINE)) <= set(COMMANDS)
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert set(re.findall(r"\bbaton_[a-z_]+", prose)) <= exported_metrics()
