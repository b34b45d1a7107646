"""The cluster key of a live cluster is rotated: no request fails, and the retired key opens nothing."""

import os
import subprocess
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final
from uuid import uuid4

import pytest

from baton.cluster.cluster_key import Keys, new_key, read_keys
from baton.cluster.cluster_record import find_record
from baton.cluster.files import write_secret
from tests.event_stream import BODY, SteadyClients, joined, read_all, stream
from tests.forked_baton import ForkedBaton
from tests.served import BATON, SERVE, Served, served, stop, until

COMMON: Final = (*SERVE, "--router-policy", "prefix")  # which has prefill workers compute prompts
OPTIONS: Final = (*COMMON, "--prefill", "2", "--decode", "2", "--gateways", "2", "--routers", "2")
RESUMABLE: Final = {"include_usage": True, "resumable": True}
ASKED: Final = BODY | {"max_tokens": 60, "stream_options": RESUMABLE}
RESTARTED_S: Final = 120.0
REFUSED_FOR_S: Final = 4.0  # five dials


def change(cluster: Served, action: str, path: Path) -> Keys:
    """Rotate or retire, and wait until the cluster uses the keys of the file."""
    cluster.baton("cluster-key", action, "--cluster-key-file", str(path))
    keys = read_keys(path)
    until(lambda: find_record(cluster.port).keys == keys)
    return keys


def restart(cluster: Served, name: str) -> None:
    """Restart a worker, and wait until its successor is ready."""
    before = cluster.status()[name].worker.id
    cluster.baton("restart", name, "--port", str(cluster.port))
    until(lambda: cluster.has_replaced(name, before), RESTARTED_S)


def complaints_of(worker: list[str]) -> list[str]:
    """Return the lines about keys of a worker that no router admits."""
    process, said = ForkedBaton(worker, os.environ), list[str]()
    errors = process.stderr
    listening = threading.Thread(target=lambda: said.extend(errors), daemon=True)
    listening.start()
    try:
        until(lambda: any("key" in line for line in said), RESTARTED_S)
        with suppress(subprocess.TimeoutExpired):
            process.wait(REFUSED_FOR_S)
    finally:
        stop(process)
        listening.join(10.0)
        process.close()
    return [line for line in said if "key" in line]


def sends_pages(cluster: Served, before: int) -> bool:
    """Send a new prompt; return whether the prefill worker has sent more KV bytes than `before`."""
    assert cluster.complete(f"{uuid4()}; {BODY['prompt']}")
    return num_sent(cluster) > before


def num_sent(cluster: Served) -> int:
    """Return the KV bytes that the prefill worker has sent."""
    return cluster.status()["prefill-0"].load.kv_bytes


@pytest.mark.timeout(600)
def test_rotation_under_load_fails_no_request_and_refuses_the_retired_key(tmp_path: Path) -> None:
    path, retired = tmp_path / "cluster.key", tmp_path / "retired.key"
    old = new_key()
    write_secret(path, old)
    write_secret(retired, old)
    with served(*OPTIONS, "--cluster-key-file", str(path)) as cluster:
        clients = SteadyClients(cluster.port, ASKED)
        with clients.asking():
            events = stream(cluster.port, ASKED)
            begun = [next(events) for _ in range(3)]
            events.close()

            new, second = change(cluster, "rotate", path)
            assert second == old != new
            resumed = joined([*begun, *read_all(cluster.port, ASKED, begun[-1].id)])
            assert resumed["choices"] == clients.expected  # by an event id that the old key sealed
            restart(cluster, "prefill-1")
            restart(cluster, "decode-1")

            assert change(cluster, "retire", path) == (new,)
            restart(cluster, "decode-0")
            clients.until_more()
        (router, *_) = find_record(cluster.port).routers
        command = ["worker", "decode", "tiny"]
        where = ["--router", f"{router.host}:{router.port}", "--name", "stranger"]
        (complaint,) = complaints_of([*command, *where, "--cluster-key-file", str(retired)])
        assert "does not hold this cluster's key of a router" in complaint
        assert "stranger" not in cluster.status()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--runtime", "ray"), id="ray"),
        pytest.param(("--prefill-tp", "2", "--decode-tp", "2"), id="ranks"),
    ],
)
def test_running_workers_take_each_new_key(options: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    write_secret(path, new_key())
    with served(
        *COMMON, "--prefill", "1", *options, "--cluster-key-file", str(path), program=BATON
    ) as cluster:
        for action, restarted in (("rotate", "decode-0"), ("retire", "prefill-0"), ("rotate", "decode-0")):
            change(cluster, action, path)
            restart(cluster, restarted)  # its successor has only the new key, or has it first
            until(partial(sends_pages, cluster, num_sent(cluster)), RESTARTED_S)
