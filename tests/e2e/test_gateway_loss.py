"""A gateway of two is killed while it streams: clients resume on the other."""

import http.client
import os
import signal
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import psutil

from baton.cluster.runtimes.base import descendants
from tests.event_stream import Event, Refused, joined, read_all, stream
from tests.served import Served, until

NUM_TOKENS: Final = 800
PROMPT: Final = "the sun and the moon and a star; " * 4
COMMON: Final[dict[str, Any]] = {
    "model": "tiny",
    "stream": True,
    "stream_options": {"include_usage": True, "resumable": True},
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
}
COMPLETION: Final = {**COMMON, "prompt": PROMPT}
CHAT: Final = {**COMMON, "messages": [{"role": "user", "content": PROMPT}]}
SAMPLED: Final = {"temperature": 1.1, "seed": 11, "top_p": 0.95}
BODIES: Final[tuple[dict[str, Any], ...]] = (
    {**COMPLETION, "temperature": 0},
    {**CHAT, **SAMPLED, "presence_penalty": 0.5},
    {**COMPLETION, **SAMPLED, "n": 2},
    {**COMPLETION, **SAMPLED, "logprobs": 1, "return_token_ids": True},
)
COPIES: Final = 2  # of each, so that surely both gateways have some; test_http_resume.py has other bodies
RETRY_S: Final = 0.2
NUM_SEEN_FIRST: Final = 4  # events of each client, before the gateway is killed


class Client:
    """A client that reads one stream to its end, and resumes it when its gateway is killed."""

    def __init__(self, port: int, body: dict[str, Any], killed: threading.Event) -> None:
        self.events: list[Event] = []
        self.num_resumed = 0
        self._port = port
        self._body = body
        self._killed = killed

    def read(self) -> dict[str, Any]:
        while True:
            try:
                for event in stream(self._port, self._body, self.events[-1].id if self.events else ""):
                    self.events.append(event)
                    if len(self.events) == NUM_SEEN_FIRST:
                        self._killed.wait(60.0)  # it reads on in the middle of its answer
                return joined(self.events)
            except (OSError, http.client.HTTPException):
                self.num_resumed += 1
            except Refused as refused:
                assert refused.status == 503, refused
            threading.Event().wait(RETRY_S)


def num_clients(cluster: Served, pids: Iterable[int]) -> dict[int, int]:
    """Return pid -> number of clients, of the processes that listen on the cluster's port."""
    found = {}
    for pid in pids:
        connections = psutil.Process(pid).net_connections("tcp")
        at_port = [each for each in connections if each.laddr.port == cluster.port]
        if any(each.status == psutil.CONN_LISTEN for each in at_port):
            found[pid] = len(at_port) - 1
    return found


def test_clients_of_a_killed_gateway_resume_on_the_other(redundant_cluster: Served) -> None:
    undisturbed = [joined(read_all(redundant_cluster.port, body)) for body in BODIES]
    until(lambda: len(num_clients(redundant_cluster, descendants(redundant_cluster.process.pid))) == 2)
    gateways = list(num_clients(redundant_cluster, descendants(redundant_cluster.process.pid)))
    killed = threading.Event()
    clients = [Client(redundant_cluster.port, body, killed) for body in BODIES for _ in range(COPIES)]
    with ThreadPoolExecutor(len(clients)) as pool:
        answers = [pool.submit(client.read) for client in clients]
        until(lambda: all(len(client.events) >= NUM_SEEN_FIRST for client in clients), 120.0)
        # Of these two gateways alone: the streams end in a second or two.
        connected = num_clients(redundant_cluster, gateways)
        victim = max(connected, key=connected.__getitem__)
        assert connected[victim] >= len(clients) // 2
        os.kill(victim, signal.SIGKILL)
        killed.set()
        read = [answer.result(300.0) for answer in answers]
    for number, answer in enumerate(read):
        expected = undisturbed[number // COPIES]
        assert without_heads(answer) == without_heads(expected)
        assert len(answer["heads"]) == 1  # one id and time from its first event to its last
    assert sum(client.num_resumed > 0 for client in clients) >= 2  # the others were already answered


def without_heads(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a joined answer without what differs between two calls: ids, times, cached tokens."""
    usage = {name: value for name, value in answer["usage"].items() if name != "prompt_tokens_details"}
    return {**answer, "heads": None, "usage": usage}
