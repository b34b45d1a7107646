"""A cluster is replaced by one of another build, as docs/operations.md says, while clients ask."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx2
import pytest

from baton.bench.faults.link_proxy import LinkProxy
from baton.cluster.cluster_key import new_key
from baton.cluster.cluster_record import find_record
from baton.cluster.files import write_secret
from baton.cluster.runtimes.base import descendants
from baton.messages.codec import CONTROL_SCHEMA
from tests.event_stream import BODY, SteadyClients
from tests.served import BATON, ROOT, SERVE, Served, are_gone, served, stop, until

OPTIONS: Final = (*SERVE, "--drain-timeout", "60")
SOON_S: Final = 120.0
DIALS_S: Final = 5.0
MOST_DIALS: Final = 7  # at 0 s, at once again, and after pauses of 0.5 s, 1 s and 2 s; two to spare


@pytest.fixture(scope="module")
def other_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose Hello has one more field."""
    folder = tmp_path_factory.mktemp("build")
    ignored = shutil.ignore_patterns(".*", "tests", "docs", "deploy")
    shutil.copytree(ROOT, folder / "checkout", ignore=ignored, symlinks=True)
    control = folder / "checkout" / "baton" / "messages" / "control.py"
    text = control.read_text()
    line = "    worker: Worker | None = None  # of a worker\n"
    assert text.count(line) == 1
    control.write_text(text.replace(line, f'{line}    motto: str = ""\n'))
    return folder / "checkout"


def is_healthy(port: int) -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/health", timeout=30).is_success
    except httpx2.HTTPError:
        return False


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """A cluster of this build, and its key file. The last test ends it."""
    key = tmp_path_factory.mktemp("old") / "cluster.key"
    write_secret(key, new_key())
    with served(*OPTIONS, "--cluster-key-file", str(key)) as cluster:
        yield cluster, key


def test_a_worker_of_another_build_is_refused_by_name_and_dials_seldom(
    old: tuple[Served, Path], tmp_path: Path, other_build: Path
) -> None:
    cluster, key = old
    router = find_record(cluster.port).routers[0]
    with LinkProxy((router.host, router.port)) as proxy:
        command = [sys.executable, "-m", "baton", "worker", "decode", "tiny", "--name", "stranger"]
        process = subprocess.Popen(
            [*command, "--router", f"127.0.0.1:{proxy.address[1]}", "--cluster-key-file", str(key)],
            env=os.environ | {"PYTHONPATH": str(other_build)},
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            until(lambda: proxy.num_connections >= 2, SOON_S)  # it has been refused
            time.sleep(DIALS_S)
            num_dials = proxy.num_connections
            assert "stranger" not in cluster.status()
        finally:
            stop(process)
        assert process.stderr is not None
        with process.stderr:
            said = [line for line in process.stderr if "mixed builds" in line]
        assert len(said) == 1 and CONTROL_SCHEMA.hex() in said[0], said
        assert said[0].count("message schema") == 2
        assert num_dials <= MOST_DIALS
        assert sum("mixed builds" in line for line in cluster.said) == 1


@pytest.mark.timeout(600)
def test_a_cluster_of_another_build_takes_over_under_load(
    old: tuple[Served, Path], tmp_path: Path, other_build: Path
) -> None:
    key = tmp_path / "new.key"
    write_secret(key, new_key())
    cluster, _ = old
    clients = SteadyClients(cluster.port, BODY | {"max_tokens": 60})
    with contextlib.ExitStack() as ends, clients.asking():
        environment = {"PYTHONPATH": str(other_build), "PYTHONSAFEPATH": "1"}
        new = ends.enter_context(
            served(*OPTIONS, "--cluster-key-file", str(key), program=BATON, **environment)
        )
        with pytest.raises(subprocess.CalledProcessError):
            new.baton("status", "--port", str(new.port))  # by this build
        until(lambda: any("mixed builds" in line for line in new.said))
        until(lambda: is_healthy(new.port), SOON_S)
        clients.add(new.port)
        clients.until_more()
        clients.remove(cluster.port)
        pids = descendants(cluster.process.pid)
        running = cluster.stream(BODY["prompt"], max_tokens=600, ignore_eos=True)
        chunks = [next(running)]
        cluster.process.send_signal(signal.SIGTERM)
        chunks += running  # the stream ends before the cluster, and everything with it
        assert cluster.process.wait(SOON_S) == 0
        assert chunks[-1]["choices"][0]["finish_reason"] == "length" and are_gone(pids)
        clients.until_more()
