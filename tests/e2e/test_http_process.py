"""The process code of a gateway without a router."""

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from baton.cluster.model_directory import resolve_model
from baton.config.gateway import GatewayConfig
from baton.errors import ConfigError, ModelError
from baton.gateway.process import serve_gateway
from baton.messages.workers import Address
from tests.served_gateway import KEY, NOWHERE, TIMEOUT_S


def config(**settings: Any) -> GatewayConfig:
    given = {"model": str(resolve_model("tiny")), "routers": (NOWHERE,), "port": 0, "max_wait_s": 0.5}
    return GatewayConfig(**{**given, **settings})


@contextmanager
def serving(settings: GatewayConfig) -> Iterator[str]:
    """The URL of one on a thread of its own."""
    found: list[Address] = []
    is_ready, loop, stopping = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    def ready(address: Address) -> None:
        found.append(address)
        is_ready.set()

    def run() -> None:
        loop.run_until_complete(serve_gateway(settings, KEY, ready, stopping))
        loop.close()

    thread = threading.Thread(target=run, name="gateway")
    thread.start()
    try:
        assert is_ready.wait(TIMEOUT_S)
        yield f"http://127.0.0.1:{found[0].port}"
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_gateway_without_a_router_answers_503() -> None:
    with serving(config()) as url:
        assert httpx2.get(f"{url}/ping").status_code == 200
        health = httpx2.get(f"{url}/health")
        assert health.status_code == 503 and health.json()["error"]["code"] == "unhealthy"
        answer = httpx2.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=TIMEOUT_S)
        assert answer.status_code == 503 and answer.headers["x-should-retry"] == "true"
        assert httpx2.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] is None
        assert "baton_requests_total" in httpx2.get(f"{url}/metrics").text


def test_gateways_of_one_port_are_scraped_together() -> None:
    with serving(config(shares_port=True)) as url:
        port = int(url.rpartition(":")[2])
        with serving(config(shares_port=True, port=port)) as other:
            assert other == url
            for number in range(8):  # each answered by any of the two
                assert httpx2.get(f"{url}/version", headers={"connection": "close"}).status_code == 200
                text = httpx2.get(f"{url}/metrics", headers={"connection": "close"}).text
                counts = re.findall(r'^baton_requests_total{.*"/version",.*} (\S+)$', text, re.MULTILINE)
                assert sum(map(float, counts)) == number + 1
                assert len(set(re.findall(r'^baton_open_requests{gateway="(\w+)"', text, re.MULTILINE))) == 2


def run(settings: GatewayConfig) -> None:
    asyncio.run(serve_gateway(settings, KEY, lambda _: None, asyncio.Event()))


def test_taken_port_is_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match=r"cannot be bound.*--port"),
    ):
        run(config(port=taken.getsockname()[1]))


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(f"tenants: {{acme: {{keys: ['sha256:{'0' * 64}']}}}}")
    with pytest.raises(ConfigError, match="gateway.host"):
        run(config(host="no such host", tenants_file=str(tenants)))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="is not a tokenizer"):
        run(config(model=str(tmp_path)))
    with pytest.raises(ConfigError, match="cannot be read"):
        run(config(tenants_file=str(tmp_path / "none.yaml")))
