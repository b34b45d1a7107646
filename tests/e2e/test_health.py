"""`/health` of a whole cluster says whether prefill workers work, though the policy can do without them."""

import http.client
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

from baton.gateway.api.health import FRESH_S
from tests.served import Served, until

WAIT_S = 120.0  # of a slow machine


def ask(cluster: Served, path: str) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", cluster.port, timeout=30)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def num_transferred(cluster: Served) -> int:
    return sum(each.load.counters.get("remote_prefills", 0) for each in cluster.status().values())


def test_health_has_a_prefill_worker_compute_by_every_policy(redundant_cluster: Served) -> None:
    """The prompts of clients are so short that the policy has decode workers compute them."""
    until(lambda: ask(redundant_cluster, "/health")[0] == 200, WAIT_S)
    before = num_transferred(redundant_cluster)

    def is_transferred() -> bool:
        return ask(redundant_cluster, "/health")[0] == 200 and num_transferred(redundant_cluster) > before

    until(is_transferred, WAIT_S)


def test_a_prefill_worker_that_stands_still_is_no_health_though_requests_are_answered(
    redundant_cluster: Served,
) -> None:
    """The supervisor stands still as well: it would replace the worker within seconds.

    Each of the two gateways may still answer 200 for FRESH_S after its last probe.
    """
    until(lambda: ask(redundant_cluster, "/health")[0] == 200, WAIT_S)
    pids = redundant_cluster.process.pid, redundant_cluster.pid_of("prefill-0")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(FRESH_S)
        until(lambda: ask(redundant_cluster, "/health")[0] == 503, WAIT_S)
        with ThreadPoolExecutor(4) as threads:  # each of them asks one of the two gateways
            for status, answer in threads.map(ask, [redundant_cluster] * 4, ["/health"] * 4):
                assert status == 503 and "prefill" in answer["error"]["message"]
        assert ask(redundant_cluster, "/ping")[0] == 200
        until(redundant_cluster.answers, WAIT_S)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # the worker was replaced
                os.kill(pid, signal.SIGCONT)
    until(lambda: ask(redundant_cluster, "/health")[0] == 200, WAIT_S)
