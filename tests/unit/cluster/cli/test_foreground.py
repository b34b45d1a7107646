"""`baton router`, as Kubernetes or compose would run it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cluster.cli.main import main
from baton.cluster.cluster_key import write_secret

BATON = (sys.executable, "-m", "baton")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    write_secret(tmp_path / "key", b"0123456789abcdef")
    return tmp_path / "key"


def test_a_router_serves_until_it_is_told_to_stop(key_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = os.environ | {"BATON_CLUSTER_KEY_FILE": str(key_file)}
    command = [*BATON, "router", "--router-policy", "round-robin"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert first.startswith("baton: router serves at 127.0.0.1:")
        address = first.split()[-1]
        assert main(["status", "--router", address, "--cluster-key-file", str(key_file)]) == 0
        assert "0 gateways" in capsys.readouterr().out
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["router"], "--cluster-key-file: expected the file with the cluster's key, got none"),
        (["router", "--port", "-1"], "router.port: expected 0 to 65535, got -1"),
        (["router", "--router-policy", "best"], "--router-policy: expected one of"),
        (["router", "--redis", "localhost:6379"], "router.redis: expected auto, none or a URL (redis://"),
        (
            ["gateway", "tiny", "--cluster-key-file", "k"],
            "--router HOST:PORT: expected where the router listens",
        ),
        (
            ["worker", "decode", "tiny"],
            "no cluster of yours runs on this machine: start one with `baton serve`",
        ),
        (["worker", "decode", "--router", "h:1"], 'MODEL: expected a directory, or "tiny", got none'),
        (["worker", "decode", "tiny", "--router", "h"], "expected HOST:PORT such as 10.0.0.1:7000, got 'h'"),
        (["status", "--router", "h:99999"], "expected HOST:PORT"),
        (["status", "--router", "a:1,b"], "expected HOST:PORT such as 10.0.0.1:7000, got 'b'"),
        (["status", "--router", ",".join(["a:1"] * 9)], "expected 8 routers at most, got 9"),
        (["worker", "both", "tiny"], "invalid choice: 'both'"),
        (["serv"], "invalid choice: 'serv'"),
    ],
)
def test_what_is_missing_is_told_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("BATON_CLUSTER_KEY_FILE", raising=False)
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))  # no cluster has left its record there
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    err = capsys.readouterr().err
    assert status == 2
    assert message in err and err.count("\n") == 1
