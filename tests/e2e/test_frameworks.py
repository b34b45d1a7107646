"""Frameworks that speak OpenAI's API, against a cluster that serves the tiny model.

`make frameworks` installs them into a virtual environment of their own and runs all tests. `make test` runs
those of the `openai` client if the environment exists. Each script of tests/e2e/frameworks/ prints what one
framework returned.
"""

import fcntl
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from baton.cluster.model_directory import resolve_model
from tests.served import SERVE, served

SCRIPTS: Final = Path(__file__).parent / "frameworks"
REQUIREMENTS: Final = SCRIPTS / "requirements.txt"
INSTALL_TIMEOUT_S: Final = 1800
SCRIPT_TIMEOUT_S: Final = 240

pytestmark = pytest.mark.timeout(INSTALL_TIMEOUT_S + SCRIPT_TIMEOUT_S + 120)

FRUIT: Final = {"name": "fig", "count": 7}
ADD: Final = ["add", {"a": 7, "b": 5}]
SUM: Final = [ADD, "12"]
WEATHER: Final = [["weather", {"city": "Paris"}], "rain"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    template = str(resolve_model("tiny") / "tools.jinja")
    with served(*SERVE, "--chat-template", template) as cluster:
        yield f"{cluster.url}/v1"


@pytest.fixture(scope="session")
def environment(pytestconfig: pytest.Config) -> Path:
    """The folder of the virtual environment; a change of the requirements makes another one."""
    assert pytestconfig.cache is not None
    version = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    return pytestconfig.cache.mkdir("frameworks") / version


@pytest.fixture
def interpreter(request: pytest.FixtureRequest, environment: Path) -> Path:
    """The environment's Python. A slow test installs the environment; other tests are skipped without one."""
    if not stamp(environment).exists() and request.node.get_closest_marker("slow") is None:
        pytest.skip("the frameworks are not installed; `make frameworks` installs them")
    fault = install(environment)
    if fault is not None:
        pytest.skip(f"the frameworks cannot be installed: {fault}")
    return python(environment)


@pytest.fixture
def answers_of(interpreter: Path, request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """A call that returns the results of a script. The cluster starts only where a script can run."""
    return lambda script: run(interpreter, script, request.getfixturevalue("url"))


def stamp(environment: Path) -> Path:
    return environment / "installed"


def python(environment: Path) -> Path:
    return environment / "bin" / "python"


@functools.cache
def install(environment: Path) -> str | None:
    """Make the virtual environment unless it is there; return the reason when pip cannot."""
    pip = (str(python(environment)), "-m", "pip", "--disable-pip-version-check")
    commands = (
        (sys.executable, "-m", "venv", "--clear", str(environment)),
        (*pip, "install", "--quiet", "--requirement", str(REQUIREMENTS)),
    )
    # Another process of pytest-xdist may install at the same time.
    with (environment.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp(environment).exists():
            return None
        try:
            for command in commands:
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
        except subprocess.CalledProcessError as error:
            lines = str(error.stderr).strip().splitlines()
            return next((line for line in lines if line.startswith("ERROR")), str(error))
        except subprocess.TimeoutExpired as error:
            return str(error)
        stamp(environment).touch()
    return None


def run(interpreter: Path, script: str, url: str) -> Any:
    """Return the results that the script printed. It sees few variables of this process."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
    switches = {
        "DO_NOT_TRACK": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else LiteLLM fetches one
        "NO_PROXY": "127.0.0.1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [str(interpreter), str(SCRIPTS / f"{script}_client.py"), url],
        env=kept | switches,
        capture_output=True,
        text=True,
        timeout=SCRIPT_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_guide_names_every_framework() -> None:
    guide = (SCRIPTS.parents[2] / "docs" / "serve.md").read_text()
    (rows,) = re.findall(r"\| package \| version \|.*\n\|.*\n((?:\|.*\n)+)", guide)
    shown = {
        name.strip("` "): version.strip()
        for row in rows.splitlines()
        for name, version in zip(*(cell.split(",") for cell in row.split("|")[1:3]), strict=True)
    }
    required = re.findall(r"^([\w-]+)(?:\[\w+\])?==(.+)$", REQUIREMENTS.read_text(), flags=re.MULTILINE)
    assert shown == dict(required)


@pytest.mark.slow
def test_langchain(answers_of: Callable[[str], Any]) -> None:
    got = answers_of("langchain")
    assert [got[method] for method in ("json_schema", "function_calling", "json_mode")] == [FRUIT] * 3
    assert got["raw"] == [FRUIT, None] and got["streamed"] == FRUIT
    assert (got["sum"], got["weather"]) == (SUM, WEATHER)
    assert got["streamed_call"] == ADD and got["any_call"] == [ADD]
    assert got["agent"] == ["human", "ai", "tool", "ai", "rain"]
    assert got["agent_form"] == FRUIT


@pytest.mark.slow
def test_instructor(answers_of: Callable[[str], Any]) -> None:
    got = answers_of("instructor")
    assert len(got) == 6 and all(answer == FRUIT for answer in got.values()), got


@pytest.mark.slow
def test_pydantic_ai(answers_of: Callable[[str], Any]) -> None:
    got = answers_of("pydantic_ai")
    for output in ("ToolOutput", "NativeOutput"):
        assert got[output] == got[f"{output} streamed"] == FRUIT
    assert (got["sum"], got["weather"]) == (SUM, WEATHER)
    assert got["streamed_sum"] == "12"


@pytest.mark.slow
def test_litellm(answers_of: Callable[[str], Any]) -> None:
    got = answers_of("litellm")
    for provider in ("openai", "hosted_vllm"):
        assert got[f"{provider} form"] == FRUIT
        assert (got[f"{provider} sum"], got[f"{provider} weather"]) == (SUM, WEATHER)
        assert got[f"{provider} streamed_call"] == ADD


def test_openai_client(answers_of: Callable[[str], Any]) -> None:
    got = answers_of("openai")
    assert got["parsed"] == got["streamed"] == FRUIT
    assert {"chunk", "content.delta", "content.done"} <= set(got["events"])
    assert (got["sum"], got["weather"]) == (SUM, WEATHER)
    assert got["streamed_call"] == ADD
