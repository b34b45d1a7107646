"""Tenants of a whole cluster: its router keeps the quotas, whichever gateway is asked."""

from pathlib import Path

import httpx2

from tests.served import served, until
from tests.tenant_clients import ask, keys

OPTIONS = ("--runtime", "local", "--kv-cache-memory", "64MiB", "--drain-timeout", "5", "--gateways", "2")


def test_a_tenant_over_its_tokens_is_refused_and_others_are_not(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    limited, free = (keys("add", name, "--tenants", str(file)) for name in ("limited", "free"))
    text = file.read_text()
    file.write_text(
        text.replace("  limited:\n", "  limited:\n    quotas: {tokens_per_s: 0.01, burst_tokens: 60}\n")
    )
    with served("tiny", *OPTIONS, "--tenants", str(file)) as cluster:
        answers = [ask(cluster.url, limited) for _ in range(24)]
        statuses = [answer.status_code for answer in answers]
        assert statuses[0] == 200 and set(statuses) == {200, 429}
        assert statuses.count(200) <= 15, "each took four tokens or more"
        refused = answers[statuses.index(429)]
        assert refused.json()["error"]["param"] == "tokens_per_s"
        assert int(refused.headers["retry-after"]) >= 1 and refused.headers["x-should-retry"] == "true"
        assert ask(cluster.url, free).json()["choices"][0]["text"].startswith("sun moon star")

        scraped = httpx2.get(f"{cluster.url}/metrics").text
        assert 'baton_tenant_refused_total{reason="tokens_per_s",tenant="limited"}' in scraped

        keys("revoke", "free/all", "--tenants", str(file))
        until(lambda: all(ask(cluster.url, free).status_code == 401 for _ in range(8)))
