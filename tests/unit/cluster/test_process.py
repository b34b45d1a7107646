"""A router, the lightest of them, as its runtime starts it."""

import json
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from subprocess import PIPE

import msgspec
import pytest

from baton.cluster.process import run
from baton.cluster.runtimes.base import (
    Assignment,
    ProcessFailed,
    ProcessSpec,
    ProcessStarted,
    Report,
    assignment,
)
from baton.config.gateway import GatewayConfig
from baton.config.router import RouterConfig
from baton.errors import ORPHANED
from baton.messages.bounds import Kind
from baton.messages.workers import Address
from baton.rpc.auth import KeyRing
from baton.rpc.process import WANTED

KEY = b"k" * 32
COMMAND = (sys.executable, "-m", "baton.cluster.process")


def router(port: int = 0) -> ProcessSpec:
    return ProcessSpec(kind=Kind.ROUTER, name="router", config=RouterConfig(port=port))


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(COMMAND, stdin=PIPE, stdout=PIPE) as started:
        yield started
        started.kill()


def give(process: "subprocess.Popen[bytes]", spec: ProcessSpec) -> Report:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(assignment(spec, KEY) + b"\n")
    process.stdin.flush()
    report: Report = msgspec.json.decode(process.stdout.readline(), type=Report)
    return report


def test_process_reports_its_address_and_ends_with_0_when_told_to_drain(
    process: "subprocess.Popen[bytes]",
) -> None:
    report = give(process, router())
    assert isinstance(report, ProcessStarted) and report.address.host == "127.0.0.1"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def test_process_raises_its_descriptor_limit(process: "subprocess.Popen[bytes]") -> None:
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    assert hard > 100
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (100, hard))
    assert isinstance(give(process, router()), ProcessStarted)
    assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0] == min(hard, WANTED)


def test_process_dies_with_its_parent(process: "subprocess.Popen[bytes]") -> None:
    give(process, router())
    assert process.stdin is not None
    process.stdin.close()  # as the kernel does for a parent that is gone
    assert process.wait(20) == 3


def test_process_whose_parent_dies_before_the_assignment_ends_in_silence() -> None:
    ended = subprocess.run(COMMAND, stdin=subprocess.DEVNULL, capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (ORPHANED, b"", b"")


def test_users_error_is_marked(process: "subprocess.Popen[bytes]") -> None:
    config = GatewayConfig(model="/nowhere", routers=(Address("127.0.0.1", 1),))
    report = give(process, ProcessSpec(kind=Kind.GATEWAY, name="gateway-0", config=config))
    assert isinstance(report, ProcessFailed) and report.is_users_error
    assert report.reason.startswith("model '/nowhere'")
    assert process.wait(20) == 2


def test_other_errors_are_reported_too(process: "subprocess.Popen[bytes]") -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        report = give(process, router(taken.getsockname()[1]))
    assert isinstance(report, ProcessFailed) and not report.is_users_error
    assert "in use" in report.reason
    assert process.wait(20) != 0


def test_a_router_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from baton.cluster.process import main; sys.exit(main())"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE) as process:
        assert isinstance(give(process, router()), ProcessStarted)
        process.terminate()
        assert process.wait(20) == 0


def test_process_may_run_on_any_thread() -> None:
    stop, addresses = threading.Event(), []

    def tell(message: object) -> None:
        if isinstance(message, ProcessStarted):
            addresses.append(message.address)
            stop.set()

    given = msgspec.json.decode(assignment(router(), KEY), type=Assignment)
    thread = threading.Thread(target=run, args=(given, KeyRing(given.kind, given.generations), stop, tell))
    thread.start()
    thread.join(20)
    assert len(addresses) == 1 and not thread.is_alive()


def test_an_assignment_has_bounds() -> None:
    given = json.loads(assignment(router(), KEY))
    for wrong in ({"kind": "shell"}, {"key": ""}, {"command": "rm"}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(json.dumps(given | wrong), type=Assignment)
