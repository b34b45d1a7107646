"""`baton serve tiny --wake-on-request`: a request wakes a model that sleeps."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.served import Served, served, until

OPTIONS = ("tiny", "--runtime", "local", "--kv-cache-memory", "32MiB", "--drain-timeout", "1")
PROMPT = "copy(sun moon star)="


@pytest.fixture(scope="module")
def cluster() -> Iterator[Served]:
    with served(*OPTIONS, "--wake-on-request") as found:
        yield found


def is_sleeping(cluster: Served) -> bool:
    return bool(cluster.get("/is_sleeping").json()["is_sleeping"])


def test_request_wakes_the_model_and_gets_the_same_tokens(cluster: Served) -> None:
    before = cluster.complete(PROMPT)
    assert cluster.http("POST", "/sleep").is_success
    assert is_sleeping(cluster)
    assert cluster.complete(PROMPT) == before
    assert not is_sleeping(cluster)


def test_answer_that_is_longer_than_the_bound_goes_on_after_the_wake(cluster: Served) -> None:
    """It wakes the model itself, since it waits for a worker."""
    whole = [
        chunk["choices"][0]["text"] for chunk in cluster.stream(PROMPT, max_tokens=1500, ignore_eos=True)
    ]
    with closing(cluster.stream(PROMPT, max_tokens=1500, ignore_eos=True)) as stream:
        got = [next(stream)["choices"][0]["text"]]
        try:
            cluster.baton("sleep", "--port", str(cluster.port))
        except subprocess.CalledProcessError as error:  # the request woke the model before it looked
            assert "a later order to do the opposite" in error.stderr
        got += [chunk["choices"][0]["text"] for chunk in stream]
    assert "".join(got) == "".join(whole)
    assert "decode-0 sleeps" in "\n".join(cluster.said)


def test_health_checks_pass_while_the_model_falls_asleep_and_do_not_wake_it(cluster: Served) -> None:
    # A request that outlasts the drain is replayed, and wakes the model.
    running = cluster.stream(PROMPT, max_tokens=8, ignore_eos=True)
    next(running)
    asked = threading.Thread(target=cluster.http, args=("POST", "/sleep"))
    asked.start()
    reading = threading.Thread(target=list, args=(running,))
    reading.start()
    while asked.is_alive():
        cluster.get("/health")
        asked.join(0.1)
    reading.join()
    for _ in range(10):
        time.sleep(0.2)
        cluster.get("/health")
    assert is_sleeping(cluster)
    assert cluster.complete(PROMPT)


def test_worker_that_is_killed_while_it_sleeps_sleeps_again_until_it_is_woken(cluster: Served) -> None:
    until(lambda: set(cluster.status()) == {"prefill-0", "decode-0"})  # an earlier test woke them
    assert cluster.http("POST", "/sleep").is_success
    before = {entry.worker.id for entry in cluster.status().values()}
    for name in ("prefill-0", "decode-0"):
        os.kill(cluster.pid_of(name), signal.SIGKILL)

    def sleep_again() -> bool:
        workers = [entry.worker for entry in cluster.status().values() if entry.worker.id not in before]
        return len(workers) == 2 and all(each.is_asleep for each in workers)

    until(lambda: sleep_again() and is_sleeping(cluster))
    assert cluster.complete(PROMPT)
    until(lambda: set(cluster.status()) == {"prefill-0", "decode-0"})
