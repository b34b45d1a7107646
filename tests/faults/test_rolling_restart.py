"""A restart of every process in turn under load loses, breaks and changes no answer."""

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from baton.bench.faults.clients import Clients, make_questions
from baton.cluster.runtimes.base import descendants
from tests.served import SERVE, Served, command_line, served, until

NUM_CLIENTS = 4
OPTIONS = ("--prefill", "2", "--decode", "2", "--routers", "2", "--gateways", "2", "--drain-timeout", "60")


def pids(cluster: Served) -> dict[str, int]:
    """Return process name -> pid, by the processes' titles. The template of workers is none of them."""
    titles = {pid: command_line(pid).split() for pid in descendants(cluster.process.pid)}
    named = {title[1]: pid for pid, title in titles.items() if title[:1] == ["baton"] and len(title) == 2}
    return {name: pid for name, pid in named.items() if name != "template"}


def gateways_of(found: dict[str, int]) -> set[int]:
    return {found[name] for name in ("gateway-0", "gateway-1") if name in found}


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_every_process_is_restarted_under_load_and_no_answer_is_lost() -> None:
    questions = make_questions(seed=2)
    with served(*SERVE, *OPTIONS) as cluster:
        clients = Clients(cluster.url, questions, 0, NUM_CLIENTS)
        is_over = threading.Event()

        async def ask_on() -> None:
            while not is_over.is_set():
                await clients.run(1.0)

        load = threading.Thread(target=lambda: asyncio.run(ask_on()))
        load.start()
        try:
            before = pids(cluster)
            for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
                assert f"{name} serves again" in cluster.baton("restart", name, "--port", str(cluster.port))
            for name in ("router-0", "router-1", "gateway-0", "gateway-1"):
                os.kill(before[name], signal.SIGTERM)
                until(lambda: pids(cluster).get(name, before[name]) != before[name], 60.0)  # noqa: B023
                until(lambda: len(cluster.routers()) == 2, 60.0)
                until(lambda: cluster.gateways() == gateways_of(pids(cluster)), 60.0)
        finally:
            is_over.set()
            load.join()
        after = pids(cluster)
        print(clients.outcomes, clients.complaints)
        assert before.keys() == after.keys() and not set(before.values()) & set(after.values())
    counts = clients.outcomes
    assert counts["answered"] > NUM_CLIENTS
    # The kernel resets connections that a gateway has not accepted yet; their clients try again.
    assert (counts["lost"], counts["wrong"], counts["resumed"], counts["refused"]) == (0, 0, 0, 0)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_restarted_worker_continues_prompts_from_its_disk(tmp_path: Path) -> None:
    options = ("--prefill", "0", "--host-cache-memory", "16MiB", "--kv-disk-path", str(tmp_path))
    body = {"prompt": "the sun and the moon and a star; " * 20, "max_tokens": 20, "temperature": 0}

    def ask(cluster: Served) -> tuple[str, int]:
        status, answer = cluster.post("/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with served(*SERVE, *options) as cluster:
        text, num_cached = ask(cluster)
        assert num_cached == 0
        _, num_known = ask(cluster)
        assert "decode-0 serves again" in cluster.baton("restart", "decode-0", "--port", str(cluster.port))
        assert ask(cluster) == (text, num_known) and num_known
