"""Tenants of a whole cluster: one router keeps the quotas, whichever gateway is asked."""

import math
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx2
import msgspec
import pytest

from baton.bench.processes import free_port
from baton.messages.operations import Status
from tests.served import SERVE, Served, served, until
from tests.tenant_clients import ask, keys

BURST = 60  # tokens
NUM_TRIALS, NUM_WARM = 12, 1  # of a probe for others' prompts; the first ones load and compile
# By the policy `prefix` hits are used at once.
OPTIONS = (*SERVE, "--gateways", "2", "--routers", "2", "--router-policy", "prefix")


QUOTAS = {
    "limited": f"tokens_per_s: 0.01, burst_tokens: {BURST}",
    "single": "max_concurrent_requests: 1",
    "active": "max_active_sequences: 1, max_queued: 0",
    "queued": "max_active_sequences: 1, max_queued: 1",
    "free": "tokens_per_s: 1000000",
}


class Tenants(NamedTuple):
    """A cluster with tenants."""

    cluster: Served
    file: str
    keys: Mapping[str, str]  # by the tenant's name
    operators: str  # the URL for operators


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    file = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    key = {name: keys("add", name, "--tenants", str(file)) for name in (*QUOTAS, "acme", "zeta")}
    text = file.read_text()
    for name, quotas in QUOTAS.items():
        text = text.replace(f"  {name}:\n", f"  {name}:\n    quotas: {{{quotas}}}\n")
    file.write_text(text)
    port = str(free_port())
    with served(*OPTIONS, "--operator-port", port, "--tenants", str(file)) as cluster:
        operators = f"http://127.0.0.1:{port}"
        until(lambda: all(_num_routers(operators) == 2 for _ in range(16)))  # whichever gateway is asked
        yield Tenants(cluster, str(file), key, operators)


def test_a_tenant_over_its_quota_is_refused_and_others_are_not(tenants: Tenants) -> None:
    cluster, file, key, operators = tenants
    answers = [ask(cluster.url, key["limited"]) for _ in range(24)]
    statuses = [answer.status_code for answer in answers]
    assert statuses[0] == 200 and set(statuses) == {200, 429}
    costs = [_cost(answer) for answer in answers if answer.status_code == 200]
    assert len(costs) * min(costs) <= BURST, "two with a bucket each would let in twice as many"
    refused = answers[statuses.index(429)]
    assert refused.json()["error"]["param"] == "tokens_per_s"
    assert int(refused.headers["retry-after"]) > 120 and refused.headers["x-should-retry"] == "false"
    assert ask(cluster.url, key["free"]).json()["choices"][0]["text"].startswith("sun moon star")

    for name, quota in (("single", "max_concurrent_requests"), ("active", "max_active_sequences")):
        with _answering(cluster.url, key[name]):
            _check_refused(ask(cluster.url, key[name]), quota)
        # Who hangs up has its quota back.
        until(lambda: ask(cluster.url, key[name]).status_code == 200)  # noqa: B023
    with ThreadPoolExecutor(2) as threads:
        with _answering(cluster.url, key["queued"]):
            asked = [threads.submit(ask, cluster.url, key["queued"]) for _ in range(2)]
            (first,), (other,) = wait(asked, return_when=FIRST_COMPLETED)
            _check_refused(first.result(), "max_queued")
        assert other.result().status_code == 200, "it waited for the one before it"

    refused_total = r'baton_tenant_refused_total\{reason="tokens_per_s",router="\w{8}",tenant="limited"\}'
    # What the router knows is a second old.
    until(lambda: bool(re.search(refused_total, httpx2.get(f"{operators}/metrics").text)))

    _check_each_refused_call_is_counted_once(cluster, operators, statuses.count(429))
    keys("revoke", "free/all", "--tenants", file)
    until(lambda: all(ask(cluster.url, key["free"]).status_code == 401 for _ in range(8)))


def test_whether_another_tenant_has_sent_a_prompt_can_not_be_told(tenants: Tenants) -> None:
    """Neither by what is cached nor by the time to the first token; a tenant's own prompts are cached."""
    new, others, own = list[float](), list[float](), list[float]()
    with httpx2.Client(timeout=60) as client:

        def probe(tenant: str, prompt: list[int]) -> tuple[float, int]:
            """Seconds to the first token, and tokens of the prompt that were cached."""
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
            headers = {"authorization": f"Bearer {tenants.keys[tenant]}"}
            begun_s = time.perf_counter()
            answer = client.post(f"{tenants.cluster.url}/v1/completions", json=body, headers=headers)
            took_s = time.perf_counter() - begun_s
            details = answer.json()["usage"].get("prompt_tokens_details") or {}
            return took_s, int(details.get("cached_tokens") or 0)

        for trial in range(NUM_TRIALS + NUM_WARM):
            rng = random.Random(trial)
            prompt = [rng.randrange(2, 1024) for _ in range(2400)]  # takes longer than a busy machine hides
            first, second = ("acme", "zeta") if trial % 2 else ("zeta", "acme")
            (new_s, of_new), (others_s, of_others) = probe(first, prompt), probe(second, prompt)
            own_s, of_own = probe(second, prompt)
            assert (of_new, of_others) == (0, 0)
            assert of_own > 0, trial
            if trial >= NUM_WARM:
                new.append(new_s)
                others.append(others_s)
                own.append(own_s)
    # Two samples of one distribution are further apart once in a thousand times (Kolmogorov and Smirnov).
    most = 1.95 * math.sqrt(2 / NUM_TRIALS)
    assert _distance(new, others) < most < _distance(new, own)


def _distance(one: list[float], other: list[float]) -> float:
    """The largest difference between the shares of both that no value passes."""

    def share(values: list[float], most: float) -> float:
        return sum(value <= most for value in values) / len(values)

    return max(abs(share(one, value) - share(other, value)) for value in (*one, *other))


def _check_each_refused_call_is_counted_once(cluster: Served, operators: str, num_limited: int) -> None:
    """`baton status` says what clients were told, whether a gateway refused a call or a router."""
    told = _refused_by_tenant(httpx2.get(f"{operators}/metrics").text)
    assert told["limited"] == num_limited and told["single"] > 0
    until(lambda: _refused_in_status(cluster) == sum(told.values()))
    status = msgspec.json.decode(_status(cluster, "--json"), type=Status)
    places = [(gateway.node, gateway.pid) for gateway in status.gateways]
    places += [(router.node, router.pid) for router in status.routers]
    places += [(entry.worker.node, entry.worker.pid) for entry in status.workers]
    assert len(set(places)) == 6 and {node for node, _ in places} == {socket.gethostname()}
    assert all(Path(f"/proc/{pid}").exists() for _, pid in places)


def _refused_by_tenant(metrics: str) -> Counter[str]:
    told: Counter[str] = Counter()
    for outcome, tenant, count in re.findall(
        r'baton_tenant_calls_total\{gateway="\w+",outcome="(\w+)",tenant="(\w+)"\} ([0-9.]+)', metrics
    ):
        if outcome not in ("answered", "gone", "failed"):
            told[tenant] += int(float(count))
    return told


def _refused_in_status(cluster: Served) -> int:
    return sum(int(count) for count in re.findall(r"open, (\d+) refused", _status(cluster)))


def _status(cluster: Served, *options: str) -> str:
    return cluster.baton("status", "--port", str(cluster.port), *options)


@contextmanager
def _answering(url: str, key: str) -> Iterator[None]:
    """While a long answer is on its way; its client hangs up in the end."""
    body = {"prompt": "copy(sun)=", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as running:
        assert running.status_code == 200
        lines = running.iter_lines()  # which hangs up when it is dropped
        next(lines)
        yield


def _check_refused(answer: httpx2.Response, quota: str) -> None:
    assert answer.status_code == 429 and answer.json()["error"]["param"] == quota
    assert answer.json()["error"]["message"].count(quota) == 1, "the quota is named once"
    assert int(answer.headers["retry-after"]) >= 1 and answer.headers["x-should-retry"] == "true"


def _num_routers(operators: str) -> int:
    """That the gateway which happens to answer knows."""
    return len(re.findall(r"^baton_router_attempts\{", httpx2.get(f"{operators}/metrics").text, re.MULTILINE))


def _cost(answer: httpx2.Response) -> int:
    """What a call has used of its tenant's tokens."""
    usage = answer.json()["usage"]
    num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return int(usage["prompt_tokens"] - num_cached + usage["completion_tokens"])
