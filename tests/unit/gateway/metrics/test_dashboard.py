"""The files of the page and its routes; tests/e2e/test_dashboard.py has the page in a browser."""

import http.client
import re
import time
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import httpx2
import pytest

from baton.gateway.metrics.dashboard import FOLDER, HEADERS, TYPES
from baton.messages.operations import Status
from baton.messages.workers import Load
from tests.node_peers import a_worker_status
from tests.scripted_service import WORKER_ID, ScriptedService, worker
from tests.served_gateway import ServedGateway

PYPROJECT = Path(__file__).resolve().parents[4] / "pyproject.toml"
FILES = sorted(path.name for path in FOLDER.iterdir())


def service() -> ScriptedService:
    made = ScriptedService()
    made.status = Status(workers=(a_worker_status(worker(), Load(gauges={"x": 1})),))
    return made


@pytest.fixture(scope="module")
def web() -> Iterator[httpx2.Client]:
    with ServedGateway(service) as served, httpx2.Client(base_url=served.url) as client:
        yield client


def test_page_allows_its_own_files_alone(web: httpx2.Client) -> None:
    answer = web.get("/ui")
    policy = answer.headers["content-security-policy"]
    assert answer.headers["content-type"].startswith("text/html")
    assert policy.startswith(
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src"
    )
    assert "unsafe" not in policy and "*" not in policy


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_served_with_its_type(web: httpx2.Client, name: str) -> None:
    answer = web.get(f"/ui/{name}")
    assert (answer.status_code, answer.content) == (200, (FOLDER / name).read_bytes())
    assert answer.headers["content-type"].startswith(TYPES[Path(name).suffix])
    assert {key: answer.headers[key] for key in HEADERS} == HEADERS


def test_wheels_contain_every_file() -> None:
    patterns = tomllib.loads(PYPROJECT.read_text())["tool"]["setuptools"]["package-data"]["*"]
    assert [name for name in FILES if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_page_preloads_every_script() -> None:
    page = (FOLDER / "index.html").read_text()
    named = set(re.findall(r'(?:href|src)="ui/([\w.]+)"', page))
    assert named == {name for name in FILES if name != "index.html"}


def test_files_name_nothing_from_elsewhere_and_parse_no_html() -> None:
    for name in FILES:
        text = (FOLDER / name).read_text()
        assert "http:" not in text and "https:" not in text, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name
        assert not re.search(r'style="|<script>|\son\w+="', text), f"{name}: the policy forbids it"


def test_other_paths_are_not_found(web: httpx2.Client) -> None:
    for path in ("/ui/nothing.js", "/ui/../app.py", "/ui/%2e%2e%2fdashboard.py", "/ui/workers/x", "/ui/"):
        assert web.get(path).status_code == 404


def test_worker_is_told_whole(web: httpx2.Client) -> None:
    told = web.get(f"/ui/workers/{WORKER_ID}").json()
    assert (told["worker"]["name"], told["load"]["gauges"]) == ("decode-0", {"x": 1})


def test_events_come_and_a_drain_ends_them() -> None:
    with ServedGateway(service, drain_timeout_s=30.0) as served:
        connection = http.client.HTTPConnection(served.address.host, served.address.port, timeout=20)
        connection.request("GET", "/ui/events")
        answer = connection.getresponse()
        assert answer.getheader("content-type", "").startswith("text/event-stream")
        lines = iter(answer.readline, b"")
        assert next(lines) == b"event: history\n"
        assert any(line == b"event: snapshot\n" for line in lines)
        begin_s = time.monotonic()
        drained = served.begin_drain()
        assert list(lines), "the stream ends"
        drained.result(timeout=20)
        assert time.monotonic() - begin_s < 15.0, "the drain does not wait for viewers"
        connection.close()
