"""The commands of deploy/compose.yaml as processes of this machine: what the containers would run."""

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
import yaml

from baton.bench.processes import free_ports
from tests.forked_baton import ForkedBaton
from tests.served import ROOT, stop, until

KEY: Final = "sk-of-a-test"
SERVICES: Final = ("router", "gateway", "prefill-0", "decode-0")  # one of each kind: cores are few here


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the gateway. All processes end with status 0 when they are told to."""
    directory = tmp_path_factory.mktemp("secrets")
    environment, places = secrets_in(directory)
    router, port = free_ports(2)
    places |= {"7000": f"{router}", "router:7000": f"127.0.0.1:{router}", "0.0.0.0": "127.0.0.1"}
    services = yaml.safe_load(Path(ROOT, "deploy/compose.yaml").read_text())["services"]
    with contextlib.ExitStack() as ends:
        for name in SERVICES:
            command = here(services[name]["command"], places)
            command += ["--port", str(port)] if name == "gateway" else []
            process = ForkedBaton(command, environment)
            ends.callback(end, process)
        yield f"http://127.0.0.1:{port}"


def secrets_in(directory: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The environment of a container, and where its secrets are here."""
    key, tenants = directory / "cluster_key", directory / "tenants"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    tenants.write_text(f"tenants: {{me: {{keys: ['sha256:{hashlib.sha256(KEY.encode()).hexdigest()}']}}}}")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "BATON_CLUSTER_KEY_FILE": str(key)}
    return environment, {"/run/tenants/tenants.yaml": str(tenants)}


def here(command: list[str], places: dict[str, str]) -> list[str]:
    """With this machine in place of containers, whose names are their hosts; a worker's own name stays."""
    words = [command[0]]
    for option, word in itertools.pairwise(command):
        words.append("127.0.0.1" if option == "--host" else places.get(word, word))
    return words


def end(process: ForkedBaton) -> None:
    assert stop(process) == 0
    process.close()


def is_well(url: str) -> bool:
    with contextlib.suppress(httpx2.TransportError):
        return httpx2.get(f"{url}/health", timeout=60).status_code == 200
    return False


def ask(url: str, **headers: str) -> Any:
    body = {"model": "tiny", "prompt": "copy(sun moon star)=", "max_tokens": 8, "temperature": 0}
    return httpx2.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)


def test_processes_that_are_started_one_by_one_answer_who_has_a_key(url: str) -> None:
    until(lambda: is_well(url), 120)
    answer = ask(url, authorization=f"Bearer {KEY}")
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "sun moon star"
    assert ask(url).status_code == 401
