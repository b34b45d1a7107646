"""Streams of clients continue, token for token, after workers are killed."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from baton.cluster.offline.llm import LLM
from baton.request import SamplingParams
from tests.served import Served, until

PROMPT = "the sun and the moon and a star; " * 4
NUM_TOKENS = 2000
SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 5, "top_p": 0.95, "presence_penalty": 0.5}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny") as llm:
        yield llm


def busy_decode(cluster: Served) -> str:
    """The decode worker that has the one request that runs."""
    found: list[str] = []

    def is_told() -> bool:
        status = cluster.status()
        found[:] = [name for name, each in status.items() if "decode" in name and each.num_attempts]
        return bool(found)

    until(is_told)
    return found[0]


def num_replays(cluster: Served) -> float:
    lines = httpx2.get(f"{cluster.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if 'event="replays_' in line)


def test_stream_survives_the_death_of_its_decode_worker(redundant_cluster: Served, llm: LLM) -> None:
    given = {**SAMPLING, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    (expected,) = llm.generate(PROMPT, SamplingParams(**given))
    until(lambda: len(redundant_cluster.status()) == 3)
    replays = num_replays(redundant_cluster)
    chunks = redundant_cluster.stream(PROMPT, **given, stream_options={"include_usage": True})
    texts = [next(chunks)["choices"][0]["text"]]
    os.kill(redundant_cluster.pid_of(busy_decode(redundant_cluster)), signal.SIGKILL)
    rest = list(chunks)
    usage = rest[-1]["usage"]
    texts += [chunk["choices"][0]["text"] for chunk in rest if chunk["choices"]]
    assert "".join(texts) == expected.outputs[0].text
    assert usage["completion_tokens"] == NUM_TOKENS
    assert num_replays(redundant_cluster) > replays
    assert [chunk["choices"][0]["finish_reason"] for chunk in rest if chunk["choices"]][-1] == "length"


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
