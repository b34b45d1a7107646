"""`baton bundle` on a running cluster, and `baton sim --replay` of what it wrote."""

import base64
import json
import os
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cluster.cluster_record import find_record
from baton.request import TokenIds
from tests.served import SERVE, Served, served, until

PASSWORD = "canary-password"  # of a Redis that is not there; requests go on
REDIS = f"redis://canary-user:{PASSWORD}@127.0.0.1:9/3?password={PASSWORD}"
PROMPT = "copy(sun moon star canary rock)=" * 12


@pytest.fixture(scope="module")
def cluster() -> Iterator[Served]:
    with served(*SERVE, "--routers", "2", "--decode", "2", "--redis", REDIS) as found:
        yield found


@pytest.fixture(scope="module")
def bundle(cluster: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of some seconds of load in which a worker is killed and started again."""
    for number in range(6):
        cluster.complete(f"{number}{PROMPT}", 4)
    before = cluster.status()["decode-0"].worker.id
    os.kill(cluster.pid_of("decode-0"), signal.SIGKILL)
    for number in range(6):
        cluster.complete(f"{number}{PROMPT}", 4)
    until(lambda: cluster.has_replaced("decode-0", before))
    cluster.complete(PROMPT, 4)
    path = tmp_path_factory.mktemp("bundle") / "incident.zip"
    told = cluster.baton("bundle", "--last", "10m", "--out", str(path), "--port", str(cluster.port))
    assert told.startswith(f"{path}: ") and "not in it" not in told
    return path


def lines_of(archive: zipfile.ZipFile, name: str) -> list[dict[str, object]]:
    names = [each for each in archive.namelist() if each.endswith(name)]
    assert len(names) == 2, "one of each router"
    return [json.loads(line) for each in names for line in archive.read(each).splitlines()]


def test_bundle_has_decisions_faults_metrics_and_settings(bundle: Path) -> None:
    with zipfile.ZipFile(bundle) as archive:
        decisions = lines_of(archive, "decisions.jsonl")
        assert sum(each["kind"] == "Decided" for each in decisions) >= 13
        assert any("compute_s" in each.get("terms", ()) for each in decisions)  # type: ignore[operator]
        faults = [(each["kind"], each.get("process")) for each in lines_of(archive, "faults.jsonl")]
        assert faults.count(("Left", "decode-0")) == 2 and ("Joined", "decode-0") in faults
        (metrics,) = [name for name in archive.namelist() if name.startswith("metrics/")]
        assert b"baton_time_to_first_token_seconds_count" in archive.read(metrics)
        settings = json.loads(archive.read("settings.json"))
        assert settings["router"]["redis"] == "redis://127.0.0.1:9/3"
        assert settings["model"] == "tiny" and settings["decode"]["num_workers"] == 2
        manifest = json.loads(archive.read("manifest.json"))
        assert manifest["missing"] == [] and manifest["last_s"] == 600.0
        (first, _) = json.loads(archive.read("status.json"))
        assert {each["worker"]["name"] for each in first["workers"]} >= {"decode-0", "prefill-0"}


def test_no_secret_and_no_prompt_is_in_the_bundle(cluster: Served, bundle: Path) -> None:
    _, answer = cluster.post("/tokenize", {"model": "tiny", "prompt": PROMPT})
    token_ids = answer["tokens"]
    canaries = [b"moon", TokenIds.of(token_ids[:4]).packed]
    canaries += [b"canary", PASSWORD.encode()]
    for key in find_record(cluster.port).keys:
        canaries += [key, key.hex().encode(), base64.b64encode(key)[:16]]
    with zipfile.ZipFile(bundle) as archive:
        for name in archive.namelist():
            body = archive.read(name)
            for canary in canaries:
                assert canary not in body, (name, canary)


def test_bundle_is_replayed_bit_for_bit(cluster: Served, bundle: Path) -> None:
    told = cluster.baton("sim", "--replay", str(bundle))
    assert told.count("every decision is the recorded one, bit for bit") == 2
    told = cluster.baton("sim", "--replay", str(bundle), "--policy", "round-robin")
    assert "round-robin sends" in told and "predicted TTFT" in told


def test_router_that_does_not_answer_is_named(cluster: Served, tmp_path: Path) -> None:
    address = find_record(cluster.port).routers[1]
    pid = cluster.listening_on(address.port)
    os.kill(pid, signal.SIGSTOP)
    try:
        path = tmp_path / "part.zip"
        told = cluster.baton("bundle", "--out", str(path), "--port", str(cluster.port))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert f"not in it: the router at {address.host}:{address.port} does not answer" in told
    with zipfile.ZipFile(path) as archive:
        assert sum(name.endswith("/recording") for name in archive.namelist()) == 1


def test_gateways_that_are_gone_are_named(cluster: Served, tmp_path: Path) -> None:
    """The supervisor stands still: it would replace the gateway within seconds."""
    path, gateway = tmp_path / "part.zip", cluster.listening_on(cluster.port)
    os.kill(cluster.process.pid, signal.SIGSTOP)
    try:
        os.kill(gateway, signal.SIGKILL)
        told = cluster.baton("bundle", "--out", str(path), "--port", str(cluster.port))
    finally:
        os.kill(cluster.process.pid, signal.SIGCONT)
    assert "not in it: the metrics" in told  # a router may know the address for a moment longer
