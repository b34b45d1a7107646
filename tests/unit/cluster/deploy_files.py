"""The files of deploy/, and the metrics that they may name."""

import re
from pathlib import Path
from typing import Any, Final

import yaml

from baton.gateway.metrics.exporter import Exporter
from baton.gateway.metrics.metrics import Metrics
from baton.messages.operations import Status
from baton.messages.workers import Load
from tests.node_peers import a_worker, a_worker_status
from tests.scripted_service import ScriptedService

ROOT: Final = Path(__file__).resolve().parents[3]
DEPLOY: Final = ROOT / "deploy"
RULES: Final = DEPLOY / "prometheus/baton-rules.yml"


def metrics_text() -> str:
    """Return what a gateway exports whose service has one worker that has everything to tell."""
    service = ScriptedService()
    service.counters["replays"] = 1
    worker, load = a_worker("decode-0", node="host-7"), Load(pages={"free": 4}, counters={"opened_shm": 1})
    service.status = Status(workers=(a_worker_status(worker, load),))
    exporter = Exporter(Metrics(), service, models=["tiny"], vllm_names=False)
    return exporter.text([Metrics()]).decode()


def exported_metrics() -> set[str]:
    """Return the names of all metrics that a gateway exports, and of a histogram's series."""
    found = set()
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", metrics_text(), re.MULTILINE):
        suffixes = ("", "_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        found |= {name + suffix for suffix in suffixes}
    return found


def rules() -> list[dict[str, Any]]:
    """Return the alerts of Prometheus."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found
