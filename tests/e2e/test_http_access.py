"""Access control over real sockets: keys, tenants, pages of other sites, refusals."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import httpx2
import openai
import pytest

from baton.bench.processes import free_port
from baton.errors import ConfigError, Overloaded
from baton.request import Request
from tests.e2e.conftest import client_of
from tests.scripted_service import ScriptedService, answer_at_once, events
from tests.served_gateway import ServedGateway
from tests.tenant_clients import write_tenants

Served = ServedGateway[ScriptedService]
SENTENCE = [300, 301, 302]


@pytest.fixture(scope="module")
def without_keys() -> Iterator[Served]:
    """A gateway that everybody may ask."""
    with ServedGateway(lambda: ScriptedService(answer_at_once(SENTENCE))) as served:
        yield served


@pytest.mark.parametrize(
    ("origin", "host", "is_ours"),
    [
        (None, "127.0.0.1:{port}", True),
        (None, "localhost:{port}", True),
        (None, "LOCALHOST", True),
        (None, "[::1]:{port}", True),
        (None, "127.1.2.3", True),
        (None, "evil.example:{port}", False),  # a browser's GET has no Origin
        (None, "127.0.0.1.evil.example", False),
        (None, "localhost.evil.example", False),
        (None, "192.168.0.1:{port}", False),
        (None, "[::2]", False),
        (None, "", False),
        ("http://127.0.0.1:{port}", "127.0.0.1:{port}", True),
        ("http://localhost:{port}", "localhost:{port}", True),
        ("http://[::1]:{port}", "[::1]:{port}", True),
        ("http://evil.example", "127.0.0.1:{port}", False),
        ("http://evil.example:{port}", "evil.example:{port}", False),  # a name that means 127.0.0.1 by now
        ("null", "127.0.0.1:{port}", False),
    ],
)
def test_pages_of_other_sites_are_refused(
    without_keys: Served, origin: str | None, host: str, is_ours: bool
) -> None:
    served = without_keys
    headers = {"host": host.format(port=served.address.port)}
    if origin is not None:
        headers["origin"] = origin.format(port=served.address.port)
    answer = httpx2.post(f"{served.url}/v1/completions", json={"prompt": "a"}, headers=headers)
    assert answer.status_code == (200 if is_ours else 403)

    async def connect() -> int:
        async with aiohttp.ClientSession() as session:
            try:
                async with session.ws_connect(f"{served.url}/v1/stream", headers=headers):
                    return 101
            except aiohttp.WSServerHandshakeError as error:
                return error.status

    assert asyncio.run(connect()) == (101 if is_ours else 403)


@pytest.fixture
def tenants(tmp_path: Path) -> str:
    return str(write_tenants(tmp_path, zeta="    models: [other]\n"))


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/load", "/version", "/health", "/ping", "/nope"])
def test_get_under_a_foreign_name_is_refused(without_keys: Served, path: str) -> None:
    headers = {"host": f"evil.example:{without_keys.address.port}"}
    answer = httpx2.get(without_keys.url + path, headers=headers)
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "host"
    assert "--tenants" in answer.json()["error"]["message"]


def test_host_header_opens_no_path(tenants: str) -> None:
    """With keys any Host is accepted, and no part of it becomes a path."""
    with ServedGateway(lambda: ScriptedService(answer_at_once(SENTENCE)), tenants_file=tenants) as served:
        for host in ("a/ping?x", "a/ping#", "api.example"):
            assert httpx2.get(f"{served.url}/v1/models", headers={"host": host}).status_code == 401
        headers = {"host": "api.example", "authorization": "Bearer k-acme"}
        assert httpx2.get(f"{served.url}/v1/models", headers=headers).status_code == 200


def test_operator_paths_need_an_admin_key_behind_a_proxy(tenants: str) -> None:
    shapes = [
        {},  # as a proxy sends it that rewrites Host and adds nothing
        {"x-forwarded-for": "10.0.0.9"},
        {"cf-connecting-ip": "10.0.0.9"},
        {"host": "api.example"},
        {"origin": "http://evil.example"},
    ]
    service = ServedGateway(lambda: ScriptedService(answer_at_once(SENTENCE)), tenants_file=tenants)
    with service as served, httpx2.Client() as web:

        def status(path: str, headers: dict[str, str], key: str = "") -> int:
            bearer = {"authorization": f"Bearer {key}"} if key else {}
            return web.get(served.url + path, headers=headers | bearer).status_code

        for headers in shapes:
            for path in ("/metrics", "/load", "/ui", "/ui/main.js", "/metric%73"):
                assert status(path, headers) == 401
                assert status(path, headers, "wrong") == 401
                assert status(path, headers, "k-acme") == 403
                assert status(path, headers, "k-root") == 200
            for path in ("/admin/decisions/x", "/ui/events", "/ui/workers/x"):
                assert status(path, headers) == 401
                assert status(path, headers, "k-acme") == 403
            assert status("/admin/decisions/x", headers, "k-root") == 404
        assert status("/metrics/", {}) == 401
        for path in (
            "/metrics%0A",
            "/load%0a",
            "/ui%0A",
        ):  # Starlette's "$" matches there too
            assert status(path, {}, "k-acme") == 404


def test_operator_port_needs_no_key_for_operator_paths_alone(tenants: str) -> None:
    port = free_port()
    service = ServedGateway(
        lambda: ScriptedService(answer_at_once(SENTENCE)), tenants_file=tenants, operator_port=port
    )
    with service as served, httpx2.Client(base_url=f"http://127.0.0.1:{port}") as web:
        for path in ("/metrics", "/load", "/ui", "/ui/ui.css", "/ping", "/health"):
            assert web.get(path).status_code == 200
        assert web.get("/admin/decisions/x").status_code == 404, "it is let in"
        assert web.get(f"/admin/decisions/{'a' * 32}").status_code == 503, "no router has answered"
        assert web.get("/v1/models").status_code == 401
        assert web.get("/v1/models", headers={"authorization": "Bearer k-acme"}).status_code == 200
        # Another site's page in a browser of this machine.
        assert web.get("/metrics", headers={"host": f"evil.example:{port}"}).status_code == 403
        assert web.get("/metrics", headers={"origin": "http://evil.example"}).status_code == 403
        # The caller cannot choose the port by a header.
        assert web.get(f"{served.url}/metrics", headers={"host": f"127.0.0.1:{port}"}).status_code == 401


def test_taken_operator_port_is_named_and_leaves_no_listener(tenants: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        service = ServedGateway(ScriptedService, operator_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"gateway\.operator_port.*--operator-port"), service:
            pass


def test_all_paths_but_health_need_a_key(tenants: str) -> None:
    with ServedGateway(lambda: ScriptedService(answer_at_once(SENTENCE)), tenants_file=tenants) as served:
        for path in ("/v1/models", "/version", "/openapi.json", "/nope"):
            assert httpx2.get(served.url + path).status_code == 401
        for path in ("/v1/completions", "/tokenize", "/v1/chat/completions/", "/"):
            assert httpx2.post(served.url + path, json={}).status_code == 401
        assert httpx2.get(f"{served.url}/ping").status_code == 200
        assert httpx2.get(f"{served.url}/health").status_code == 200
        with pytest.raises(openai.AuthenticationError, match="not known"):
            client_of(served.url, "wrong").models.list()
        assert client_of(served.url, "k-acme").models.list().data[0].id == "tiny"
        assert client_of(served.url, "k-zeta").models.list().data == []
        with pytest.raises(openai.PermissionDeniedError, match="may not use"):
            client_of(served.url, "k-zeta").completions.create(model="tiny", prompt="a")
        client_of(served.url, "k-acme").completions.create(model="tiny", prompt="a")
        request = served.service.requests[-1]
        assert request.tenant == "acme" and len(request.cache_salt) == 16


def test_names_of_models_that_a_tenant_may_not_use_are_not_told(tenants: str) -> None:
    """k-zeta may not use the only model of the server."""
    with ServedGateway(lambda: ScriptedService(answer_at_once(SENTENCE)), tenants_file=tenants) as served:
        headers = {"authorization": "Bearer k-zeta"}
        answers = [
            httpx2.get(f"{served.url}/v1/models/nope", headers=headers),
            *(
                httpx2.post(served.url + path, json={**asked, **fields}, headers=headers)
                for path, asked in (
                    ("/v1/completions", {"prompt": "a"}),
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
                    ("/tokenize", {"prompt": "a"}),
                )
                for fields in ({"model": "nope"}, dict[str, str]())
            ),
        ]
        assert [answer.status_code for answer in answers] == [404, *[404, 403] * 3]
        assert not any("tiny" in answer.text for answer in answers)
        messages = {answer.json()["error"]["message"] for answer in answers if answer.status_code == 404}
        assert messages == {"The model `nope` does not exist. GET /v1/models lists the models."}


def test_salts_differ_by_tenant_and_a_client_only_divides_its_own(tenants: str) -> None:
    def salt(served: Served, key: str, **extra_body: str) -> bytes:
        client_of(served.url, key).completions.create(model="tiny", prompt="a", extra_body=extra_body)
        return served.service.requests[-1].cache_salt

    with ServedGateway(lambda: ScriptedService(answer_at_once(SENTENCE))) as open_served:
        anyone = {salt(open_served, "x"), salt(open_served, "x", cache_salt="y")}
    with ServedGateway(lambda: ScriptedService(answer_at_once(SENTENCE)), tenants_file=tenants) as served:
        for key in ("k-acme", "k-root"):
            assert salt(served, key) == salt(served, key) != salt(served, key, cache_salt="y")
            assert salt(served, key, cache_salt="y") == salt(served, key, cache_salt="y")
            assert len(salt(served, key, cache_salt="y")) == 16
        told = [
            salt(served, key, **given) for key in ("k-acme", "k-root") for given in ({}, {"cache_salt": "y"})
        ]
        assert len({*told, *anyone}) == 6
        for extra in ({"cache_salt": ""}, {"kv_transfer_params": {"tp_size": 9}}):
            with pytest.raises(openai.BadRequestError, match=next(iter(extra))):
                client_of(served.url, "k-acme").completions.create(model="tiny", prompt="a", extra_body=extra)


def test_client_library_retries_an_overload() -> None:
    service = ScriptedService()
    refusals = iter([Overloaded("full", retry_after_s=0.01)])

    def play(service: ScriptedService, request: Request) -> None:
        refusal = next(refusals, None)
        if refusal is not None:
            raise refusal
        service.emit(request.request_id, events(request, SENTENCE))

    service.play = play
    with ServedGateway(lambda: service) as served:
        answer = client_of(served.url, "x", max_retries=2).completions.create(model="tiny", prompt="a")
        assert answer.choices[0].finish_reason == "length"
        assert len(service.requests) == 2


def test_strict_gateway_refuses_unknown_keys() -> None:
    with ServedGateway(lambda: ScriptedService(answer_at_once(SENTENCE)), strict=True) as served:
        client = client_of(served.url)
        with pytest.raises(openai.BadRequestError, match="temprature"):
            client.completions.create(model="tiny", prompt="a", extra_body={"temprature": 1})
        client.completions.create(model="tiny", prompt="a", user="somebody")


def test_bug_is_a_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    def break_down(service: ScriptedService, request: Request) -> None:
        raise ZeroDivisionError("secret")

    with ServedGateway(lambda: ScriptedService(break_down)) as served:
        for streams in (False, True):
            body = {"prompt": "a", "stream": streams}
            answer = httpx2.post(f"{served.url}/v1/completions", json=body)
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
            assert "secret" not in answer.text and answer.headers["x-should-retry"] == "false"
        served.on_loop(lambda: setattr(served.service, "workers", None))
        assert httpx2.get(f"{served.url}/v1/models").json()["error"]["code"] == "internal_error"
    assert "secret" in caplog.text
