"""Requests of clients wait while workers are killed."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

from tests.served import Served, until


def test_request_waits_while_all_decode_workers_are_away(redundant_cluster: Served) -> None:
    until(lambda: len(redundant_cluster.status()) == 3)
    workers = [redundant_cluster.pid_of(f"decode-{index}") for index in range(2)]
    supervisor = redundant_cluster.process.pid
    os.kill(supervisor, signal.SIGSTOP)  # it starts no worker meanwhile
    try:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        until(lambda: set(redundant_cluster.status()) == {"prefill-0"})
        asked = {
            "messages": [{"role": "user", "content": "What is Baton?"}],
            "max_tokens": 2,
            "temperature": 0,
        }
        with ThreadPoolExecutor(1) as threads:
            answering = threads.submit(redundant_cluster.post, "/v1/chat/completions", asked)
            until(lambda: redundant_cluster.num_open() == 1)
            assert not answering.done()
            os.kill(supervisor, signal.SIGCONT)
            status, answer = answering.result()
    finally:
        os.kill(supervisor, signal.SIGCONT)
    assert status == 200, answer
