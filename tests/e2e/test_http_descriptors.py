"""A real gateway process with few descriptors and many clients that never finish their headers."""

import json
import resource
import socket
import subprocess
import sys
from contextlib import ExitStack

import httpx2
import msgspec

from baton.cluster.model_directory import resolve_model
from baton.cluster.runtimes.base import Assignment, generations_of
from baton.config.gateway import GatewayConfig
from baton.messages.bounds import Kind
from baton.messages.workers import Address
from tests.served import ROOT, stop

LIMIT = 256
NUM_SLOW = 400


def test_ping_is_answered_despite_many_slow_connections() -> None:
    config = GatewayConfig(model=str(resolve_model("tiny")), routers=(Address("127.0.0.1", 1),), port=0)
    given = Assignment(
        kind=Kind.GATEWAY,
        name="gateway-0",
        generations=generations_of(Kind.GATEWAY, b"k" * 32),
        config=msgspec.Raw(msgspec.json.encode(config)),
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "baton.cluster.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT)),
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(given) + b"\n")
        process.stdin.flush()
        host, port = json.loads(process.stdout.readline())["address"]
        ping = f"http://{host}:{port}/ping"
        with ExitStack() as slow:
            for number in range(NUM_SLOW):
                client = slow.enter_context(socket.create_connection((host, port), timeout=60))
                client.sendall(b"GET /ping HTTP/1.1\r\n")
                if number % 20 == 0:
                    assert httpx2.get(ping, timeout=60).status_code == 200
            assert httpx2.get(ping, timeout=60).status_code == 200
    finally:
        stop(process)  # type: ignore[arg-type]
        process.stdin.close()
        process.stdout.close()
