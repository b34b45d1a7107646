"""Tenants of a gateway under test: their file, their keys, what they ask."""

import contextlib
import hashlib
import io
from pathlib import Path

import httpx2

from baton.cluster.cli.main import main
from tests.scripted_service import ScriptedService
from tests.served_gateway import ServedGateway


def digest(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def write_tenants(folder: Path, zeta: str = "") -> Path:
    """Write acme, of the middle class, with quotas and objectives; zeta with none; root, an admin.

    Their keys are k-NAME. zeta: further lines of that tenant.
    """
    path = folder / "tenants.yaml"
    path.write_text(
        "classes: [fast, normal, batch]\ntenants:\n"
        f"  acme:\n    keys: ['{digest('k-acme')}']\n    weight: 3\n    priority_class: normal\n"
        "    sla: {ttft_ms: 500, deadline_ms: 9000}\n"
        "    quotas: {max_concurrent_requests: 2, max_kv_pages: 40}\n"
        f"  zeta:\n    keys: ['{digest('k-zeta')}']\n{zeta}"
        f"  root:\n    keys: ['{digest('k-root')}']\n    admin: true\n"
    )
    return path


def served_with(file: Path, service: ScriptedService) -> ServedGateway[ScriptedService]:
    """Return a gateway of the tenants of a file."""
    return ServedGateway(lambda: service, tenants_file=str(file))


def ask(url: str, key: str, **headers: str) -> httpx2.Response:
    """A completion, over a connection of its own."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.post(
        f"{url}/v1/completions",
        json={"prompt": "copy(sun moon star)=", "max_tokens": 4, "ignore_eos": True, "temperature": 0},
        headers={"authorization": f"Bearer {key}", **headers},
        timeout=60,
    )


def keys(*arguments: str) -> str:
    """Return the output of `baton keys`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert main(["keys", *arguments]) == 0
    return out.getvalue().strip()
