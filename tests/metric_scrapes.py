"""Scrapes of a gateway at regular times, and Prometheus' own evaluation of alert rules on them."""

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

INTERVAL_S: Final = 60
TARGET: Final = {"job": "baton", "instance": "10.0.0.1:8000"}  # labels that Prometheus adds
FIRING: Final = 'count by (alertname) (ALERTS{alertstate="firing"})'


def program(name: str) -> str:
    """Return the path of a program; skip the test when it is not installed."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/bin")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


class Scrapes:
    """The samples of one target, a scrape each INTERVAL_S."""

    def __init__(self) -> None:
        self.num_scrapes = 0
        self._values: dict[str, list[str]] = {}

    def add(self, text: bytes | None) -> None:
        """Add a scrape; None: the target did not answer."""
        found = {_series("up", TARGET): "0" if text is None else "1"}
        for family in text_string_to_metric_families((text or b"").decode()):
            for sample in family.samples:
                found[_series(sample.name, sample.labels | TARGET)] = repr(sample.value)
        for name in (*self._values, *(found.keys() - self._values)):
            values = self._values.setdefault(name, ["_"] * self.num_scrapes)
            values.append(found.get(name, "_"))
        self.num_scrapes += 1

    def series(self) -> list[dict[str, str]]:
        """Return the samples as promtool's input series."""
        return [{"series": name, "values": " ".join(values)} for name, values in self._values.items()]


def _series(name: str, labels: Mapping[str, str]) -> str:
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in sorted(labels.items())) + "}"


def check_alerts(
    rules: Path, folder: Path, scrapes: Scrapes, firing: Iterable[str], minutes: Iterable[int]
) -> None:
    """Have promtool evaluate the rules; exactly these alerts must fire at each of these minutes.

    firing: names of alerts; one that fires for two models is there twice.
    """
    counts = sorted(Counter(firing).items())
    expected = [{"labels": f'{{alertname="{name}"}}', "value": count} for name, count in counts]
    cases: list[dict[str, Any]] = [
        {"expr": FIRING, "eval_time": f"{minute}m", "exp_samples": expected} for minute in minutes
    ]
    test = {"interval": f"{INTERVAL_S}s", "input_series": scrapes.series(), "promql_expr_test": cases}
    file = folder / "test.yml"
    content = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [test]}
    file.write_text(json.dumps(content))  # JSON is YAML, and is written faster
    done = subprocess.run(
        [program("promtool"), "test", "rules", str(file)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
