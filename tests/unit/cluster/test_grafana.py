"""The dashboard by Grafana's own types, and each of its queries in a Prometheus that has scraped Baton."""

import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from grafana_foundation_sdk.models.prometheus import Dataquery

from baton.bench.processes import free_port
from baton.gateway.metrics.exporter import Exporter
from baton.gateway.metrics.metrics import Metrics
from baton.messages.control import KvEventsWanted
from baton.messages.operations import Status
from baton.messages.status import TenantStatus
from baton.tenants import Refusal
from tests.http_answers import Answering, serving
from tests.metered_cluster import MeteredCluster
from tests.metric_scrapes import program
from tests.node_peers import a_worker_status
from tests.scripted_service import ScriptedService
from tests.unit.cluster.deploy_files import DEPLOY, RULES, exported_metrics, rules
from tests.waiting import wait_for
from tests.worker_pair import ROUTER, WorkerPair
from tests.worker_pair_cases import a_request

DASHBOARD: Final = (DEPLOY / "grafana/baton.json").read_text()
ROWS: Final = ["Operator", "Latency", "KV", "Router", "Tenants", "Transfers"]
NUM_SCRAPES: Final = 8
STARTS_S: Final = 60.0


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD)["panels"]
    return found


def queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", ())]


def lost(written: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Yield the fields that Grafana's types do not have, or have otherwise."""
    if isinstance(written, dict) and isinstance(kept, dict):
        for key, value in written.items():
            yield from lost(value, kept.get(key, ...), f"{path}/{key}")
    elif isinstance(written, list) and isinstance(kept, list) and len(written) == len(kept):
        for index, value in enumerate(written):
            yield from lost(value, kept[index], f"{path}/{index}")
    elif written != kept:
        yield path


def test_grafanas_types_have_every_field_of_the_dashboard() -> None:
    """None is lost when Grafana's SDK reads the dashboard and writes it again."""
    document = json.loads(DASHBOARD)
    register_default_plugins()
    dashboard = Dashboard.from_json(document)
    assert dashboard.panels is not None
    targets = [target for panel in dashboard.panels for target in getattr(panel, "targets", None) or ()]
    assert targets and all(isinstance(target, Dataquery) for target in targets)
    assert [*lost(document, json.loads(JSONEncoder().encode(dashboard)))] == []


def test_rows_are_those_that_operators_look_for() -> None:
    assert [panel["title"] for panel in panels() if panel["type"] == "row"] == ROWS
    charts = [panel for panel in panels() if panel["type"] != "row"]
    assert all(panel["title"] and panel["description"].endswith(".") for panel in charts)
    assert len({panel["title"] for panel in charts}) == len(charts)


def test_panels_do_not_cover_each_other() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels())
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        taken |= cells


def test_dashboard_asks_for_metrics_that_there_are() -> None:
    asked = {name for query in queries() for name in re.findall(r"baton_\w+", query)}
    assert asked and asked <= exported_metrics()


class Target:
    """A gateway that answers scrapes: its workers are real, its router is of a simulated cluster."""

    def __init__(self, pair: WorkerPair) -> None:
        self.num_scrapes = 0
        self._pair = pair
        self._cluster = MeteredCluster()
        self._service = ScriptedService()
        self._exporter = Exporter(self._cluster.metrics, self._service, models=["tiny"], vllm_names=True)
        self.texts = [self._text(minute) for minute in range(NUM_SCRAPES)]

    def scraped(self) -> bytes:
        """Return the next text; the last one again when there is no other."""
        self.num_scrapes += 1
        return self.texts[min(self.num_scrapes, NUM_SCRAPES) - 1]

    def _text(self, minute: int) -> bytes:
        self._pair.answer(a_request(minute))
        cluster, pair = self._cluster, self._pair
        cluster.events.run_until(60.0 * (minute + 1))
        router = cluster.status().routers[0]
        tenant = TenantStatus(
            tenant="acme", work_tokens=90 * minute, num_dispatched=minute, refused={Refusal.SHED: minute}
        )
        queue = msgspec.structs.replace(router.queue, tenants=(tenant,))
        workers = tuple(
            a_worker_status(host.worker, host.node.load()) for host in (pair.prefill, pair.decode)
        )
        routers = (msgspec.structs.replace(router, queue=queue, redis="up"),)
        self._service.status = Status(workers=workers, routers=routers)
        self._count(cluster.metrics)
        return self._exporter.text([cluster.metrics])

    def _count(self, metrics: Metrics) -> None:
        """Count what a gateway's HTTP layer and the timelines count."""
        metrics.decode.observe(0.3)
        metrics.unaccounted.observe(0.001)
        metrics.parts_us["decode"] += 1000
        metrics.refused["headers"] += 1
        metrics.events["replays_lost"] += 1
        tenant = metrics.tenant("acme")
        tenant.calls["answered"] += 1
        tenant.met["ttft"] += 1


def scraped(target: Target) -> AbstractContextManager[int]:
    """Serve the target's metrics on loopback; yields the port."""

    class Metered(Answering):
        def get(self) -> None:
            self.answer(200, target.scraped(), {"content-type": "text/plain; version=0.0.4"})

    return serving(Metered)


class Prometheus:
    """A Prometheus process on loopback."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._address}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of the HTTP API. Raises HTTPError for a query that fails."""
        url = f"{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]


@contextmanager
def prometheus(folder: Path, target_port: int) -> Iterator[Prometheus]:
    """Run Prometheus with Baton's rules; it scrapes the port each second."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [
            {"job_name": "baton", "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}]}
        ],
        "rule_files": [str(RULES)],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    options = (f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={folder / 'data'}")
    command = [program("prometheus"), f"--config.file={folder / 'prometheus.yml'}", *options]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            made = Prometheus(port)
            wait_for(made.is_ready, STARTS_S, interval_s=0.1)
            yield made
        finally:
            process.terminate()
            process.wait(30)


def test_prometheus_answers_each_query_and_evaluates_each_rule(tmp_path: Path, tiny_model: Path) -> None:
    program("prometheus")
    with closing(WorkerPair(tiny_model)) as pair:
        for host in (pair.prefill, pair.decode):
            pair.tell(host, ROUTER, KvEventsWanted())
        target = Target(pair)
    asked = [query.replace("$__rate_interval", "60s") for query in queries()]
    with scraped(target) as port, prometheus(tmp_path, port) as made:
        wait_for(lambda: target.num_scrapes >= NUM_SCRAPES, STARTS_S, interval_s=0.1)
        found = {query: made.get("query", query=query) for query in asked}
        (group,) = made.get("rules")["groups"]
    assert [query for query, data in found.items() if not data["result"]] == []
    assert [rule["health"] for rule in group["rules"]] == ["ok"] * len(rules())
