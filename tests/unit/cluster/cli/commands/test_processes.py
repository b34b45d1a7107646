"""`baton router`, as Kubernetes or compose would run it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cluster.files import write_secret
from tests.unit.cluster.conftest import Baton

COMMAND = (sys.executable, "-m", "baton")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    write_secret(tmp_path / "key", b"0123456789abcdef")
    return tmp_path / "key"


def test_router_serves_until_sigterm_and_says_everything_in_the_format_of_its_option(
    key_file: Path, baton: Baton
) -> None:
    environment = os.environ | {"BATON_CLUSTER_KEY_FILE": str(key_file)}
    command = [*COMMAND, "router", "--router-policy", "round-robin", "--log-format", "json"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        first = json.loads(process.stderr.readline())["message"]
        assert first.startswith("router serves at 127.0.0.1:")
        address = first.split()[-1]
        status, out, _ = baton("status", "--router", address, "--cluster-key-file", str(key_file))
        assert status == 0 and "0 gateways" in out
        process.send_signal(signal.SIGTERM)
        messages = [json.loads(line)["message"] for line in process.stderr]
        assert messages[-1] == "router drains; once more to stop at once"
        assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["router"], "--cluster-key-file: expected the file with the cluster's key, got none"),
        (["router", "--port", "-1"], "--port: expected int, at least 0, at most 65535, got '-1'"),
        (["router", "--router-policy", "best"], "--router-policy: expected one of"),
        (["router", "--redis", "localhost:6379"], "router.redis: expected auto, none or a URL (redis://"),
        (
            ["gateway", "tiny", "--cluster-key-file", "k"],
            "--router HOST:PORT: expected where the router listens",
        ),
        (["gateway", "tiny", "--drain-timeout", "9h"], "--drain-timeout: expected"),
        (
            ["worker", "decode", "tiny"],
            "no cluster of yours runs on this machine: start one with `baton serve`",
        ),
        (
            ["worker", "decode", "--router", "h:1"],
            "MODEL: expected a directory, a repository or",
        ),
        (["worker", "decode", "tiny", "--router", "h"], "expected HOST:PORT such as 10.0.0.1:7000, got 'h'"),
        (["status", "--router", "h:99999"], "expected HOST:PORT"),
        (["status", "--router", "a:1,b"], "expected HOST:PORT such as 10.0.0.1:7000, got 'b'"),
        (["status", "--router", ",".join(["a:1"] * 9)], "expected 8 routers at most, got 9"),
        (["worker", "both", "tiny"], "invalid choice: 'both'"),
        (["serv"], "invalid choice: 'serv'"),
    ],
)
def test_missing_option_is_one_line_and_status_2(
    arguments: list[str], message: str, tmp_path: Path, baton: Baton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BATON_CLUSTER_KEY_FILE", raising=False)
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))  # no cluster has left its record there
    status, _, err = baton(*arguments)
    assert status == 2
    assert message in err and err.count("\n") == 1
