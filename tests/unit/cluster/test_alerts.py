"""Each alert of deploy/prometheus fires in its fault, and none in an hour of healthy load.

The series are what the exporter writes: of a simulated cluster in virtual time, of two real workers, or of
statuses that routers can send. Prometheus' own promtool evaluates the rules.
"""

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import msgspec
import pytest

from baton.engine.cache.prefix_cache import PrefixCache
from baton.errors import TransferFailed
from baton.gateway.metrics.exporter import Exporter
from baton.gateway.metrics.metrics import Metrics
from baton.kvtransfer.transports.base import Sender
from baton.kvtransfer.transports.direct import ShmTransport
from baton.messages.operations import OrderedWorkers, Status
from baton.messages.status import OverloadLevel, QueueStatus, RedisState, RouterStatus
from baton.messages.workers import WorkerRole, WorkerStatus
from baton.router.cluster_state import ClusterState
from tests.metered_cluster import ROUTE, MeteredCluster
from tests.metric_scrapes import Scrapes, check_alerts, program
from tests.node_peers import a_worker, a_worker_status, id_of
from tests.scripted_service import ScriptedService
from tests.unit.cluster.deploy_files import RULES, rules
from tests.worker_pair import WorkerPair
from tests.worker_pair_cases import a_request


@pytest.fixture(autouse=True)
def promtool() -> None:
    program("promtool")


class Scene(NamedTuple):
    """The parts that a fault may change."""

    patch: pytest.MonkeyPatch
    model: Path  # of real workers


Fault: TypeAlias = Callable[[Scene], Scrapes]
StatusAt: TypeAlias = Callable[[int], Status | None]  # minute -> status; None: the gateway does not answer


def scraped(
    num_minutes: int, status_at: StatusAt, each_minute: Callable[[Metrics], None] | None = None
) -> Scrapes:
    """Return a scrape at each minute from 0 on. each_minute: changes the gateway's counts before."""
    scrapes, service, metrics = Scrapes(), ScriptedService(), Metrics(gateway="g0")
    exporter = Exporter(metrics, service, models=["tiny"], vllm_names=False)
    for minute in range(num_minutes + 1):
        if each_minute is not None:
            each_minute(metrics)
        service.status = status_at(minute)
        scrapes.add(None if service.status is None else exporter.text([metrics]))
    return scrapes


def a_status(
    *workers: str | WorkerStatus,
    redis: RedisState = "up",
    level: OverloadLevel = OverloadLevel.CALM,
    ordered: Mapping[str, int] = MappingProxyType({}),
) -> Status:
    """Return the status of one router.

    workers: one of each role if there are none. ordered: number of workers by role, in the model's words.
    """
    named = [
        each if isinstance(each, WorkerStatus) else a_worker_status(each)
        for each in workers or ("prefill-0", "decode-0")
    ]
    router = RouterStatus(id=id_of("router"), redis=redis, queue=QueueStatus(level=level))
    told = tuple(OrderedWorkers("tiny", WorkerRole(role), number) for role, number in ordered.items())
    return Status(workers=tuple(named), routers=(router,), ordered=told)


def a_worker_of(model: str, name: str, *, is_asleep: bool = False) -> WorkerStatus:
    return a_worker_status(a_worker(name, model=model, is_asleep=is_asleep))


def served(metrics: Metrics) -> None:
    """Count a minute of answered calls."""
    for _ in range(60):
        metrics.answered(ROUTE, 200)
        metrics.ttft.observe(0.2)
        metrics.duration.observe(1.0)
        metrics.unaccounted.observe(0.001)
        metrics.parts_us["decode"] += 1_000_000


def failed(metrics: Metrics) -> None:
    """Count as many calls that failed."""
    served(metrics)
    metrics.requests[ROUTE, 503] += 2


def answered_late(metrics: Metrics) -> None:
    """Count calls whose first token comes late."""
    served(metrics)
    metrics.ttft.observe(20.0)


def lost_time(metrics: Metrics) -> None:
    """Count calls that spend a part of their time unseen."""
    served(metrics)
    metrics.unaccounted.observe(5.0)


def never(minute: int) -> Status | None:
    return None


def pair_status(pair: WorkerPair) -> Status:
    return a_status(*(a_worker_status(host.worker, host.node.load()) for host in (pair.prefill, pair.decode)))


def of_real_workers(scene: Scene, num_minutes: int, has_flips: bool) -> Scrapes:
    """Answer a request each minute, with two real workers."""
    with closing(WorkerPair(scene.model)) as pair:

        def status_at(minute: int) -> Status:
            if minute:
                pair.decode.endpoint.num_flips = int(has_flips and minute == 1)
                pair.answer(a_request(minute))
            return pair_status(pair)

        return scraped(num_minutes, status_at)


def without_shared_memory(scene: Scene) -> Scrapes:
    def connect(*_: object) -> Sender:
        raise TransferFailed("no shared memory")

    scene.patch.setattr(ShmTransport, "connect", connect)
    return of_real_workers(scene, 8, has_flips=False)


def caches_that_find_nothing(scene: Scene) -> Scrapes:
    scene.patch.setattr(PrefixCache, "_known_pages", lambda self, keys: [])
    return MeteredCluster().run(27)


def reports_that_do_not_arrive(scene: Scene) -> Scrapes:
    scene.patch.setattr(ClusterState, "pages", lambda self, peer, events: None)
    return MeteredCluster().run(27)


def workers_that_change_their_speed(scene: Scene) -> Scrapes:
    """One worker after another computes slowly for a minute: what the router has learnt is wrong."""
    cluster, random = MeteredCluster(), Random(0)

    def slow_down(_: int) -> None:
        slow = random.choice(cluster.workers)
        for worker in cluster.workers:
            worker.engine.more_s = 2.0 if worker is slow else 0.0

    return cluster.run(32, slow_down)


FAULTS: Final[dict[str, Fault]] = {
    "BatonDown": lambda _: scraped(3, never),
    "BatonNoWorkers": lambda _: scraped(3, lambda _: a_status("prefill-0")),
    "BatonNoPrefillWorkers": lambda _: scraped(7, lambda _: a_status("decode-0")),
    "BatonFewerWorkers": lambda _: scraped(
        30,
        lambda minute: a_status(
            "prefill-0",
            "decode-0",
            *(("decode-1",) if minute < 10 else ()),
            ordered={"prefill": 1, "decode": 2},
        ),
    ),
    "BatonErrors": lambda _: scraped(12, lambda _: a_status(), failed),
    "BatonSlowFirstToken": lambda _: scraped(18, lambda _: a_status(), answered_late),
    "BatonOverloaded": lambda _: scraped(12, lambda _: a_status(level=OverloadLevel.CLIP)),
    "BatonRedisDown": lambda _: scraped(7, lambda _: a_status(redis="down")),
    "BatonPrefixHitsMissing": caches_that_find_nothing,
    "BatonTransportFallback": without_shared_memory,
    "BatonRoutingRegret": workers_that_change_their_speed,
    "BatonUnaccountedTime": lambda _: scraped(20, lambda _: a_status(), lost_time),
    "BatonDigestMismatches": lambda scene: of_real_workers(scene, 3, has_flips=True),
    "BatonBlindDecisions": reports_that_do_not_arrive,
}


ALSO: Final = {"BatonDown": ["BatonNoWorkers"]}  # without a scrape no worker is known
# Ten seconds of a core each; `make sim` runs them, and the healthy hour.
SIMULATED: Final = {"BatonPrefixHitsMissing", "BatonRoutingRegret", "BatonBlindDecisions"}


def test_each_alert_has_a_fault() -> None:
    assert [rule["alert"] for rule in rules()] == [*FAULTS]


@pytest.mark.parametrize(
    "alert", [pytest.param(each, marks=[pytest.mark.slow] if each in SIMULATED else []) for each in FAULTS]
)
def test_fault_makes_its_alert_fire_and_no_other(
    alert: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scrapes = FAULTS[alert](Scene(monkeypatch, tiny_model))
    check_alerts(RULES, tmp_path, scrapes, [alert, *ALSO.get(alert, [])], [scrapes.num_scrapes - 1])


def test_model_whose_workers_are_gone_is_told_from_one_that_sleeps(tmp_path: Path) -> None:
    ordered = tuple(
        OrderedWorkers(model, role, 1) for model in ("awake", "asleep", "gone") for role in WorkerRole
    )
    serving = [a_worker_of("awake", name) for name in ("prefill-0", "decode-0")]
    sleeping = [a_worker_of("asleep", f"{role}-1", is_asleep=True) for role in WorkerRole]
    status = msgspec.structs.replace(a_status(*serving, *sleeping), ordered=ordered)
    scrapes = scraped(20, lambda _: status)
    check_alerts(
        RULES,
        tmp_path,
        scrapes,
        ["BatonNoWorkers", "BatonNoPrefillWorkers", *["BatonFewerWorkers"] * 2],
        [20],
    )


def test_cluster_that_is_scaled_down_or_has_no_prefill_workers_is_well(tmp_path: Path) -> None:
    scrapes = scraped(
        40,
        lambda minute: a_status(
            "decode-0", *(("decode-1",) if minute < 10 else ()), ordered={"decode": 2 if minute < 10 else 1}
        ),
    )
    check_alerts(RULES, tmp_path, scrapes, [], range(41))


@pytest.mark.slow
def test_no_alert_fires_in_an_hour_of_healthy_load(tmp_path: Path) -> None:
    cluster = MeteredCluster()
    scrapes = cluster.run(60)
    num_answered = cluster.metrics.requests[ROUTE, 200]
    assert num_answered > 0.99 * len(cluster.clients) > 600
    check_alerts(RULES, tmp_path, scrapes, [], range(61))


def test_no_alert_fires_for_real_workers_and_calls_that_are_well(tmp_path: Path, tiny_model: Path) -> None:
    scrapes = of_real_workers(Scene(pytest.MonkeyPatch(), tiny_model), 10, has_flips=False)
    check_alerts(RULES, tmp_path, scrapes, [], range(11))
    check_alerts(RULES, tmp_path, scraped(30, lambda _: a_status(), served), [], range(31))
