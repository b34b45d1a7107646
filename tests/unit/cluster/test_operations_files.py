"""The files of deploy/ for systemd, nginx and Prometheus; these programs check them where installed."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from baton.gateway.http.auth import OPERATORS_FOLDERS, OPERATORS_PATHS
from tests.metric_scrapes import program
from tests.unit.cluster.deploy_files import DEPLOY, ROOT, exported_metrics, rules

RUNBOOK: Final = ROOT / "docs/operations.md"


def check(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "baton.service"
    text = (DEPLOY / "systemd/baton.service").read_text()
    unit.write_text(text.replace("/opt/baton/bin/baton", sys.executable))
    check(program("systemd-analyze"), "verify", str(unit))


def test_unit_waits_for_drains_and_restarts_after_any_failure() -> None:
    text = (DEPLOY / "systemd/baton.service").read_text()
    settings = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"\w+=", line))
    assert settings["KillMode"] == "mixed"  # SIGTERM goes to `baton serve`, which drains the others in order
    assert int(settings["TimeoutStopSec"]) > 2 * 30 + 5  # drain_timeout_s of gateways, then of workers
    # `baton serve` also ends with status 2 when Ray cannot be joined yet, or has no room at the moment.
    assert settings["Restart"] == "on-failure" and "RestartPreventExitStatus" not in settings


def test_proxy_passes_no_path_of_operators_on() -> None:
    text = (DEPLOY / "nginx/baton.conf").read_text()
    locations: list[tuple[str, str]] = re.findall(r"location (?:~ )?(\S+) \{(.*?)\n    \}", text, re.DOTALL)

    def block(path: str) -> str:  # nginx takes the first expression that matches; "/" is the last here
        return next(block for pattern, block in locations if re.search(pattern, path))

    assert all("proxy_pass" in block(path) for path in ("/v1/models", "/v1/chat/completions", "/ping"))
    operators = [*OPERATORS_PATHS, *(f"{folder}x" for folder in OPERATORS_FOLDERS)]
    assert all("return 404;" in block(path) for path in operators)


def test_alerts_use_exported_metrics_and_have_runbook_entries() -> None:
    asked = {name for rule in rules() for name in re.findall(r"baton_\w+", rule["expr"])}
    assert asked
    assert asked <= exported_metrics()
    runbook = RUNBOOK.read_text()
    assert all(f"`{rule['alert']}`" in runbook for rule in rules())
