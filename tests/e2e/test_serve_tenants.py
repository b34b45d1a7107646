"""Tenants of a whole cluster: its router keeps the quotas, whichever gateway is asked."""

import re
from pathlib import Path

import httpx2

from tests.served import served, until
from tests.tenant_clients import ask, keys

BURST = 60  # tokens
OPTIONS = ("--runtime", "local", "--kv-cache-memory", "64MiB", "--drain-timeout", "5", "--gateways", "2")


def test_a_tenant_over_its_tokens_is_refused_and_others_are_not(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    limited, free = (keys("add", name, "--tenants", str(file)) for name in ("limited", "free"))
    quotas = f"    quotas: {{tokens_per_s: 0.01, burst_tokens: {BURST}}}\n"
    file.write_text(file.read_text().replace("  limited:\n", "  limited:\n" + quotas))
    with served("tiny", *OPTIONS, "--tenants", str(file)) as cluster:
        answers = [ask(cluster.url, limited) for _ in range(24)]
        statuses = [answer.status_code for answer in answers]
        assert statuses[0] == 200 and set(statuses) == {200, 429}
        costs = [_cost(answer) for answer in answers if answer.status_code == 200]
        assert len(costs) * min(costs) <= BURST, "two gateways with a bucket each would let in twice as many"
        refused = answers[statuses.index(429)]
        assert refused.json()["error"]["param"] == "tokens_per_s"
        assert int(refused.headers["retry-after"]) > 120 and refused.headers["x-should-retry"] == "false"
        assert ask(cluster.url, free).json()["choices"][0]["text"].startswith("sun moon star")

        refused_total = r'baton_tenant_refused_total\{reason="tokens_per_s",router="\w{8}",tenant="limited"\}'
        # What the router knows is a second old.
        until(lambda: bool(re.search(refused_total, httpx2.get(f"{cluster.url}/metrics").text)))

        keys("revoke", "free/all", "--tenants", str(file))
        until(lambda: all(ask(cluster.url, free).status_code == 401 for _ in range(8)))


def _cost(answer: httpx2.Response) -> int:
    """What a call has used of its tenant's tokens."""
    usage = answer.json()["usage"]
    num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return int(usage["prompt_tokens"] - num_cached + usage["completion_tokens"])
