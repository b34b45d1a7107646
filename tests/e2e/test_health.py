"""`/health` of a whole cluster says whether prefill workers work, by the policy that can do without them."""

import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.served import Served, served, until

WAIT_S = 120.0  # of a slow machine


@pytest.fixture(scope="module")
def cluster() -> Iterator[Served]:
    options = ("--runtime", "local", "--kv-cache-memory", "64MiB", "--drain-timeout", "5")
    with served("tiny", *options, "--router-policy", "cost") as found:
        yield found


def ask(cluster: Served, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", cluster.port, timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def num_transferred(cluster: Served) -> int:
    return cluster.status()["decode-0"].load.counters.get("remote_prefills", 0)


def test_health_has_a_prefill_worker_compute_by_every_policy(cluster: Served) -> None:
    """The prompts of clients are so short that the policy has decode workers compute them."""
    before = num_transferred(cluster)
    until(lambda: ask(cluster, "/health")[0] == 200, WAIT_S)
    until(lambda: num_transferred(cluster) > before, WAIT_S)


def test_a_prefill_worker_that_stands_still_is_no_health_though_requests_are_answered(
    cluster: Served,
) -> None:
    until(lambda: ask(cluster, "/health")[0] == 200, WAIT_S)
    pid = cluster.pid_of("prefill-0")
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: ask(cluster, "/health")[0] == 503, WAIT_S)
        status, answer = ask(cluster, "/health")
        assert status == 200 or "prefill" in answer["error"]["message"]  # it may have been replaced by now
        assert ask(cluster, "/ping")[0] == 200
        until(cluster.answers, WAIT_S)
    finally:
        with suppress(ProcessLookupError):  # it was replaced
            os.kill(pid, signal.SIGCONT)
    until(lambda: ask(cluster, "/health")[0] == 200, WAIT_S)
