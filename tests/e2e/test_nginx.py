"""deploy/nginx/baton.conf in a real nginx, before a real gateway."""

import json
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx2
import pytest

from baton.bench.processes import free_port
from tests.served import ROOT, Served, accepts, until

NGINX: Final = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


@pytest.fixture(scope="module")
def proxy(plain_cluster: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """A client of the nginx before a gateway."""
    folder = tmp_path_factory.mktemp("nginx")
    certificate, key = folder / "fullchain.pem", folder / "privkey.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=llm.example.com"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    port = free_port()
    site = Path(ROOT, "deploy/nginx/baton.conf").read_text()
    for text, here in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("127.0.0.1:8000", f"127.0.0.1:{plain_cluster.port}"),
        ("/etc/ssl/baton/", f"{folder}/"),
    ):
        assert text in site
        site = site.replace(text, here)
    (folder / "baton.conf").write_text(site)
    main = folder / "nginx.conf"
    places = "".join(
        f"{kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main.write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log stderr;\nevents {{}}\n"
        f"http {{ access_log off;\n{places}include {folder}/baton.conf;\n}}\n"
    )
    assert NGINX is not None
    with subprocess.Popen([NGINX, "-c", str(main), "-p", str(folder)]) as process:
        try:
            until(lambda: accepts(port))
            context = ssl.create_default_context(cafile=str(certificate))
            with httpx2.Client(base_url=f"https://127.0.0.1:{port}", verify=context, timeout=60) as client:
                yield client
        finally:
            process.terminate()


def test_tokens_come_one_by_one_through_the_proxy(proxy: httpx2.Client) -> None:
    body = {"prompt": "copy(sun)=", "max_tokens": 600, "ignore_eos": True, "stream": True}
    moments = []
    with proxy.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                json.loads(line.removeprefix("data: "))
                moments.append(time.monotonic())
    began, ended = moments[0], moments[-1]
    num_early = sum(moment < began + (ended - began) / 2 for moment in moments)
    assert 0.1 * len(moments) < num_early < 0.9 * len(moments), "they came in one piece"


@pytest.mark.parametrize(
    "path",
    [
        *("/metrics", "/load", "/ui", "/admin/requests/x", "/is_sleeping", "/v1x", "/healthz", "/"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    ],
)
def test_operators_paths_are_not_passed_on(proxy: httpx2.Client, path: str) -> None:
    answer = proxy.get(path)
    assert answer.status_code == 404 and "nginx" in answer.headers["server"]


def test_api_is_passed_on(proxy: httpx2.Client) -> None:
    assert proxy.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert proxy.get("/ping").status_code == 200
