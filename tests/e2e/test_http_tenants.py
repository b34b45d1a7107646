"""What tenants may do, over real sockets: quotas, classes and objectives; keys that come and go meanwhile."""

import asyncio
import contextlib
import hashlib
import io
import logging
import threading
from pathlib import Path

import aiohttp
import httpx2
import openai
import pytest

from baton.cluster.cli import main
from baton.errors import Refused
from baton.page_keys import PageKeys
from baton.request import Request
from baton.tenancy import Refusal, Sla
from tests.scripted_service import ScriptedService, answer_at_once, events
from tests.served_gateway import ServedGateway

Served = ServedGateway[ScriptedService]
SENTENCE = [300, 301, 302]


def digest(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(
        "classes: [fast, normal, batch]\n"
        "tenants:\n"
        f"  acme:\n    keys: ['{digest('k-acme')}']\n    weight: 3\n    priority_class: normal\n"
        "    sla: {ttft_ms: 500, deadline_ms: 9000}\n"
        "    quotas: {max_concurrent_requests: 2, max_kv_pages: 40}\n"
        f"  zeta:\n    keys: ['{digest('k-zeta')}']\n"
    )
    return path


def served_with(file: Path, service: ScriptedService) -> Served:
    return ServedGateway(lambda: service, tenants_file=str(file))


def client(served: Served, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


def ask(served: Served, key: str, **headers: str) -> httpx2.Response:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.post(
        f"{served.url}/v1/completions",
        json={"prompt": "a"},
        headers={"authorization": f"Bearer {key}", **headers},
        timeout=60,
    )


def keys(*arguments: str) -> str:
    """What `baton keys` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert main(["keys", *arguments]) == 0
    return out.getvalue().strip()


def until_taken(served: Served, times: int) -> None:
    served.until(lambda: served.gateway.metrics.tenants_file["taken"] >= times)


def test_a_request_carries_its_tenants_standing(file: Path) -> None:
    with served_with(file, ScriptedService(answer_at_once(SENTENCE))) as served:
        assert ask(served, "k-acme").status_code == 200
        assert ask(served, "k-acme", x_baton_priority="fast").status_code == 200
        headers = {"x_slo_ttft_ms": "1", "x_llm_d_slo_tpot_ms": "80", "x_baton_priority": "batch"}
        assert ask(served, "k-acme", **headers).status_code == 200
        assert ask(served, "k-zeta").status_code == 200
        own, higher, lower, zeta = served.service.requests
    assert (own.tenant, own.standing.weight, own.standing.rank) == ("acme", 3.0, 1)
    assert own.standing.quotas.max_kv_pages == 40
    assert own.sla == Sla(ttft_ms=500, deadline_ms=9000)
    assert higher.standing.rank == 1, "no header raises a request above its tenant"
    assert lower.standing.rank == 2 and lower.sla == Sla(ttft_ms=500, tpot_ms=80, deadline_ms=9000)
    assert (zeta.standing.rank, zeta.sla) == (2, Sla())


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("x-baton-priority", "fats", "did you mean 'fast'?"),
        ("x-slo-ttft-ms", "soon", "expected milliseconds"),
        ("x-slo-tpot-ms", "nan", "expected milliseconds"),
    ],
)
def test_headers_that_say_nothing_are_refused(file: Path, name: str, value: str, complaint: str) -> None:
    with served_with(file, ScriptedService(answer_at_once(SENTENCE))) as served:
        answer = ask(served, "k-acme", **{name: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name
    assert complaint in answer.json()["error"]["message"]


def test_who_has_all_its_requests_open_is_told_which_quota_and_when_to_come_again(file: Path) -> None:
    with served_with(file, ScriptedService()) as served:
        asking = [threading.Thread(target=ask, args=(served, "k-acme")) for _ in range(2)]
        for thread in asking:
            thread.start()
        served.until(lambda: len(served.service.requests) == 2)
        with (
            client(served, "k-acme") as acme,
            pytest.raises(openai.RateLimitError, match="max_concurrent_requests") as refused,
        ):
            acme.completions.create(model="tiny", prompt="a")
        headers = refused.value.response.headers
        assert headers["retry-after"] == "1" and headers["x-should-retry"] == "true"
        assert refused.value.param == "max_concurrent_requests"
        served.service.play = answer_at_once(SENTENCE)
        assert ask(served, "k-zeta").status_code == 200, "another tenant is not concerned"

        def answer(request: Request) -> None:
            served.service.emit(request.request_id, events(request, SENTENCE))

        for request in served.service.requests[:2]:
            served.on_loop(lambda request=request: answer(request))  # type: ignore[misc]
        for thread in asking:
            thread.join()
        assert ask(served, "k-acme").status_code == 200


@pytest.mark.parametrize(
    ("refusal", "status", "retry_after"),
    [
        (Refusal.TOKENS_PER_S, 429, "3"),
        (Refusal.SLO, 429, "3"),
        (Refusal.SHED, 503, "3"),
        (Refusal.DEADLINE, 504, None),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_the_router_refuses_has_a_status_before_anything_is_sent(
    file: Path,
    refusal: Refusal,
    status: int,
    retry_after: str | None,
    is_streamed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(service: ScriptedService, request: Request) -> None:
        error = Refused("5000 of them", refusal=refusal, retry_after_s=2.5)
        asyncio.get_running_loop().call_soon(service.fail, request.request_id, error)

    with served_with(file, ScriptedService(refuse)) as served:
        answer = httpx2.post(
            f"{served.url}/v1/completions",
            json={"prompt": "a", "stream": is_streamed},
            headers={"authorization": "Bearer k-acme"},
        )
        assert answer.status_code == status and answer.headers.get("retry-after") == retry_after
        assert (f"quota {refusal}" in answer.json()["error"]["message"]) == refusal.is_quota
        scraped = httpx2.get(f"{served.url}/metrics").text
    assert f'baton_tenant_calls_total{{gateway="",outcome="{refusal}",tenant="acme"}} 1.0' in scraped
    assert 'kept="no",objective="ttft",tenant="acme"} 1.0' in scraped
    failures = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not failures, "a refusal is no failure of ours"
    assert "k-acme" not in scraped and digest("k-acme")[7:20] not in scraped


def test_a_revoked_key_opens_nothing_and_what_runs_goes_on(file: Path) -> None:
    def begin(service: ScriptedService, request: Request) -> None:
        service.emit(request.request_id, events(request, SENTENCE[:1], end=None))

    headers = {"authorization": "Bearer k-acme"}
    body = {"prompt": "a", "stream": True}
    with (
        served_with(file, ScriptedService(begin)) as served,
        httpx2.stream("POST", f"{served.url}/v1/completions", json=body, headers=headers) as running,
    ):
        (request,) = served.service.requests
        keys("revoke", digest("k-acme"), "--tenants", str(file))
        until_taken(served, 1)
        assert ask(served, "k-acme").status_code == 401
        rest = events(request, SENTENCE[1:], start=1)
        served.on_loop(lambda: served.service.emit(request.request_id, rest))
        assert running.status_code == 200 and "[DONE]" in running.read().decode()


def test_a_socket_whose_key_is_revoked_is_closed_at_its_next_message(file: Path) -> None:
    async def converse(served: Served) -> None:
        headers = {"authorization": "Bearer k-zeta"}
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{served.url}/v1/stream", headers=headers) as websocket,
        ):
            await websocket.send_json({"prompt": "a"})
            while (await websocket.receive(timeout=10)).data != "[DONE]":
                pass
            keys("revoke", "zeta/all", "--tenants", str(file))
            await asyncio.to_thread(until_taken, served, 1)
            await websocket.send_json({"prompt": "a"})
            message = await websocket.receive(timeout=10)
            assert message.type is aiohttp.WSMsgType.CLOSE and message.data == 1008

    with served_with(file, ScriptedService(answer_at_once(SENTENCE))) as served:
        asyncio.run(converse(served))
        assert len(served.service.requests) == 1


def test_a_wrong_file_leaves_the_old_one_in_force(file: Path) -> None:
    with served_with(file, ScriptedService(answer_at_once(SENTENCE))) as served:
        file.write_text(file.read_text()[:-40])
        served.until(lambda: served.gateway.metrics.tenants_file["refused"] == 1)
        assert ask(served, "k-acme").status_code == 200 and ask(served, "k-zeta").status_code == 200


def test_reloads_under_load_drop_no_request(file: Path) -> None:
    """Calls go on while keys come and go, and while the file is wrong in between."""
    statuses: list[int] = []

    async def call_on(session: aiohttp.ClientSession, url: str, done: asyncio.Event) -> None:
        while not done.is_set():
            async with session.post(f"{url}/v1/completions", json={"prompt": "a"}) as answer:
                body = await answer.json()
                statuses.append(answer.status)
                assert body["choices"][0]["finish_reason"] == "length"

    async def load(served: Served) -> None:
        done = asyncio.Event()
        async with aiohttp.ClientSession(headers={"authorization": "Bearer k-zeta"}) as session:
            calling = [asyncio.create_task(call_on(session, served.url, done)) for _ in range(8)]
            await asyncio.to_thread(change_file, served)
            done.set()
            await asyncio.gather(*calling)

    def change_file(served: Served) -> None:
        for round_ in range(2):
            fresh = keys("add", f"t{round_}", "--tenants", str(file))
            until_taken(served, 2 * round_ + 1)
            assert ask(served, fresh).status_code == 200
            good = file.read_text()
            file.write_text(good + "x: [")
            served.until(lambda: served.gateway.metrics.tenants_file["refused"] == round_ + 1)  # noqa: B023
            file.write_text(good)
            until_taken(served, 2 * round_ + 2)

    with served_with(file, ScriptedService(answer_at_once(SENTENCE))) as served:
        asyncio.run(load(served))
    assert len(statuses) > 20 and set(statuses) == {200}


def test_public_prefixes_are_shared_by_those_who_say_so(tmp_path: Path) -> None:
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
            with client(served, key) as tenant:
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
    """Of the pages of its prompt, four tokens each."""
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
