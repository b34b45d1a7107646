"""Quotas, classes and objectives of tenants, over real sockets."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from baton.errors import Refused
from baton.pages import PageKeys
from baton.request import Request
from baton.tenants import Refusal, Sla
from tests.e2e.conftest import client_of
from tests.scripted_service import ScriptedService, answer_at_once, events
from tests.served_gateway import ServedGateway
from tests.tenant_clients import ask, digest, served_with, write_tenants

Served = ServedGateway[ScriptedService]
SENTENCE = [300, 301, 302]
PROMPT = "sort(9 8 7 6 5)="


def test_request_carries_the_scheduling_key_of_its_tenant(file: Path) -> None:
    with served_with(file, ScriptedService(answer_at_once(SENTENCE))) as served:
        assert ask(served.url, "k-acme").status_code == 200
        assert ask(served.url, "k-acme", x_baton_priority="fast").status_code == 200
        headers = {"x_slo_ttft_ms": "1", "x_llm_d_slo_tpot_ms": "80", "x_baton_priority": "batch"}
        assert ask(served.url, "k-acme", **headers).status_code == 200
        assert ask(served.url, "k-zeta").status_code == 200
        own, higher, lower, zeta = served.service.requests
    assert (own.tenant, own.scheduling_key.weight, own.scheduling_key.rank) == ("acme", 3.0, 1)
    assert own.scheduling_key.quotas.max_kv_pages == 40
    assert own.sla == Sla(ttft_ms=500, deadline_ms=9000)
    assert higher.scheduling_key.rank == 1, "no header raises a request above its tenant"
    assert lower.scheduling_key.rank == 2 and lower.sla == Sla(ttft_ms=500, tpot_ms=80, deadline_ms=9000)
    assert (zeta.scheduling_key.rank, zeta.sla) == (2, Sla())


def test_tenant_at_its_quota_hears_the_quota_and_when_to_retry(file: Path) -> None:
    with served_with(file, ScriptedService()) as served:
        asking = [threading.Thread(target=ask, args=(served.url, "k-acme")) for _ in range(2)]
        for thread in asking:
            thread.start()
        served.until(lambda: len(served.service.requests) == 2)
        with (
            client_of(served.url, "k-acme") as acme,
            pytest.raises(openai.RateLimitError, match="max_concurrent_requests") as refused,
        ):
            acme.completions.create(model="tiny", prompt="a")
        headers = refused.value.response.headers
        assert headers["retry-after"] == "1" and headers["x-should-retry"] == "true"
        assert refused.value.param == "max_concurrent_requests"
        served.service.play = answer_at_once(SENTENCE)
        assert ask(served.url, "k-zeta").status_code == 200, "another tenant is not concerned"

        def answer(request: Request) -> None:
            served.service.emit(request.request_id, events(request, SENTENCE))

        for request in served.service.requests[:2]:
            served.on_loop(lambda request=request: answer(request))  # type: ignore[misc]
        for thread in asking:
            thread.join()
        assert ask(served.url, "k-acme").status_code == 200


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway whose service each test scripts anew."""
    with served_with(write_tenants(tmp_path_factory.mktemp("tenants")), ScriptedService()) as served:
        yield served


def scrape(served: Served) -> str:
    return httpx2.get(f"{served.url}/metrics", headers={"authorization": "Bearer k-root"}).text


def value(scraped: str, series: str) -> float:
    """Return the value of a series of metrics; 0 for an absent one."""
    lines = [line for line in scraped.splitlines() if line.startswith(series)]
    return float(lines[0].removeprefix(series)) if lines else 0.0


@pytest.mark.parametrize(
    ("refusal", "status", "retry_after"),
    [
        *((quota, 429, "3") for quota in Refusal if quota.is_quota),
        (Refusal.SLO, 429, "3"),
        (Refusal.SHED, 503, "3"),
        (Refusal.DEADLINE, 504, None),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_refusal_of_the_router_is_a_status(
    refusing: Served,
    refusal: Refusal,
    status: int,
    retry_after: str | None,
    is_streamed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(service: ScriptedService, request: Request) -> None:
        error = Refused("5000 of them", refusal=refusal, retry_after_s=2.5)
        asyncio.get_running_loop().call_soon(service.fail, request.request_id, error)

    refusing.service.play, before = refuse, scrape(refusing)
    answer = httpx2.post(
        f"{refusing.url}/v1/completions",
        json={"prompt": PROMPT, "stream": is_streamed},
        headers={"authorization": "Bearer k-acme"},
    )
    assert answer.status_code == status and answer.headers.get("retry-after") == retry_after
    assert (f"quota {refusal}" in answer.json()["error"]["message"]) == refusal.is_quota
    scraped = scrape(refusing)
    for series in (
        f'baton_tenant_calls_total{{gateway="",outcome="{refusal}",tenant="acme"}} ',
        'baton_tenant_objectives_total{gateway="",kept="no",objective="ttft",tenant="acme"} ',
    ):
        assert value(scraped, series) == value(before, series) + 1
    failures = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not failures, "a refusal is no failure of ours"
    names = [answer.headers["x-request-id"], *(each.request_id for each in refusing.service.requests)]
    secrets = ["k-acme", digest("k-acme")[7:20], PROMPT, *names]
    assert len(names) > 1 and not [secret for secret in secrets if secret in scraped]


def test_public_prefixes_are_shared_by_the_tenants_that_list_them(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    entry = "  {name}:\n    keys: ['{key}']\n    public_prefixes: [{prefixes}]\n"
    path.write_text(
        "public_prefixes: {house: 'You sort numbers.'}\ntenants:\n"
        + entry.format(name="acme", key=digest("k-acme"), prefixes="house")
        + entry.format(name="zeta", key=digest("k-zeta"), prefixes="house")
        + entry.format(name="shy", key=digest("k-shy"), prefixes="")
    )
    with served_with(path, ScriptedService(answer_at_once(SENTENCE))) as served:
        for key in ("k-acme", "k-zeta", "k-shy"):
            with client_of(served.url, key) as tenant:
                messages = [
                    {"role": "system", "content": "You sort numbers."},
                    {"role": "user", "content": "3 1 2"},
                ]
                tenant.chat.completions.create(model="tiny", messages=messages)  # type: ignore[arg-type]
        acme, zeta, shy = (names(request) for request in served.service.requests)
    num_shared = sum(one == other for one, other in zip(acme, zeta, strict=True))
    assert 2 <= num_shared < len(acme) and acme[:num_shared] == zeta[:num_shared]
    assert not set(shy) & (set(acme) | set(zeta))


def names(request: Request) -> list[bytes]:
    """Return the page keys of the prompt, four tokens a page."""
    found: list[bytes] = []
    keys_of = PageKeys(model_fingerprint="m", dtype="float32", page_size=4)
    keys_of.extend(found, list(request.token_ids), len(request.token_ids) // 4, request.cache_salt)
    return found


def test_objectives_by_header_are_counted_without_tenants() -> None:
    with ServedGateway(lambda: ScriptedService(answer_at_once(SENTENCE))) as served:
        answer = httpx2.post(
            f"{served.url}/v1/completions", json={"prompt": "a"}, headers={"x-slo-ttft-ms": "60000"}
        )
        assert answer.status_code == 200
        scraped = httpx2.get(f"{served.url}/metrics").text
    assert 'baton_tenant_objectives_total{gateway="",kept="yes",objective="ttft",tenant=""} 1.0' in scraped
