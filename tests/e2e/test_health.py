"""`/health` of a whole cluster says whether prefill workers work, though the policy can do without them."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from baton.gateway.api.health import FRESH_S
from tests.served import Served, until

WAIT_S = 120.0  # of a slow machine


def status(cluster: Served, path: str = "/health") -> int:
    return cluster.http("GET", path).status_code


def num_transferred(cluster: Served) -> int:
    return sum(each.load.counters.get("remote_prefills", 0) for each in cluster.status().values())


def test_health_has_a_prefill_worker_compute_by_every_policy(redundant_cluster: Served) -> None:
    """The prompts of clients are so short that the policy has decode workers compute them."""
    until(lambda: status(redundant_cluster) == 200, WAIT_S)
    before = num_transferred(redundant_cluster)

    def is_transferred() -> bool:
        return status(redundant_cluster) == 200 and num_transferred(redundant_cluster) > before

    until(is_transferred, WAIT_S)


def test_a_prefill_worker_that_stands_still_is_no_health_though_requests_are_answered(
    redundant_cluster: Served,
) -> None:
    """The supervisor stands still as well: it would replace the worker within seconds.

    Each of the two gateways may still answer 200 for FRESH_S after its last probe.
    """
    until(lambda: status(redundant_cluster) == 200, WAIT_S)
    pids = redundant_cluster.process.pid, redundant_cluster.pid_of("prefill-0")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(FRESH_S)
        until(lambda: status(redundant_cluster) == 503, WAIT_S)
        with ThreadPoolExecutor(4) as threads:  # each of them asks one of the two gateways
            for answer in threads.map(redundant_cluster.http, ["GET"] * 4, ["/health"] * 4):
                assert answer.status_code == 503 and "prefill" in answer.json()["error"]["message"]
        assert status(redundant_cluster, "/ping") == 200
        until(redundant_cluster.answers, WAIT_S)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # the worker was replaced
                os.kill(pid, signal.SIGCONT)
    until(lambda: status(redundant_cluster) == 200, WAIT_S)
